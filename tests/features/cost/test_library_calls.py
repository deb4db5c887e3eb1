"""Costs of custom calls from other packages."""

from importlib.metadata import EntryPoint

import pytest

from opcast.common import plugins
from opcast.common.errors import OpcastError
from opcast.features.cost import library_calls as custom_ops
from opcast.features.ir.program import Op, TensorType
from opcast.features.ir.reader import read_program
from opcast.features.lowering.lower import lower

PROGRAM = """func.func public @main(%x: tensor<8xNxf32>) -> tensor<8xNxf32> {
  %0 = stablehlo.custom_call @my_scan(%x) : (tensor<8xNxf32>) -> tensor<8xNxf32>
  return %0 : tensor<8xNxf32>
}"""


def lowered(width: int):
    """The only kernel, of a width of its own: costs of equal kernels are remembered."""
    source = read_program(PROGRAM.replace("N", str(width)))
    (kernel,) = lower(source, "op", cache=False).kernels
    return kernel


def scan(operands, results):
    assert results[0].shape == (8, 16)
    return 2 * operands[0].size, operands[0].size


def wrong(operands, results):
    return -1


@pytest.fixture
def package(monkeypatch):
    """Installs a rule for ``my_scan``."""

    def install(name: str) -> None:
        point = EntryPoint("my_scan", f"{__name__}:{name}", custom_ops.GROUP)
        monkeypatch.setattr(plugins, "found", lambda group: {"my_scan": point})
        monkeypatch.setattr(plugins, "load", lambda own: globals()[name])
        custom_ops._rule.cache_clear()

    yield install
    custom_ops._rule.cache_clear()


def test_a_rule_gives_flops_and_types_give_bytes(package):
    assert lowered(32).flops == 0
    package("scan")
    kernel = lowered(16)
    assert kernel.flops == 2 * 8 * 16
    assert kernel.bytes == 2 * 8 * 16 * 4  # one in, one out


def test_a_rule_that_returns_no_counts_is_named(package):
    package("wrong")
    with pytest.raises(OpcastError, match=r"opcast\.ops: my_scan: returned -1"):
        _ = lowered(48).flops


@pytest.mark.parametrize(
    ("target", "flops"),
    [
        # 2 n² (m - n / 3) for a QR, 9 n³ for eigenvalues; m = 12, n = 6.
        ("Qr", 2 * 6**2 * (12 - 6 / 3)),
        ("lapack_sgeqrf_ffi", 2 * 6**2 * (12 - 6 / 3)),
        ("Eigh", 9 * 6**3),
        # No routine of linear algebra, though their names have the letters of one.
        ("my_sqrt", 0.0),
        ("rsqrt_scaled", 0.0),
        ("weighted_sum", 0.0),
        ("neighbours", 0.0),
    ],
)
def test_routines_are_found_by_their_names_alone(target, flops):
    matrix = TensorType("f32", (12, 6))
    op = Op("", "custom-call", (0,), (matrix,), {"target": target})
    assert custom_ops.custom_call_flops(op, [matrix]) == (flops, 0.0)
