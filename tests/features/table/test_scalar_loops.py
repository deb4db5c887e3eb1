from __future__ import annotations

from dataclasses import replace
from math import lgamma, log

import pytest

from opcast.features.devices.device import DeviceSpec, MemoryLevel
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.scalar_loops import scalar_seconds

CLOCK = 2.6e9
DEVICE = DeviceSpec(
    "d", "cpu", {"f32": 200e9}, {"f32": 60e9},
    (MemoryLevel(32 << 20, 126e9), MemoryLevel(25e9, 48e9)), floor=1e-6, core_count=2,
    clock_hz=CLOCK,
)  # fmt: skip
ARGMAX = """
  %worse = pred[] compare(%a, %c), direction=GT
  %nan = pred[] compare(%a, %a), direction=NE
  %kept = pred[] or(%worse, %nan)
  %value = {0}[] select(%kept, %a, %c)
  %place = s32[] select(%kept, %b, %d)"""
EXTREMES = """
  %value = {0}[] minimum(%a, %c)
  %place = {1}[] maximum(%b, %d)"""


def joint(
    shape: str, result: str, dims: str, steps: str, types: tuple[str, str] = ("f32", "s32")
) -> Kernel:
    """A reduction of two arrays together."""
    one, two = types
    text = f"""HloModule m
%step (a: {one}[], b: {two}[], c: {one}[], d: {two}[]) -> ({one}[], {two}[]) {{
  %a = {one}[] parameter(0)
  %b = {two}[] parameter(1)
  %c = {one}[] parameter(2)
  %d = {two}[] parameter(3){steps.format(one, two)}
  ROOT %t = ({one}[], {two}[]) tuple(%value, %place)
}}
ENTRY %main (x: {one}[{shape}], y: {two}[{shape}]) -> ({one}[{result}], {two}[{result}]) {{
  %x = {one}[{shape}] parameter(0)
  %y = {two}[{shape}] parameter(1)
  %u = {one}[] constant(0)
  %v = {two}[] constant(0)
  ROOT %r = ({one}[{result}], {two}[{result}]) reduce(%x, %y, %u, %v),
    dimensions={{{dims}}}, to_apply=%step
}}"""
    return Kernel("k", "reduce", parse_hlo(text), "", "")


def fused(body: str, parameter: str, result: str, kind: str, config: str = "") -> Kernel:
    text = f"""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}
%most (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] maximum(%a, %b)
}}
%inner (p: {parameter}) -> {result} {{
  %p = {parameter} parameter(0)
  %zero = f32[] constant(0)
{body}
}}
ENTRY %main (x: {parameter}) -> {result} {{
  %x = {parameter} parameter(0)
  ROOT %k = {result} fusion(%x), kind={kind}, calls=%inner{config}
}}"""
    return Kernel("k", "fusion", parse_hlo(text), "", "")


def column(shape: str, columns: str, dims: str = "0", step: str = "add") -> Kernel:
    """A reduction by the library."""
    config = ', backend_config={"fusion_config":{"kind":"__ynn_fusion"}}'
    body = f"  ROOT %r = f32[{columns}] reduce(%p, %zero), dimensions={{{dims}}}, to_apply=%{step}"
    return fused(body, f"f32[{shape}]", f"f32[{columns}]", "kCustom", config)


def turned(rows: int, columns: int, first: str = "negate") -> Kernel:
    """``negate(x).T``, as XLA:CPU writes it: a transposition that moves nothing, and a copy."""
    body = f"""  %n = f32[{rows},{columns}] {first}(%p)
  %t = f32[{columns},{rows}]{{0,1}} transpose(%n), dimensions={{1,0}}
  ROOT %c = f32[{columns},{rows}]{{1,0}} copy(%t)"""
    return fused(body, f"f32[{rows},{columns}]", f"f32[{columns},{rows}]", "kLoop")


def sort(rows: int, length: int, dtype: str, compare: str) -> Kernel:
    text = f"""HloModule m
%before (a: {dtype}[], b: {dtype}[]) -> pred[] {{
  %a = {dtype}[] parameter(0)
  %b = {dtype}[] parameter(1)
{compare}
}}
ENTRY %main (x: {dtype}[{rows},{length}]) -> {dtype}[{rows},{length}] {{
  %x = {dtype}[{rows},{length}] parameter(0)
  ROOT %s = {dtype}[{rows},{length}] sort(%x), dimensions={{1}}, to_apply=%before
}}"""
    return Kernel("k", "sort", parse_hlo(text), "", "")


PLAIN = "  ROOT %l = pred[] compare(%a, %b), direction=LT"
TOTAL = """  %m = f32[] negate(%a)
  %n = f32[] negate(%b)
  ROOT %l = pred[] compare(%m, %n), direction=GT"""
TWO = ("f32", "f32")


def seconds(kernel: Kernel, device: DeviceSpec = DEVICE) -> float:
    return float(scalar_seconds([kernel], device)[0])


@pytest.mark.parametrize(
    ("shape", "result", "dims"), [("4096,512", "512", "0"), ("512,4096", "512", "1")]
)
def test_argmax_is_a_chain_of_three_steps_an_element(shape: str, result: str, dims: str) -> None:
    # Compare, or, select: 3 cycles each, on both cores; 32 elements run beside the next column's.
    chained = 512 * (4096 - 32) * 9 / CLOCK / 2
    assert seconds(joint(shape, result, dims, ARGMAX)) == pytest.approx(chained)


def test_one_result_leaves_one_core_to_it() -> None:
    chained = (65536 - 32) * 9 / CLOCK
    assert seconds(joint("65536", "", "0", ARGMAX)) == pytest.approx(chained)


def test_what_may_be_reordered_along_rows_is_no_chain() -> None:
    assert seconds(joint("512,4096", "512", "1", EXTREMES, TWO)) == 0.0
    assert seconds(joint("512,4096", "512", "1", ARGMAX, ("s32", "s32"))) == 0.0
    assert seconds(joint("4096,500", "500", "0", EXTREMES, TWO)) == pytest.approx(
        500 * (4096 - 32) * 3 / CLOCK / 2
    )
    # Integers take a cycle a step.
    assert seconds(joint("4096,500", "500", "0", ARGMAX, ("s32", "s32"))) == pytest.approx(
        500 * (4096 - 32) * 3 / CLOCK / 2
    )


def test_lines_a_power_of_two_apart_leave_the_caches() -> None:
    # 2048 rows of 8 KiB share the sets of 16 MiB: more than a core's caches have.
    far = seconds(joint("2048,2048", "2048", "0", EXTREMES, TWO))
    assert far == pytest.approx(2048 * 2048 * 8 / CLOCK / 2)
    # 128 rows of 8 KiB find room.
    chained = 2048 * (128 - 32) * 3 / CLOCK / 2
    assert seconds(joint("128,2048", "2048", "0", EXTREMES, TWO)) == pytest.approx(chained)


def test_library_sums_up_to_16384_columns_in_registers() -> None:
    assert seconds(column("64,16384", "16384")) == 0.0
    assert seconds(column("64,2,10000", "2,10000")) == pytest.approx(64 * 20000 * 11 / CLOCK / 2)
    assert seconds(column("64,40000", "40000")) == pytest.approx(64 * 40000 * 22 / CLOCK / 2)
    assert seconds(column("64,20000", "20000", step="most")) == pytest.approx(
        64 * 20000 * 4.5 / CLOCK / 2
    )
    # Not along rows, nor of rows in several blocks.
    assert seconds(column("64,20000", "64", "1")) == 0.0
    assert seconds(column("8,64,20000", "8,20000", "1")) == 0.0


def test_sort_compares_as_often_as_an_order_has_bits() -> None:
    comparisons = 16 * lgamma(1001) / log(2)
    assert seconds(sort(16, 1000, "f32", TOTAL)) == pytest.approx(comparisons * 30 / CLOCK)
    assert seconds(sort(16, 1000, "s32", PLAIN)) == 0.0


def test_transposition_of_what_a_kernel_computes_goes_down_columns() -> None:
    assert seconds(turned(2048, 2048)) == pytest.approx(2048 * 2048 * 8 / CLOCK / 2)
    # Rows that share no set, few rows, and an array that is turned as it lies.
    assert seconds(turned(2048, 2040)) == 0.0
    assert seconds(turned(64, 2048)) == 0.0
    assert seconds(turned(2048, 2048, "bitcast")) == 0.0


@pytest.mark.parametrize(
    ("kernel", "measured_ms"),
    [
        (joint("4096,4096", "4096", "0", ARGMAX), 39.6),
        (joint("4096,4096", "4096", "1", ARGMAX), 36.8),
        (joint("65536,64", "64", "0", ARGMAX), 10.6),
        (joint("2048,2048", "2048", "0", EXTREMES, TWO), 12.7),
        (column("64,65536", "65536"), 18.4),
        (column("1024,32000", "32000"), 124.1),
        (column("64,65536", "65536", step="most"), 7.4),
        (sort(1024, 1024, "f32", TOTAL), 131.2),
        (sort(1, 1 << 20, "f32", TOTAL), 255.0),
        (turned(2048, 2048), 11.7),
        (turned(4096, 4096), 63.2),
    ],
)
def test_bounds_are_near_what_two_cores_at_26_ghz_take(kernel: Kernel, measured_ms: float) -> None:
    """Best of many runs by jax 0.10.2 on two cores of Zen 4."""
    assert 0.4 < seconds(kernel) * 1e3 / measured_ms < 1.15


def test_other_platforms_have_no_such_loops() -> None:
    gpu = replace(DEVICE, platform="gpu")
    assert seconds(joint("4096,512", "512", "0", ARGMAX), gpu) == 0.0


def product(result: str, left: str, right: str, rhs: int = 0, lhs: int = 1) -> Kernel:
    text = f"""HloModule m
ENTRY %main (x: {left}, y: {right}) -> {result} {{
  %x = {left} parameter(0)
  %y = {right} parameter(1)
  ROOT %r = {result} dot(%x, %y), lhs_contracting_dims={{{lhs}}}, rhs_contracting_dims={{{rhs}}}
}}"""
    return Kernel("k", "gemm", parse_hlo(text), "", "")


@pytest.mark.parametrize(
    ("kernel", "cycles"),
    [
        # Columns 512 bytes apart use an eighth of the sets of L1 and fit L2; both operands' do.
        (product("s8[512,512]", "s8[512,512]", "s8[512,512]"), 3.6 * 512**3),
        (product("s8[512,512]", "s8[512,512]", "s8[512,512]", lhs=0), 7.2 * 512**3),
        (product("s8[300,300]", "s8[300,300]", "s8[300,300]"), 0.5 * 300**3),
        # Columns 4096 bytes apart fit neither.
        (product("s64[512,512]", "s64[512,512]", "s64[512,512]"), 8.0 * 512**3),
        # Rows are vectorised, vectors are tiled, and these types have libraries.
        (product("s8[512,512]", "s8[512,512]", "s8[512,512]", rhs=1), 0.1 * 512**3),
        (product("s8[1,512]", "s8[1,512]", "s8[512,512]"), 0.0),
        (product("s32[512,512]", "s8[512,512]", "s8[512,512]"), 0.0),
        # Vector instructions multiply s32, on both cores.
        (product("s32[512,512]", "s32[512,512]", "s32[512,512]"), 0.15 / 2 * 512**3),
        (product("s32[512,512]", "u8[512,512]", "u8[512,512]"), 0.15 / 2 * 512**3),
        (product("f32[512,512]", "f32[512,512]", "f32[512,512]"), 0.0),
    ],
)
def test_products_of_types_without_a_library_are_loops(kernel: Kernel, cycles: float) -> None:
    assert scalar_seconds([kernel], DEVICE)[0] == pytest.approx(cycles / CLOCK)


def elementwise(opcode: str, kind: str = "f32", other: str = "%q") -> Kernel:
    """A function of two arrays, or of one and a constant."""
    text = f"""HloModule m
ENTRY %main (p: {kind}[1000,1000], q: {kind}[1000,1000]) -> {kind}[1000,1000] {{
  %p = {kind}[1000,1000] parameter(0)
  %q = {kind}[1000,1000] parameter(1)
  %seven = {kind}[] constant(7)
  %sevens = {kind}[1000,1000] broadcast(%seven), dimensions={{}}
  ROOT %r = {kind}[1000,1000] {opcode}(%p{f", {other}" if other else ""})
}}"""
    return Kernel("k", "fusion", parse_hlo(text), "", "")


@pytest.mark.parametrize(
    ("kernel", "cycles"),
    [
        (elementwise("atan2"), 30.0),
        (elementwise("tan", other=""), 30.0),
        (elementwise("remainder"), 30.0),
        (elementwise("remainder", "s32"), 4.0),
        (elementwise("divide", "s32"), 4.0),
        # Multiplications and vector instructions.
        (elementwise("divide", "s32", "%sevens"), 0.0),
        (elementwise("divide"), 0.0),
        (elementwise("exponential", other=""), 0.0),
    ],
)
def test_functions_that_are_calls_take_core_cycles_for_each_element(
    kernel: Kernel, cycles: float
) -> None:
    assert scalar_seconds([kernel], DEVICE)[0] == pytest.approx(cycles * 1e6 / CLOCK / 2)


@pytest.mark.parametrize(("size", "taps"), [(3, 9), (100, 0)])
def test_windows_are_loops(size: int, taps: int) -> None:
    """Windows of 3 x 3, and scans, which are longer than any window."""
    text = f"""HloModule m
%add (a: f32[], b: f32[]) -> f32[] {{
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}}
ENTRY %main (p: f32[512,512]) -> f32[512,512] {{
  %p = f32[512,512] parameter(0)
  %z = f32[] constant(0)
  ROOT %r = f32[512,512] reduce-window(%p, %z), to_apply=%add,
    window={{size={size}x{size} pad={size // 2}_{(size - 1) // 2}x{size // 2}_{(size - 1) // 2}}}
}}"""
    kernel = Kernel("k", "reduce", parse_hlo(text), "", "")
    assert scalar_seconds([kernel], DEVICE)[0] == pytest.approx(taps * 512**2 / CLOCK / 2)
