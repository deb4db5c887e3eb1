"""Which line of a nested location somebody looks for."""

import pytest

from opcast.features.ir.mlir.locations import FRAMEWORK, user_line

ENV = "/env/lib/python3.11/site-packages"


@pytest.mark.parametrize(
    "file",
    [
        f"{ENV}/jax/_src/numpy/lax_numpy.py", f"{ENV}/flax/linen/linear.py", f"{ENV}/torch/nn/a.py",
        "/usr/lib/python3/dist-packages/numpy/core.py", "/usr/lib/python3.12/contextlib.py",
        "/home/me/jax/_src/api.py", "<frozen runpy>",
        "/env/bin/opcast", "C:\\env\\Scripts\\opcast.exe",
    ],
)  # fmt: skip
def test_frameworks(file):
    assert FRAMEWORK.search(file)


@pytest.mark.parametrize(
    "file",
    ["/home/me/model.py", f"{ENV}/opcast/datagen/zoo/llama.py", f"{ENV}/our_models/jax_net.py"],
)
def test_installed_models_are_not_frameworks(file):
    assert not FRAMEWORK.search(file)


def test_the_innermost_line_outside_of_frameworks_wins():
    nested = (
        f'loc(callsite("a"("{ENV}/flax/nnx/linear.py":9:1) at callsite("b"("{ENV}/models/net.py":'
        '31:2) at "/venv/bin/train":8:1)))'
    )
    found = user_line(nested, "step.mlir")
    assert (found.file, found.line, found.own) == (f"{ENV}/models/net.py", 31, True)


def test_what_starts_a_command_made_no_operator():
    starts = [f"{ENV}/typer/main.py", f"{ENV}/click/core.py", "/env/bin/opcast"]
    nested = "loc(callsite(" + " at ".join(f'"{file}":6:1' for file in starts) + "))"
    assert user_line(nested, "step.mlir") == ("step.mlir", 0, False)
    inner = nested.replace("callsite(", f'callsite("{ENV}/optax/update.py":42:1 at ')
    assert user_line(inner, "step.mlir") == (f"{ENV}/optax/update.py", 42, False)
    # A user's own folder of that name is no script.
    assert not FRAMEWORK.search("/home/me/opcast/model.py")
