"""Runs of equal blocks, and layers taken out, on tables of ops small enough to follow."""

from __future__ import annotations

import pytest

from opcast.features.ir.mlir.bindings import parse_module
from opcast.features.lowering.repeated_layers.lower import find_repeats
from opcast.features.lowering.repeated_layers.mlir_excise import main_function, read_table
from opcast.features.lowering.repeated_layers.runs import (
    MIN_LAYERS,
    OpTable,
    Repeats,
    Run,
    disjoint,
    excise,
    find_runs,
    likely_counts,
)

#: Ops of a layer of :func:`chain`.
PERIOD = 3


def chain(layers: int) -> OpTable:
    """``embed``, layers of three ops each of which reads the last op and a weight, and ``head``."""
    signatures, reads = ["embed"], [[(-1, 0)]]
    for layer in range(layers):
        last = len(signatures) - 1
        signatures += ["dot", "exp", "add"]
        reads += [[(last, 0), (-1, 1 + layer)], [(last + 1, 0)], [(last + 2, 0), (last, 0)]]
    reads.append([(len(signatures) - 1, 0)])
    return OpTable([*signatures, "head"], reads)


def test_a_run_is_found_by_its_period() -> None:
    assert find_runs(chain(8)) == [Run(start=1, period=PERIOD, count=8)]
    assert find_runs(chain(MIN_LAYERS - 1)) == []


def test_a_block_that_is_cut_off_is_a_tail() -> None:
    table = OpTable(list("x" + "abc" * 6 + "ab" + "y"), [[]] * 22)
    assert find_runs(table) == [Run(start=1, period=3, count=6, tail=2)]


def test_places_in_a_run() -> None:
    run = Run(start=10, period=3, count=4)
    assert run.stop == 22
    assert [run.place(op) for op in (9, 10, 14, 21, 22)] == [None, (0, 0), (1, 1), (3, 2), None]


def test_the_longest_of_overlapping_runs_is_chosen() -> None:
    long, short, after = Run(0, 3, 10), Run(5, 6, 4), Run(30, 3, 6)
    assert disjoint([short, after, long]) == [long, after]
    # 30 ops belong to runs of ten blocks, 18 to those of six and 24 to those of four.
    assert likely_counts([short, after, long]) == [10, 4, 6]


def test_layers_go_from_the_middle() -> None:
    table = chain(8)
    repeats = find_repeats(table)
    assert repeats is not None and repeats.layers == 8
    assert repeats.layer_of == (tuple(range(8)),)
    excision = excise(table, repeats, 4)
    assert excision is not None
    # Layers 2 to 5, of three ops each, after the one op before the first layer.
    assert excision.removed == frozenset(range(1 + 2 * PERIOD, 1 + 6 * PERIOD))
    # Layer 6 reads the last op of layer 1 instead of that of layer 5, in its product and its sum.
    last, sixth = 1 + 2 * PERIOD - 1, 1 + 6 * PERIOD
    assert excision.rewired == {(sixth, 0): (last, 0), (sixth + 2, 1): (last, 0)}


def test_nothing_goes_where_all_layers_are_kept() -> None:
    table = chain(8)
    repeats = Repeats(8, (Run(1, PERIOD, 8),), (tuple(range(8)),))
    assert excise(table, repeats, 8) is None


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((f"complex<f{bits}>", ("(2.0, 0.0)", "(2.0, 1.0)")) for bits in (32, 64)),
        *((kind, ("1.0", "2.0")) for kind in ("bf16", "f8E4M3FN", "f8E8M0FNU", "f4E2M1FN")),
        *((kind, ("[0, 1]", "[1, 0]")) for kind in ("i4", "ui2", "i32")),
        ("i1", ("[true, false]", "[false, true]")),
    ],
)
def test_constants_of_any_kind_are_told_apart_by_their_values(
    kind: str, values: tuple[str, str]
) -> None:
    one, other = (
        f"stablehlo.constant dense<{v}> : tensor<{'2x' if v[0] == '[' else ''}{kind}>"
        for v in values
    )
    text = f"func.func public @main() {{ %0 = {one}\n%1 = {one}\n%2 = {other}\nreturn }}"
    module = parse_module(text)
    main = main_function(module)
    assert main is not None
    first, same, different = read_table(main).signatures
    assert first == same != different
