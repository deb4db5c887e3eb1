"""Functions as programs: the same answer wherever they are lowered, for every platform."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.experimental import io_callback
from jax.experimental import pallas as pl

import opcast
from opcast.common.errors import ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.jax_function import FunctionCall, is_function_path, load_function
from opcast.features.ir.platforms import Platform, evident_platform, platform_note, platform_of
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower

PLATFORMS = ("cpu", "cuda", "rocm", "tpu")
DEVICES = {"cuda": "h100-sxm", "rocm": "mi250", "tpu": "tpu-v5e", "cpu": "cpu"}
X = jax.ShapeDtypeStruct((64, 64), jnp.float32)


def opcodes(source):
    return {op.opcode for c in source.program.computations.values() for op in c.ops}


def targets(source):
    ops = [op for c in source.program.computations.values() for op in c.ops]
    return [op.attrs["target"] for op in ops if op.opcode == "custom-call"]


def dropout(key, x):
    return x * jax.random.bernoulli(key, 0.9, x.shape)


def sorted_on_cpus(x):
    return jax.lax.platform_dependent(x, cpu=jnp.sort, tpu=jnp.cos, default=lambda x: x @ x)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_random_numbers_are_those_of_the_platform(platform):
    key = jax.eval_shape(lambda: jax.random.key(0))
    source = read_program(dropout, key, X, platform=Platform(platform))
    # JAX rolls the rounds of Threefry into a loop on CPUs alone.
    assert ("while" in opcodes(source)) == (platform == "cpu")
    assert source.platforms == (platform,)


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_depends_on_the_platform_takes_its_branch(platform):
    expected = {"cpu": "sort", "tpu": "cosine", "cuda": "dot", "rocm": "dot"}
    source = read_program(sorted_on_cpus, X, platform=Platform(platform))
    assert opcodes(source) & {"sort", "cosine", "dot"} == {expected[platform]}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_an_export_for_several_platforms_has_one_platforms_branches(platform):
    key = jax.eval_shape(lambda: jax.random.key(0))

    def step(key, x):
        def body(carry, _):
            return sorted_on_cpus(carry), None

        return dropout(key, jax.lax.scan(body, x, None, length=3)[0])

    exported = export.export(jax.jit(step), platforms=PLATFORMS)(key, X)
    data = exported.serialize()
    whole = read_program(data)
    assert "conditional" in opcodes(whole) and whole.platforms == PLATFORMS
    one = read_program(data, platform=Platform(platform))
    alone = read_program(step, key, X, platform=Platform(platform))
    assert "conditional" not in opcodes(one)
    # The argument that chose is gone, and nothing but the loop of the branch is left.
    assert len(one.program.entry_computation.parameters) == 2
    kinds = {"sort", "cosine", "dot", "while"}
    assert opcodes(one) & kinds == opcodes(alone) & kinds
    assert whole.for_platform(Platform(platform)).content_hash == one.content_hash


def test_an_export_without_the_platform_takes_the_nearest():
    exported = export.export(jax.jit(sorted_on_cpus), platforms=("cpu", "cuda"))(X)
    amd = read_program(exported, platform=Platform("rocm"))
    assert amd.platforms == ("cuda",) and "dot" in opcodes(amd)
    assert "lowered for cuda, but mi250 needs rocm" in platform_note(amd, find_device("mi250"))


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_cudnn_attention_is_lowered_where_there_is_no_cudnn(capability):
    q = jax.ShapeDtypeStruct((2, 128, 4, 64), jnp.bfloat16)

    def attention(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    source = read_program(attention, q, platform=Platform("cuda", capability))
    assert targets(source) == ["__cudnn$fmhaSoftmax"]
    kernel = max(lower(source, "op").kernels, key=lambda k: k.flops)
    # Two products of 2·b·h·q·k·d each.
    assert kernel.flops == 2 * 2 * 2 * 4 * 128 * 128 * 64
    with pytest.raises(ProgramError, match=r"lowered for tpu: NotImpl.*platform_dependent"):
        read_program(attention, q, platform=Platform("tpu"))


@pytest.mark.parametrize("capability", [80, 90])
def test_head_sizes_follow_the_capability(capability):
    q = jax.ShapeDtypeStruct((2, 128, 4, 256), jnp.bfloat16)

    # JAX remembers traces by function: each capability has its own.
    def attention(q):
        return jax.nn.dot_product_attention(q, q, q, implementation="cudnn")

    if capability == 90:
        assert targets(read_program(attention, q, platform=Platform("cuda", 90)))
        return
    with pytest.raises(ProgramError, match="head dim must be <= 128"):
        read_program(attention, q, platform=Platform("cuda", 80))


def test_lowering_takes_the_devices_platform():
    key = jax.eval_shape(lambda: jax.random.key(0))
    here = read_program(dropout, key, X)
    assert here.platforms == ("cpu",)
    there = lower(here, "op", device="h100-sxm")
    assert not any(k.kind == "control" for k in there.kernels)
    assert not any("lowered for" in note for note in there.notes)


def test_a_file_for_another_platform_is_noted_loudly():
    key = jax.eval_shape(lambda: jax.random.key(0))
    data = export.export(jax.jit(dropout), platforms=["cpu"])(key, X).serialize()
    (note,) = [n for n in lower(data, "op", device="h100-sxm").notes if n.startswith("warning: ")]
    assert "lowered for cpu, but h100-sxm needs cuda" in note
    assert "opcast predict module.py:function --device h100-sxm" in note
    fixed = export.export(jax.jit(dropout), platforms=["cuda"])(key, X).serialize()
    assert not [n for n in lower(fixed, "op", device="h100-sxm").notes if "lowered for" in n]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_text_shows_its_platform_by_its_ops(platform):
    key = jax.eval_shape(lambda: jax.random.key(0))
    text = jax.jit(dropout).trace(key, X).lower(lowering_platforms=(platform,)).as_text()
    source = read_program(text)
    assert evident_platform(source) == ("cpu" if platform == "cpu" else "")
    assert bool(platform_note(source, find_device("tpu-v5e"))) == (platform == "cpu")


@pytest.mark.parametrize(
    ("platform", "target"), [("cpu", "lapack_spotrf_ffi"), ("cuda", "cusolver_potrf_ffi")]
)
def test_libraries_show_the_platform(platform, target):
    text = f"""
    func.func @main(%a: tensor<4x4xf32>) -> tensor<4x4xf32> {{
      %0 = stablehlo.custom_call @{target}(%a) : (tensor<4x4xf32>) -> tensor<4x4xf32>
      return %0 : tensor<4x4xf32>
    }}"""
    assert evident_platform(read_program(text)) == platform


def test_a_compiled_function_says_what_for():
    compiled = jax.jit(lambda x: x @ x).lower(jnp.ones((8, 8))).compile()
    source = read_program(compiled)
    assert "compiled for cpu, but h100-sxm needs cuda" in platform_note(
        source, find_device("h100-sxm")
    )


def test_platforms_of_devices():
    found = [platform_of(find_device(n)) for n in ("h100-sxm", "mi250", "tpu-v5e", "arc-b60")]
    tpu = Platform("tpu", kind="TPU v5 lite")
    assert found == [Platform("cuda", 90), Platform("rocm"), tpu, Platform("cuda")]


def test_keyword_arguments_and_fixed_values():
    def scaled(x, *, factor, name, train=False):
        assert name == "a" and train is True
        return x * factor

    source = read_program(scaled, X, factor=jnp.ones(()), name="a", train=True)
    assert [op.type.shape for op in source.program.entry_computation.parameters] == [(64, 64), ()]


def test_static_arguments_of_a_jitted_function():
    def power(x, n):
        return x**n if n > 1 else x

    jitted = jax.jit(power, static_argnames="n", donate_argnums=0)
    source = read_program(jitted, X, n=2)
    assert "multiply" in opcodes(source)
    assert source.program.aliases == ((0, 0),)


@dataclass(frozen=True)
class FilteredJit:
    """Like ``equinox.filter_jit``'s wrapper: frozen, its jitted function inside, no ``trace``."""

    _cached: object

    def __call__(self, *args):
        return self._cached(*args)

    def lower(self, *args):
        return FilteredLowered(self._cached.lower(*args))


@dataclass(frozen=True)
class FilteredLowered:
    lowered: object

    def as_text(self):
        return self.lowered.as_text()

    def compile(self):
        return self.lowered.compile()


def test_equinox_style_wrappers():
    equinox = FilteredJit(jax.jit(dropout, donate_argnums=1))
    key = jax.random.key(0)
    for platform in PLATFORMS:
        source = read_program(equinox, key, jnp.ones((64, 64)), platform=Platform(platform))
        assert ("while" in opcodes(source)) == (platform == "cpu")
        # Donation is the wrapper's business.
        assert source.program.aliases == ((0, 1),)
    assert read_program(equinox, key, X, platform=Platform("tpu")).platforms == ("tpu",)
    assert read_program(equinox.lower(key, jnp.ones((64, 64)))).platforms == ("cpu",)


@dataclass(frozen=True)
class FilteredCompiled:
    compiled: object


def test_equinox_style_compiled_functions():
    compiled = FilteredCompiled(jax.jit(lambda x: x @ x).lower(X).compile())
    assert "dot" in opcodes(read_program(compiled))


@jax.tree_util.register_dataclass
@dataclass(eq=False)
class Module:
    """Like ``equinox.Module``: a tree of arrays and functions that can be called."""

    weight: object
    activation: object

    def __call__(self, x):
        return self.activation(x @ self.weight)


@pytest.mark.parametrize("weight", [X, jnp.ones((64, 64)), np.ones((64, 64), np.float32)])
def test_modules_that_are_trees(weight):
    shapes = [(64, 64), (64, 64)]
    source = read_program(Module(weight, jnp.tanh), X, platform=Platform("tpu"))
    # Its parameters are arguments: as constants, they would be folded or copied.
    assert [op.type.shape for op in source.program.entry_computation.parameters] == shapes
    assert {"dot", "tanh"} <= opcodes(source)

    def step(module, x):
        return Module(module.weight - 0.1 * module(x), module.activation)

    # What is no array, such as the activation, is left out of the results.
    source = read_program(step, Module(weight, jnp.tanh), X)
    assert [op.type.shape for op in source.program.entry_computation.parameters] == shapes


def test_equinox():
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(64, 8, 32, 2, key=jax.random.key(0))

    @eqx.filter_jit
    def step(model, x, *, scale=1.0):
        grads = eqx.filter_grad(lambda m: scale * jax.vmap(m)(x).sum())(model)
        return eqx.apply_updates(model, grads)

    x = jnp.ones((4, 64))
    lowered = step.lower(model, x, scale=2.0)
    sources = [
        read_program(step, model, x, scale=2.0, platform=Platform("cuda", 90)),
        read_program(step, model, jax.ShapeDtypeStruct(x.shape, x.dtype)),
        read_program(lowered),
        read_program(lowered.compile()),
        read_program(jax.vmap(model), x),
        read_program(model, x[0]),
    ]
    assert all("dot" in opcodes(source) for source in sources)


def test_flax_nnx():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Linear(64, 8, rngs=nnx.Rngs(0))

    @nnx.jit
    def forward(model, x):
        return model(x)

    source = read_program(forward, model, jnp.ones((4, 64)), platform=Platform("cuda", 90))
    assert source.platforms == ("cuda",) and "dot" in opcodes(source)


def printed(x):
    jax.debug.print("{}", x.sum())
    return x @ x


def printed_in_order(x):
    jax.debug.print("{}", x.sum(), ordered=True)
    return x @ x


def from_the_host(x):
    return jax.pure_callback(np.asarray, jax.ShapeDtypeStruct(x.shape, x.dtype), x) @ x


def logged_in_a_loop(x):
    def body(x, _):
        io_callback(lambda _: None, None, x, ordered=True)
        return x @ x, None

    return jax.lax.scan(body, x, None, length=3)[0]


@pytest.mark.parametrize("lowering", ["op", "fused"])
@pytest.mark.parametrize("device", ["h100-sxm", "mi300x", "tpu-v5p"])
@pytest.mark.parametrize(
    ("function", "scalars", "matrices", "products"),
    # Numbers and 64 × 64 matrices that go to the host and come back.
    [
        (printed, 1, 0, 1),
        (printed_in_order, 1, 0, 1),
        (from_the_host, 0, 2, 1),
        (logged_in_a_loop, 0, 3, 3),
    ],
)
def test_calls_of_the_host_are_left_out(function, scalars, matrices, products, device, lowering):
    p = opcast.predict(function, X, device=device, lowering=lowering)
    # 2 · 64³ FLOPs of each product.
    gemms = [k for k in p.kernels if k.kind == "gemm"]
    assert sum(k.flops * k.multiplicity for k in gemms) == products * 2 * 64**3
    (note,) = [n for n in p.notes if n.startswith("calls of the host")]
    moved = float(re.search(r"transfers of (\S+) MB", note)[1]) * 1e6
    # A TPU waits for a call without results by a number that it receives.
    assert moved == pytest.approx(4 * scalars + 64 * 64 * 4 * matrices, abs=4 * products)
    assert not any(n.startswith("no cost is known") for n in p.notes)


def test_a_kernel_for_tpus_is_lowered_for_each_without_one():
    """Blocks of one dimension ask for the generation."""

    def scale(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2.0

    def f(x):
        return pl.pallas_call(
            scale,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(4,),
            in_specs=[pl.BlockSpec((1024,), lambda i: (i,))],
            out_specs=pl.BlockSpec((1024,), lambda i: (i,)),
        )(x)

    for name in ("tpu-v4", "tpu-v5p", "tpu-v6e", "tpu-v7x"):
        source = read_program(f, jnp.ones(4096), platform=platform_of(find_device(name)))
        assert targets(source) == ["tpu_custom_call"]


def test_errors_tell_tracing_from_lowering():
    def wrong(x):
        return x @ jnp.ones((3, 3))

    with pytest.raises(ProgramError, match=r"wrong.*cannot be traced.*jax\.eval_shape"):
        opcast.predict(wrong, X, device="h100-sxm")
    with pytest.raises(ProgramError, match=r"wrong.*cannot be traced.*example arguments"):
        opcast.predict(jax.jit(wrong), device="h100-sxm")


class Linear:
    """As equinox' modules: a tree whose leaves are arrays and functions."""

    def __init__(self, weight, activation):
        self.weight, self.activation = weight, activation

    def __call__(self, x):
        return self.activation(x @ self.weight)


jax.tree_util.register_pytree_node(
    Linear, lambda m: ((m.weight, m.activation), None), lambda _, leaves: Linear(*leaves)
)


@jax.tree_util.register_dataclass
@dataclass
class Static:
    """A module whose function is no leaf."""

    weight: object
    activation: object = field(metadata={"static": True}, default=jnp.tanh)

    def __call__(self, x):
        return self.activation(x @ self.weight)


class Counted:
    """A module that changes in place, as those of flax.nnx."""

    def __init__(self, weight):
        self.weight = weight

    def step(self, x):
        grad = jax.grad(lambda w: ((x @ w) ** 2).sum())(self.weight)
        self.weight = self.weight - 0.1 * grad


jax.tree_util.register_pytree_node(
    Counted, lambda m: ((m.weight,), None), lambda _, leaves: Counted(*leaves)
)


def update(model, x):
    """Returns nothing: what it changes is what it is for."""
    model.step(x)


PRODUCT = 2 * 64**3


@pytest.mark.parametrize(
    ("function", "args", "kwargs", "products"),
    [
        (lambda m, x: m(x), (Linear(X, jnp.tanh), X), {}, 1),
        (Linear(X, jnp.tanh), (X,), {}, 1),
        (lambda m, x: m(x), (Static(X), X), {}, 1),
        (Static(X), (X,), {}, 1),
        # What functions return beside arrays, or take to choose.
        (lambda m, x: (m, m(x), "said"), (Linear(X, jnp.tanh), X), {}, 1),
        (lambda x, n: jnp.linalg.matrix_power(x, n), (X, 4), {}, 2),
        (lambda x, shape: x.reshape(shape) @ jnp.ones((128, 128)), (X, (32, 128)), {}, 2),
        (lambda x, how: x @ x if how == "twice" else x, (X, "twice"), {}, 1),
        (partial(lambda w, x: x @ w, X), (X,), {}, 1),
        (partial(lambda x, w: x @ w, w=X), (X,), {}, 1),
        (partial(lambda x, n: jnp.linalg.matrix_power(x, n), n=2), (X,), {}, 1),
        # Forward, and the gradient's product.
        (update, (Counted(X), X), {}, 2),
        (update, (), {"model": Counted(X), "x": X}, 2),
    ],
)
def test_arguments_of_any_kind(function, args, kwargs, products):
    source = read_program(function, *args, platform=Platform("cuda", 90), **kwargs)
    gemms = [k for k in lower(source, "fused", cache=False).kernels if k.kind == "gemm"]
    assert sum(k.flops for k in gemms) == pytest.approx(products * PRODUCT, rel=0.02)


def test_a_module_of_flax_says_what_to_give():
    linen = pytest.importorskip("flax.linen")
    module = linen.Dense(64)
    with pytest.raises(ProgramError, match=r"opcast\.predict\(module\.apply, jax\.eval_shape"):
        read_program(module, X)
    variables = jax.eval_shape(module.init, jax.random.key(0), X)
    assert "dot" in opcodes(read_program(module.apply, variables, X))


def test_traced_functions():
    traced = jax.jit(sorted_on_cpus).trace(X)
    assert "dot" in opcodes(read_program(traced, platform=Platform("cuda")))


def test_arguments_of_something_else_are_refused():
    with pytest.raises(ProgramError, match=r"given some: int, devcie .*misspelt"):
        read_program("model.mlir", 3, devcie="h100-sxm")


MODULE = """
import jax, jax.numpy as jnp
from helper import WIDTH

def double(x, scale=2.0):
    return x * scale

def pair(x, y):
    return x + y

pair.example_args = (jnp.ones((4, WIDTH)), jax.ShapeDtypeStruct((4, WIDTH), jnp.float32))

class Config: ...

value = 3
"""


@pytest.fixture
def module(tmp_path: Path) -> Path:
    (tmp_path / "helper.py").write_text("WIDTH = 8\n")
    path = tmp_path / "mine.py"
    path.write_text(MODULE)
    return path


def test_functions_of_a_file(module: Path):
    call = load_function(f"{module}:pair")
    shapes = [op.type.shape for op in read_program(call).program.entry_computation.parameters]
    assert shapes == [(4, 8), (4, 8)]
    module.write_text(MODULE + "\ndef example_args():\n    return (jnp.ones(3),), {'scale': 4.0}\n")
    call = load_function(f"{module}:double")
    assert call.kwargs == {"scale": 4.0} and np.shape(call.args[0]) == (3,)
    module.write_text(MODULE + "\nexample_args = (jnp.ones(3),)\nexample_kwargs = {'scale': 4.0}\n")
    call = load_function(f"{module}:double")
    assert call.kwargs == {"scale": 4.0} and np.shape(call.args[0]) == (3,)
    # A pair of a tuple and a dictionary is two arguments where keywords are given beside it.
    module.write_text(MODULE + "\nexample_args = (jnp.ones(3),), {}\nexample_kwargs = {}\n")
    assert len(load_function(f"{module}:double").args) == 2
    module.write_text(MODULE + "\ndef example_kwargs(): return {'x': jnp.ones(3)}\n")
    call = load_function(f"{module}:double")
    assert call.args == () and list(call.kwargs) == ["x"]
    # The function's own arguments come before the module's.
    assert len(load_function(f"{module}:pair").args) == 2


@pytest.mark.parametrize(
    ("text", "name", "message"),
    [
        (MODULE, "double", "no example arguments .*FUNCTION.example_args"),
        (MODULE, "tripel", "no function 'tripel' .*double, pair"),
        (MODULE, "value", "no function 'value'"),
        (MODULE + "\nexample_args = 3\n", "double", "is a int, not a tuple"),
        (MODULE + "\nexample_kwargs = 3\n", "double", "example_kwargs is not a dictionary"),
        (MODULE + "\ndef example_args(): return 1 / 0\n", "double", "fails: ZeroDivisionError"),
        ("import nothing_like_it\n", "f", "importing it fails: ModuleNotFoundError"),
        ("raise SystemExit(3)\n", "f", "importing it fails: SystemExit.*__main__"),
    ],
)  # fmt: skip
def test_faults_of_a_file_are_named(module: Path, text, name, message):
    module.write_text(text)
    with pytest.raises(ProgramError, match=message):
        load_function(f"{module}:{name}")


def test_function_paths():
    assert is_function_path("a/b.py:step") and is_function_path("C:/x.py:f")
    assert not any(map(is_function_path, ("a.mlir", "a.py", "a.py:3", "b.mlir:f")))
    with pytest.raises(ProgramError, match="no such file"):
        load_function("/nowhere/x.py:f")


def test_reading_a_path_never_imports_it(module: Path):
    # Programs from elsewhere are read by the same function; only the command line imports.
    with pytest.raises(ProgramError, match="cannot read the program"):
        read_program(f"{module}:pair")
    with pytest.raises(ProgramError, match=r"mine.py: this is Python source.*FILE.py:FUNCTION"):
        read_program(module)


def test_calls_are_programs():
    call = FunctionCall(jax.jit(sorted_on_cpus), (X,), origin="mine")
    assert read_program(call, platform=Platform("tpu")).origin == "mine"
    with pytest.raises(
        ProgramError, match=r"mine: the function cannot be traced.*TypeError.*example"
    ):
        read_program(FunctionCall(sorted_on_cpus, (), origin="mine"))


def test_a_missing_function_is_told_those_that_are_there(tmp_path):
    module = tmp_path / "att.py"
    module.write_text(
        "import jax, jax.numpy as jnp\nS, bf = jax.ShapeDtypeStruct, jnp.bfloat16\n"
        "def step(x): return x\ndef example_args(): return (S((2,), bf),)\n"
    )
    with pytest.raises(ProgramError, match=r"no function 'stop' \(it has: step\)$"):
        load_function(f"{module}:stop")
