"""The layout of the package: imports go down, none go round, packages are the folders."""

from __future__ import annotations

import ast
import subprocess
import tomllib
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
#: Folders from the top down. A folder imports only those below it; folders of one layer do not
#: know each other.
LAYERS = (
    ("__main__",),
    ("cli",),
    ("server",),
    ("workflows",),
    ("predict",),
    ("models",),
    ("simulate", "datagen"),
    ("features",),
    ("common",),
)


@cache
def _modules() -> dict[str, str]:
    """Files of the package by dotted name relative to the root, the root itself as ''."""
    listed = subprocess.run(
        ["git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard", "*.py"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    own = [f for f in listed if not f.startswith("tests/") and (ROOT / f).exists()]
    assert len(own) > 300
    return {_dotted(file): file for file in own}


def _dotted(file: str) -> str:
    parts = file.removesuffix(".py").split("/")
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def _imports() -> dict[str, frozenset[str]]:
    """Modules of the package that each of them imports, anywhere but for type checkers."""
    return {name: frozenset(_imported(name, file)) for name, file in _modules().items()}


def _imported(name: str, file: str) -> set[str]:
    package = file.split("/")[:-1]
    found = set()
    for node in _nodes(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        assert not isinstance(node, ast.Import) or not any(
            alias.name.split(".")[0] == "opcast" for alias in node.names
        ), f"{file}: imports of the package by itself are relative"
        if not isinstance(node, ast.ImportFrom) or not node.level:
            continue
        base = package[: len(package) - node.level + 1]
        base += node.module.split(".") if node.module else []
        for alias in node.names:
            whole, part = ".".join([*base, alias.name]), ".".join(base)
            target = whole if whole in _modules() else part
            assert target in _modules(), f"{file}: imports {target}, which is not there"
            # A package that gathers names of its own modules is no circle.
            if target != name and not name.startswith(f"{target}."):
                found.add(target)
    return found


def _nodes(tree: ast.AST):
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        yield node
        yield from _nodes(node)


def test_imports_go_down():
    level = {folder: depth for depth, layer in enumerate(LAYERS) for folder in layer}
    wrong = []
    for name, targets in _imports().items():
        top = name.split(".")[0]
        for target in targets:
            other = target.split(".")[0]
            if top and other and other != top and level[other] <= level[top]:
                wrong.append(f"{name} imports {target}")
    assert not wrong


def test_no_modules_import_each_other_in_a_circle():
    left = {name: set(targets) for name, targets in _imports().items()}
    while left:
        leaves = {name for name, targets in left.items() if not targets & left.keys()}
        assert leaves, "in circles: " + ", ".join(sorted(left))
        for name in leaves:
            del left[name]


def test_packages_are_the_folders():
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    folders = {str(Path(file).parent).replace("/", ".") for file in _modules().values()}
    assert sorted(stated) == sorted("opcast" if f == "." else f"opcast.{f}" for f in folders)


def test_every_folder_says_what_it_holds():
    folders = {Path(file).parent for file in _modules().values()}
    for folder in folders:
        text = (ROOT / folder / "__init__.py").read_text(encoding="utf-8")
        assert ast.get_docstring(ast.parse(text)), f"{folder} has no docstring"


def test_the_root_holds_nothing_but_the_packages_face():
    root = {file for file in _modules().values() if "/" not in file}
    assert root == {"__init__.py", "__main__.py"}


def test_tests_mirror_the_folders():
    """A folder of tests below those of a folder of the package is one of its folders, too."""
    own = {str(Path(file).parent) for file in _modules().values()}
    tops = {folder.split("/")[0] for folder in own}
    tests = ROOT / "tests"
    mirrored = [path.parent.relative_to(tests) for path in tests.rglob("test_*.py")]
    unknown = {str(p) for p in mirrored if p.parts and p.parts[0] in tops and str(p) not in own}
    assert not unknown
