"""The package as it is installed: what the wheel holds, and how it imports."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]


def run(code: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.slow
def test_wheel_holds_only_the_package(tmp_path):
    source = tmp_path / "source"
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    for name in filter(None, tracked.split("\0")):
        if (ROOT / name).is_file() and not name.startswith(("datagen/datasets/", "tests/")):
            target = source / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes((ROOT / name).read_bytes())
    built = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path, source],
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "warning" not in (built.stdout + built.stderr).lower()
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    tops = {name.split("/")[0] for name in names}
    assert tops == {"opcast", wheel.name.split("-py3")[0] + ".dist-info"}
    assert {"opcast/cli/main.py", "opcast/py.typed", "opcast/features/ir/program.py"} <= set(names)
    data = ("devices/h100-sxm.yaml", "devices/generations/architectures.yaml", "table/columns.toml")
    assert {f"opcast/features/{name}" for name in data} <= set(names)
    data = ("features/operators/families.yaml", "features/operators/fitted.yaml")
    assert {f"opcast/{name}" for name in data} <= set(names)
    assert "opcast/predict/operator/serving_kernels.yaml" in names
    pages = {f"opcast/predict/page/static/{name}" for name in ("page.css", "report.js")}
    assert pages <= set(names)
    assert not [n for n in names if n.startswith(("opcast/tests", "opcast/mlruns", "opcast/."))]
    shipped = {f"opcast/{name}" for name in tracked.split("\0") if "models/pretrained/" in name}
    assert len(shipped) > 200
    assert shipped <= set(names)
    # The shipped model comes along whole: it loads from where the wheel was unpacked.
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import opcast;"
    out = run(code + "print(opcast.__file__, opcast.load().model.name)", tmp_path)
    assert out.split() == [str(tmp_path / "site" / "opcast" / "__init__.py"), "xgboost"]


def test_imports_beside_packages_of_the_same_names(tmp_path):
    for name in ("models", "features", "predict"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("mine = True\n")
    out = run(
        "import models, features, predict, opcast, opcast.models.core.base;"
        "print(models.mine, features.mine, predict.mine, opcast.models.__name__)",
        tmp_path,
    )
    assert out.split() == ["True", "True", "True", "opcast.models"]


def test_the_citation_names_this_version_and_licence():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    same = ("title", "version", "license")
    assert [cited[key] for key in same] == [project[key] for key in ("name", *same[1:])]


def test_importing_loads_nothing_heavy(tmp_path):
    out = run("import sys, opcast; print(*sys.modules)", tmp_path)
    heavy = {"jax", "numpy", "pandas", "xgboost", "sklearn", "mlflow", "torch", "flax"}
    assert not heavy & set(out.split())


def test_help_loads_nothing_heavy(tmp_path):
    code = (
        "import sys\nfrom opcast.cli import main\nsys.argv = ['opcast', '--help']\n"
        "try:\n    main()\nexcept SystemExit:\n    pass\nprint('MODULES', *sys.modules)"
    )
    modules = set(run(code, tmp_path).split("MODULES")[1].split())
    assert not {"jax", "numpy", "pandas", "xgboost", "sklearn", "mlflow"} & modules


def test_import_loads_few_modules(tmp_path):
    """Their number stands for the time, which ``bench_import.py`` measures."""
    code = "import atexit, sys; atexit.register(lambda: print('COUNT', len(sys.modules)));"

    def modules(more: str) -> int:
        return int(run(code + more, tmp_path).split("COUNT")[1])

    plain = modules("")
    # 41 and 145 when this was written; NumPy alone is over a hundred.
    assert modules("import opcast") - plain < 70
    help_code = "sys.argv=['opcast','--help']; import opcast.cli as c; c.main()"
    assert modules(help_code) - plain < 200


def test_unknown_attribute_is_an_attribute_error():
    import opcast

    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        opcast.nonsense  # noqa: B018
    assert {"load", "Prediction", "lower"} <= set(dir(opcast))
