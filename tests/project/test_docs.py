"""The docs: pages are on the site, which builds without a warning; what they name exists.

So does what docstrings refer to.
"""

import ast
import functools
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CONFIG = yaml.safe_load((ROOT / "mkdocs.yml").read_text())


def in_nav(items: object) -> set[str]:
    if isinstance(items, str):
        return {items}
    parts = items.values() if isinstance(items, dict) else items
    return set().union(*map(in_nav, parts))


def test_every_page_is_in_the_navigation():
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert pages - in_nav(CONFIG["nav"]) == set(), "add these pages to nav in mkdocs.yml"
    assert in_nav(CONFIG["nav"]) - pages == set(), "these are in nav and not in docs/"


def test_every_page_opens_with_what_its_reader_can_do_then():
    """Generated reports open with how they are generated, tutorials and the start with the task."""
    for page in DOCS.glob("*.md"):
        opening = page.read_text().split("\n\n")[1]
        assert page.stem == "index" or opening.startswith("After this page "), page


def test_links_between_pages_exist():
    for page in DOCS.rglob("*.md"):
        for link in re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


#: Pages whose paths and dotted names are checked.
WRITTEN = [ROOT / "README.md", ROOT / "ARCHITECTURE.md", *sorted(DOCS.rglob("*.md"))]
#: What follows ``opcast.`` in the names of entry points and of custom calls, which are no modules.
NO_MODULES = {"devices", "estimators", "op", "ops", "splits", "workloads"}
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FILE = re.compile(r"(?<![\w/.-])((?:[\w-]+/)*[\w.-]+\.(?:py|js|yaml|md|mlir|hlo))(?![\w/])")
_FOLDER = re.compile(r"`((?:[\w-]+/)+)`")
_DOTTED = re.compile(r"(?<![\w./\"-])opcast((?:\.\w+)+)")


@functools.cache
def repository() -> frozenset[str]:
    """Files of the repository, relative to its root."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return frozenset(f for f in listed.stdout.split() if (ROOT / f).exists())


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_files_and_folders_named_in_prose_exist(page):
    """Outside of fenced blocks: those hold what a reader writes and where commands write to."""
    files = repository()
    prose = _FENCED.sub("", page.read_text())
    tops = {file.split("/")[0] for file in files if "/" in file}
    for name in _FILE.findall(prose):
        if name.split("/")[0] in tops:
            assert name in files, name
        elif name.endswith((".py", ".js")):
            assert any(file == name or file.endswith(f"/{name}") for file in files), name
    for name in _FOLDER.findall(prose):
        if name.split("/")[0] in tops:
            assert (ROOT / name).is_dir(), name


@pytest.mark.parametrize("page", WRITTEN, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_dotted_names_in_pages_exist(page):
    for name in _DOTTED.findall(page.read_text()):
        parts = name.split(".")[1:]
        if parts[0] not in NO_MODULES and parts[0] != "cli":
            assert defined(parts), f"opcast{name}"


def defined(parts: list[str]) -> bool:
    """Whether the modules of a dotted name exist, and the last one defines what follows them."""
    folder = ROOT
    while parts and (folder / parts[0]).is_dir():
        folder, parts = folder / parts[0], parts[1:]
    module = folder / "__init__.py"
    if parts and (folder / f"{parts[0]}.py").is_file():
        module, parts = folder / f"{parts[0]}.py", parts[1:]
    return not parts or re.search(rf"\b{parts[0]}\b", module.read_text()) is not None


#: Modules of the package; docstrings of tests refer to little.
MODULES = sorted(f for f in repository() if f.endswith(".py") and not f.startswith("tests/"))
_ROLE = re.compile(r":\w+:`~?((?:opcast)?\.[\w.]+)`")
_QUOTED = re.compile(r"``([a-z_]\w*)``")
_TOPS = {Path(file).parts[0] for file in MODULES if "/" in file}
_QUOTED_DOTTED = re.compile(rf"``((?:{'|'.join(sorted(_TOPS))})(?:\.\w+)+)``")
_QUOTED_FILE = re.compile(r"``((?:\w+/)+\w+\.py)``")


@pytest.mark.parametrize("file", MODULES)
def test_modules_that_docstrings_refer_to_exist(file):
    """Relative ones start at the module's own folder, as in imports."""
    text = (ROOT / file).read_text(encoding="utf-8")
    folder = list(Path(file).parts[:-1])
    for name in _ROLE.findall(text):
        first, _, rest = name.partition(".")
        assert defined([*([] if first else folder), *rest.split(".")]), name
    for name in _QUOTED_DOTTED.findall(text):
        assert defined(name.split(".")), name
    for name in _QUOTED_FILE.findall(text):
        assert any(f == name or f.endswith(f"/{name}") for f in repository()), name


@pytest.mark.parametrize("file", [f for f in MODULES if f.endswith("__init__.py")])
def test_modules_that_a_folder_describes_exist(file):
    """Of what its docstring quotes: its modules and folders, or the folders at the top."""
    folder = ROOT / Path(file).parent
    known = {p.stem for p in folder.rglob("*") if p.is_dir() or p.suffix == ".py"}
    docstring = ast.get_docstring(ast.parse((ROOT / file).read_text(encoding="utf-8"))) or ""
    assert set(_QUOTED.findall(docstring)) <= known | _TOPS | {"opcast"}


@pytest.mark.exhaustive
def test_the_site_builds_strictly_and_fetches_nothing(tmp_path):
    if importlib.util.find_spec("mkdocs") is None or importlib.util.find_spec("material") is None:
        pytest.skip("pip install 'opcast[docs]'")
    site = tmp_path / "site"
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in in_nav(CONFIG["nav"]):
        text = (site / page).with_suffix(".html").read_text()
        fetched = re.findall(
            r"<(?:link|script|img)[^>]+(?:href|src)=[\"']?(https?:[^\"' >]+)", text
        )
        assert fetched == [], page
    assert not re.search(r"@import|fonts\.(?:googleapis|gstatic)", "".join(
        path.read_text(errors="replace") for path in site.rglob("*.html")
    ))  # fmt: skip
