"""What two compilers made of the same programs, without a device: products in one form."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from opcast.features.cost.library_calls import unknown_calls
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels, kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.table import feature_table

DATA = Path(__file__).parents[1] / "data" / "absent"


def text_of(name: str) -> str:
    return (DATA / f"{name}.hlo").read_text()


def kernels_of(text: str) -> list[Kernel]:
    return extract_kernels(parse_hlo(text))[0]


def only(name: str, kind: str) -> Kernel:
    (found,) = [k for k in kernels_of(text_of(name)) if k.kind == kind]
    return found


def test_triton_and_cublas_give_the_same_kernel() -> None:
    # 0.5 · x @ w + c: one path fuses it into a Triton product, the other into alpha and beta.
    triton, cublas = only("h100_bmm", "gemm"), only("h100_cublas_bmm", "gemm")
    assert triton.ir == cublas.ir and triton.hash == cublas.hash
    product, epilogue = 2 * 8 * 512**3, 2 * 8 * 512 * 512
    assert triton.flops == product + epilogue
    # x, w, c in and the result out, two bytes each; the scratch space does not count.
    assert triton.bytes == 4 * 8 * 512 * 512 * 2


def test_a_call_without_an_epilogue_is_a_dot() -> None:
    kernel = only("h100_cublas_mv", "gemm")
    assert kernel.opcode == "dot"
    assert kernel.flops == 2 * 4096 * 4096
    assert kernel.op.results[0].nbytes == kernel.bytes_out == 4096 * 4
    assert "cublas" not in kernel.ir


@pytest.mark.parametrize(
    ("name", "per_element", "transcendentals"),
    # bias: add, maximum. gelu: add, x² and x³, scale, add, scale, add, half, times x; one tanh.
    [("bias", 2, 0), ("gelu", 9, 1)],
)
def test_epilogues_are_written_out(name: str, per_element: int, transcendentals: int) -> None:
    kernel = only(f"h100_cublas_{name}", "gemm")
    out = 512 * 512
    assert kernel.flops == 2 * 512**3 + per_element * out
    assert kernel.transcendentals == transcendentals * out
    assert kernel.bytes == 3 * out * 2 + 512 * 2
    again = kernel_from_ir(kernel.ir)
    assert (again.hash, again.kind, again.flops) == (kernel.hash, "gemm", kernel.flops)


def test_8_bit_products_keep_their_type_and_drop_unit_scales() -> None:
    kernel = only("h100_cublas_f8", "gemm")
    assert kernel.dtype == "f8e4m3fn" and kernel.opcode == "dot"
    assert kernel.bytes == 2 * 512 * 512 + 512 * 512 * 2


def test_an_auxiliary_result_is_the_value_before_the_activation() -> None:
    text = text_of("h100_cublas_gelu").replace("BIAS_GELU", "BIAS_GELU_AUX")
    out = "bf16[512,512]{1,0}"
    text = text.replace(f"({out}, s8[4194304]{{0}})", f"({out}, {out}, s8[4194304]{{0}})")
    (kernel,) = [k for k in kernels_of(text) if k.kind == "gemm"]
    assert kernel.op.is_tuple and len(kernel.op.results) == 2
    assert kernel.bytes_out == 2 * 512 * 512 * 2


def test_a_call_that_is_not_understood_stays_as_it_is() -> None:
    text = text_of("h100_cublas_gelu").replace("BIAS_GELU", "BIAS_SOMETHING")
    (kernel,) = [k for k in kernels_of(text) if k.kind == "gemm"]
    assert kernel.opcode == "custom-call" and kernel.flops == 2 * 512**3
    # Its scratch space is dropped all the same.
    assert kernel.bytes_out == 512 * 512 * 2


def test_convolutions_do_not_depend_on_algorithm_or_scratch_space() -> None:
    text = text_of("h100_conv_grad")
    with_device = text.replace('"algo_id":"-1"', '"algo_id":"28"').replace("u8[0]", "u8[1048576]")
    before, after = kernels_of(text), kernels_of(with_device)
    assert [k.hash for k in before] == [k.hash for k in after]
    convs = [k for k in after if k.kind == "conv"]
    targets = [str(k.op.attrs["target"]).removeprefix("__cudnn$conv") for k in convs]
    assert sorted(targets) == ["BackwardFilter"] * 2 + ["BackwardInput"] * 2 + ["Forward"] * 2
    # Outputs at the border meet two of three taps: 94 products a row of 32 in each dimension.
    assert {k.flops for k in convs} == {2.0 * 8 * 64 * 64 * 94 * 94}
    assert {k.op.attrs["dim_labels"] for k in convs} == {"b01f_o01i->b01f"}


def test_features_are_those_of_the_product(round_gpu) -> None:
    names = ("h100_bmm", "h100_cublas_bmm")
    table = feature_table([only(name, "gemm") for name in names], round_gpu())
    assert (table.X[0] == table.X[1]).all()


def test_tpu_products_kinds_and_cycles() -> None:
    kernel = only("v5e_bias", "gemm")
    assert kernel.cycles > 0
    assert kernel.flops == pytest.approx(2 * 512**3, rel=0.01)
    batched = next(k for k in kernels_of(text_of("v5e_bmm")) if k.flops > 0)
    assert batched.flops == pytest.approx(2 * 8 * 512**3, rel=0.01)
    # Prefetches, and a fusion that asserts that its indices are in bounds.
    kinds = [k.kind for k in kernels_of(text_of("v5e_gather"))]
    assert kinds.count("gather_scatter") == 1 and "custom_call" not in kinds
    pool = kernels_of(text_of("v5e_pool"))
    assert [k.cycles for k in pool if k.opcode == "select-and-scatter"] == [0.0]


def test_cycles_are_not_part_of_a_kernel() -> None:
    text = text_of("v5e_bias")
    kernel = only("v5e_bias", "gemm")
    other = text.replace(f'"estimated_cycles":"{kernel.cycles:.0f}"', '"estimated_cycles":"7"')
    changed = next(k for k in kernels_of(other) if k.kind == "gemm")
    assert changed.cycles == 7 and changed.hash == kernel.hash
    assert replace(kernel, cycles=0.0).ir == kernel.ir


#: What libtpu makes of ``jax.lax.ragged_dot`` on a TPU v5e, kernels' programs left out.
RAGGED = """HloModule m

ENTRY main {
  x = bf16[4096,512]{1,0} parameter(0)
  w = bf16[8,512,1024]{2,1,0} parameter(1)
  g = s32[8]{0} parameter(2)
  ragged-dot-metadata = (s32[9]{0}, s32[39]{0}, s32[39]{0}, s32[1]{0}) custom-call(g), CALL
  starts = s32[9]{0} get-tuple-element(ragged-dot-metadata), index=0
  group = s32[39]{0} get-tuple-element(ragged-dot-metadata), index=1
  tiles = s32[39]{0} get-tuple-element(ragged-dot-metadata), index=2
  first = s32[1]{0} get-tuple-element(ragged-dot-metadata), index=3
  ROOT ragged-dot-none = bf16[4096,1024] custom-call(first, starts, group, tiles, first, x, w), CALL
}
""".replace("CALL", 'custom_call_target="tpu_custom_call"')


def test_kernels_that_xla_makes_for_ragged_products_are_products() -> None:
    groups, product = kernels_of(RAGGED)
    assert unknown_calls(groups.body) == unknown_calls(product.body) == []
    assert groups.kind == "custom_call" and groups.flops == 0
    assert groups.bytes == 4 * (8 + 9 + 39 + 39 + 1)
    assert (product.opcode, product.kind) == ("ragged-dot", "gemm")
    # Each row meets the weights of one group; all weights are read.
    assert product.flops == 2 * 4096 * 512 * 1024
    assert product.bytes == 2 * (4096 * 512 + 8 * 512 * 1024 + 4096 * 1024) + 4 * 9
    # A kernel of the user's own stays unknown, as does one of other shapes.
    renamed = ("ragged-dot-none = bf16[4096,1024]", "mine = bf16[4096,1024]{0,1}")
    for old, new in (renamed, ("bf16[8,512,1024]", "bf16[8,256,1024]")):
        (other,) = (k for k in kernels_of(RAGGED.replace(old, new)) if k.op.type.dtype == "bf16")
        assert unknown_calls(other.body) == ["tpu_custom_call"]
