"""The Dockerfile, as far as it can be tried where no Docker engine runs."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "Dockerfile").read_text()
IGNORED = [line for line in (ROOT / ".dockerignore").read_text().split() if line]


def instructions() -> list[tuple[str, str]]:
    """Instructions with their arguments, continued lines joined."""
    plain = "\n".join(line for line in TEXT.splitlines() if not line.startswith("#"))
    joined = plain.replace("\\\n", " ")
    return [
        (word.upper(), " ".join(rest.split()))
        for word, _, rest in (line.strip().partition(" ") for line in joined.splitlines())
        if word
    ]


def stages() -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for word, rest in instructions():
        if word == "FROM":
            found.append([])
        found[-1].append((word, rest))
    return found


def ignored(path: Path) -> bool:
    """Whether ``.dockerignore`` leaves out a file of the repository."""
    parts = path.relative_to(ROOT).parts
    prefixes = ["/".join(parts[: i + 1]) for i in range(len(parts))]
    for pattern in IGNORED:
        for prefix in prefixes:
            names = [prefix] if not pattern.startswith("**/") else prefix.split("/")
            if any(
                fnmatch.fnmatchcase(name, pattern.removeprefix("**/"))
                and ("/" in pattern.removeprefix("**/") or "/" not in name)
                for name in names
            ):
                return True
    return False


def test_the_image_is_slim_pinned_and_not_run_as_root():
    build, final = stages()
    for (word, image), *_ in (build, final):
        assert word == "FROM" and re.match(r"python:3\.1[123]-slim-\w+", image)
    words = [word for word, _ in final]
    assert "USER" in words and words.index("USER") < words.index("ENTRYPOINT")
    (user,) = (rest for word, rest in final if word == "USER")
    assert user not in ("root", "0")
    assert any("useradd" in rest and user in rest for word, rest in final if word == "RUN")
    assert json.loads(dict(final)["ENTRYPOINT"]) == ["opcast"]
    assert "ADD" not in {word for word, _ in instructions()}
    assert "build" in build[0][1].split() and any("--from=build" in rest for _, rest in final)


def test_what_pip_is_told_exists():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    arguments = dict(rest.split("=", 1) for word, rest in instructions() if word == "ARG")
    lines = [rest for word, rest in instructions() if word == "RUN" and rest.startswith("pip")]
    assert len(lines) == 2
    torch, package = (shlex.split(line) for line in lines)
    assert torch[:3] == ["pip", "install", "$TORCH"]
    pinned = re.search(r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None and arguments["TORCH"].strip('"') == pinned[1]
    found = re.fullmatch(r"/src\[([\w,]+)\]", package[2])
    assert found is not None and set(found[1].split(",")) <= set(extras)


def test_constraints_pin_all_dependencies_within_their_bounds():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if not line.startswith("#"))
    wanted = [
        *project["dependencies"],
        *(r for name in ("track", "gnn", "serve") for r in extras[name]),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.marker is None or requirement.marker.evaluate():
            assert requirement.specifier.contains(pins[canonicalize_name(requirement.name)])
            assert "<" in str(requirement.specifier), requirement
    (package,) = (rest for word, rest in instructions() if word == "RUN" and "/src[" in rest)
    assert "--constraint /src/constraints.txt" in package and not ignored(ROOT / "constraints.txt")


def test_the_server_in_the_image_is_watched():
    (check,) = (rest for word, rest in instructions() if word == "HEALTHCHECK")
    assert "8000/health" in check
    command = json.loads(check[check.index("[") :])
    compile(command[2], "HEALTHCHECK", "exec")


def test_what_the_package_needs_is_not_ignored():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    needed = [ROOT / "pyproject.toml", ROOT / "README.md", ROOT / "LICENSE", ROOT / "py.typed"]
    for package in project["tool"]["setuptools"]["packages"]:
        needed += (ROOT / package.removeprefix("opcast").replace(".", "/").lstrip("/")).glob("*.py")
    needed += ROOT.glob("features/devices/*.yaml")
    needed += (p for p in ROOT.glob("models/pretrained/**/*") if p.is_file())
    assert len(needed) > 300
    assert [path for path in needed if ignored(path)] == []
    for name in (".git/config", ".venv/bin/python", "tests/conftest.py", "mlruns/mlflow.db",
                 "features/__pycache__/ir.pyc"):  # fmt: skip
        assert ignored(ROOT / name), name


@pytest.mark.slow
@pytest.mark.exhaustive  # it installs the package anew
def test_what_is_copied_installs_and_runs(tmp_path):
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("not a clone")
    for name in filter(None, listed.stdout.split("\0")):
        if not ignored(ROOT / name) and (ROOT / name).is_file():
            (tmp_path / "src" / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tmp_path / "src" / name)
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run(
        [*pip, "--no-build-isolation", "--target", tmp_path / "site", tmp_path / "src"], check=True
    )
    code = (f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import opcast; "
            "assert 'site' in opcast.__file__; sys.argv = ['opcast', 'models']; "
            "from opcast.cli import main; main()")  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "gpu-operators" in done.stdout


def test_docker_itself_finds_nothing_wrong():
    if shutil.which("docker") is None:
        pytest.skip("no docker")
    done = subprocess.run(
        ["docker", "build", "--check", "."], cwd=ROOT, capture_output=True, text=True, check=False
    )
    text = done.stdout + done.stderr
    if "unknown flag" in text or "buildx" in text or "connect to the Docker daemon" in text:
        pytest.skip("docker here cannot check")
    assert done.returncode == 0, text
