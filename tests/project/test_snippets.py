"""Every Python example of the pages is run, with what its page takes as given.

Those of the README and the tutorials are run by ``test_readme.py`` and ``test_tutorials.py``.
"""

import ast
import inspect
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SNIPPETS = [
    (page.stem, number, text)
    for page in sorted((ROOT / "docs").glob("*.md"))
    for number, text in enumerate(BLOCK.findall(page.read_text()))
]
#: Examples that train, import or search for minutes, or that read tables that are not here: what
#: they import exists, and takes the arguments that they name.
LONG = {("collectives", 2), ("models", 0), ("operators", 0), ("plan", 0)}
_TANH = """
import jax.numpy as jnp, opcast
opcast.save(jnp.tanh, jnp.ones((8, 8)), path="model.mlir", device="h100-sxm")
"""
#: Examples that take tens of seconds.
SLOW = {("torch", 0), ("zoo", 0)}
#: What the text before an example says that there is.
GIVEN = {
    "backends": f"{_TANH}kernel = opcast.lower('model.mlir', 'fused').kernels[0]",
    "devices": f"""{_TANH}
from pathlib import Path
Path("model.mlir").rename("a.mlir")
Path("big-h100.yaml").write_text("base: h100-sxm\\nhbm_bandwidth_gbps: [3350, 4800]\\n")
""",
    "ir": _TANH,
    "lowering": """
import jax
step = jax.jit(lambda state, batch: state + batch)
state = params = jax.numpy.ones(8)
batch = jax.numpy.ones(8)
""",
    "plan": "import opcast",
}


@pytest.mark.parametrize(
    ("page", "number", "text"),
    [
        pytest.param(*own, id=f"{own[0]}-{own[1]}", marks=[pytest.mark.slow] * (own[:2] in SLOW))
        for own in SNIPPETS
    ],
)
def test_python_examples_of_a_page_work(page, number, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    known: dict[str, object] = {}
    exec(GIVEN.get(page, ""), known)
    if (page, number) not in LONG:
        exec(text, known)
        return
    tree = ast.parse(text)
    imports = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    exec(compile(ast.Module(imports, []), page, "exec"), known)
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        if ast.unparse(call.func).partition(".")[0].split("(")[0] in known:
            named = {own.arg: None for own in call.keywords}
            inspect.signature(_found(call.func, known)).bind(*call.args, **named)


def _found(node: ast.expr, known: dict[str, object]) -> object:
    """What a dotted name stands for; a class that is called on the way is made."""
    match node:
        case ast.Name(id=name):
            return known[name]
        case ast.Attribute(value=value, attr=name):
            return getattr(_found(value, known), name)
        case ast.Call(func=function, args=[], keywords=[]):
            made = _found(function, known)
            assert isinstance(made, type)
            return made()
    raise AssertionError(ast.unparse(node))
