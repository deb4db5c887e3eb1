"""Tables that XLA's scheduler reads: text, times, and what the compiler makes of them."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import CompilerError, DeviceError, ProgramError
from opcast.datagen.published.packs import product_rows
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.lowering.target_compiler.install import find_compiler
from opcast.features.lowering.target_compiler.process import CompileSettings, compile_programs
from opcast.features.lowering.target_compiler.target import target_of
from opcast.models.collectives.model import CollectiveModel
from opcast.models.operators import OpModel, rows_of_published
from opcast.models.operators.model import default_settings
from opcast.predict.export.xla_perf_table import (
    collective_table,
    keys_of,
    matmul_table,
    own_shapes,
    product_seconds,
    program_shapes,
)
from opcast.predict.locate import OPERATOR_MODEL, find_model

ROOT = Path(__file__).resolve().parents[3]
PACKS = Path(os.environ.get("OPCAST_PUBLISHED_DATA", ROOT.parent / "shared" / "data"))
T, G, DOTS = "tensor<1024x1024xbf16>", "tensor<4096x1024xbf16>", 8


@pytest.fixture(scope="module")
def operators() -> OpModel:
    return OpModel.load(find_model(OPERATOR_MODEL))


def entries(text: str) -> pd.DataFrame:
    """Read a table back: the last two dimensions of result and first operand, and its figure."""
    found = []
    for line in text.splitlines():
        if "instruction {" not in line:
            continue
        shapes = [[int(d) for d in re.findall(r" dimensions: (\d+)", part)]
                  for part in line.split("shape {")[1:]]  # fmt: skip
        figure = int(re.search(r"(?:clock_cycles|bytes_per_sec): (\d+)", line)[1])
        opcode = re.search(r'opcode: "([\w-]+)"', line)[1]
        world = int((re.search(r"devices_per_group: (\d+)", line) or [0, 0])[1])
        found.append({"opcode": opcode, "shapes": shapes, "figure": figure, "world": world})
    return pd.DataFrame(found)


def test_a_table_of_products_has_times_in_cycles(operators):
    h100 = find_device("h100-sxm")
    text, notes = matmul_table([(1, 4096, 2048, 512, "bf16"), (2, 256, 256, 1024, "bf16")], h100,
                               operators)  # fmt: skip
    assert text.startswith('entries {\n  key: "sm_90"\n  value {\n')
    table = entries(text)
    assert table["shapes"].tolist() == [
        [[4096, 2048], [4096, 512], [512, 2048]],
        [[2, 256, 256], [2, 256, 1024], [2, 1024, 256]],
    ]
    # 2 · 4096 · 2048 · 512 operations take at least 8.7 µs at 989.4 TFLOP/s, and no ten times that.
    assert 8.7e-6 * 1.98e9 < table["figure"][0] < 87e-6 * 1.98e9
    assert notes == []
    assert text.count("lhs_batch_dimensions: 0") == 1


def test_products_that_xla_cannot_tell_apart_are_left_out_with_a_note(operators):
    shapes = [(1, 512, 512, 512, "bf16"), (1, 256, 256, 256, "f32")]
    text, notes = matmul_table(shapes, find_device("h100-sxm"), operators)
    assert len(entries(text)) == 1
    assert "1 products are omitted" in notes[0]


def test_a_program_gives_its_own_products():
    source = f"""func.func @main(%x: {T}, %y: {T}, %z: tensor<8x1024xf32>, %v: tensor<1024x16xf32>)
        -> ({T}, {T}, tensor<8x16xf32>) {{
      %0 = stablehlo.dot_general %x, %y, contracting_dims=[1]x[0] : ({T}, {T}) -> {T}
      %1 = stablehlo.dot_general %0, %y, contracting_dims=[0]x[1] : ({T}, {T}) -> {T}
      %2 = stablehlo.dot_general %z, %v, contracting_dims=[1]x[0]
        : (tensor<8x1024xf32>, tensor<1024x16xf32>) -> tensor<8x16xf32>
      return %0, %1, %2 : {T}, {T}, tensor<8x16xf32>
    }}"""
    shapes = program_shapes(read_program(source).program)
    assert shapes == [(1, 1024, 1024, 1024, "bf16"), (1, 8, 16, 1024, "f32")]
    empty = "func.func @main(%x: tensor<2xf32>) -> tensor<2xf32> { return %x : tensor<2xf32> }"
    with pytest.raises(ProgramError, match="no product"):
        program_shapes(read_program(empty).program)


def test_devices_without_a_table():
    assert keys_of(find_device("b200")) == ("sm_100", "sm_100_B200")
    for name in ("mi300x", "tpu-v5e"):
        with pytest.raises(DeviceError, match="only for NVIDIA GPUs"):
            keys_of(find_device(name))


def test_the_command_writes_both_tables(tmp_path):
    out, other = tmp_path / "m.txtpb", tmp_path / "c.txtpb"
    done = CliRunner().invoke(
        app, ["export", "xla-perf-table", "l40s", "--out", str(out), "--collectives", str(other)]
    )
    assert done.exit_code == 0, done.output
    assert f"{out}: 375 entries; --xla_gpu_experimental_matmul_perf_table_path={out}" in done.output
    assert 'key: "sm_89"' in out.read_text()
    assert set(entries(other.read_text())["opcode"]) == {
        *("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
    }


def test_collectives_are_in_bytes_a_second_of_the_larger_side():
    h100 = find_device("h100-sxm")
    text, rows = collective_table(h100, [2, 8], CollectiveModel.find())
    table = entries(text)
    large = rows[(rows["bytes"] == 2**30) & (rows["world_size"] == 8)].set_index("op")["latency_s"]
    # The first of its size is of f32 and eight devices; f32 comes before bf16.
    gather = table[(table["opcode"] == "all-gather") & (table["world"] == 8)]
    first = gather[gather["shapes"].map(lambda s: s[0][0]) == 2**28].iloc[0]
    assert first["figure"] == pytest.approx(2**30 / large["all-gather"], rel=1e-6)
    # Of a reduce-scatter over 8 devices of 1 GiB, a device keeps 2^25 numbers.
    scatter = table[table["opcode"] == "reduce-scatter"]
    assert [2**25] in [s[0] for s in scatter["shapes"]]


def program() -> str:
    """Two all-reduces that follow each other, beside a chain of eight products."""
    weights = ", ".join(f"%w{i}: {T}" for i in range(DOTS))
    lines = [f"func.func public @main(%x: {T}, {weights}, %g: {G}, %h: {G}) -> ({T}, {G}) {{"]

    def reduce(out: str, operand: str) -> str:
        return (
            f'%{out} = "stablehlo.all_reduce"(%{operand}) ({{ ^bb0(%a: tensor<bf16>, '
            "%b: tensor<bf16>): %s = stablehlo.add %a, %b : tensor<bf16>\n"
            "stablehlo.return %s : tensor<bf16> }) {replica_groups = "
            f"dense<[[0,1,2,3,4,5,6,7]]> : tensor<1x8xi64>}} : ({G}) -> {G}"
        )

    lines += [reduce("r", "g"), f"%t = stablehlo.multiply %r, %h : {G}", reduce("q", "t")]
    last = "x"
    for i in range(DOTS):
        lines.append(f"%d{i} = stablehlo.dot_general %{last}, %w{i}, contracting_dims=[1]x[0] "
                     f": ({T}, {T}) -> {T}")  # fmt: skip
        last = f"d{i}"
    lines += [f"return %{last}, %q : {T}, {G}", "}"]
    head = "module @m attributes {mhlo.num_partitions = 1 : i32, mhlo.num_replicas = 8 : i32} {"
    return "\n".join([head, *lines, "}"])


def hidden(**tables: Path) -> list[int]:
    """Products that the compiler's schedule has in the shadow of each all-reduce."""
    flags: dict[str, object] = {
        "xla_gpu_enable_latency_hiding_scheduler": True,
        "xla_gpu_enable_analytical_sol_latency_estimator": True,
    }
    flags |= {f"xla_gpu_experimental_{k}_perf_table_path": str(v) for k, v in tables.items()}
    target = target_of(find_device("h100-sxm"))
    settings = CompileSettings(flags=flags, progress=False)
    (made,) = compile_programs([program().encode()], [(DOTS, 1)], target, settings)
    assert not isinstance(made, Exception), made
    entry = made.hlo[made.hlo.index("ENTRY") :]
    counts, inside = [], False
    for line in entry.splitlines():
        if "all-reduce-start(" in line:
            counts.append(0)
            inside = True
        elif "all-reduce-done(" in line:
            inside = False
        elif inside and re.search(r"= bf16\[1024,1024\]\S* fusion\(", line):
            counts[-1] += 1
    return counts


def scaled(text: str, factor: float) -> str:
    figure = re.compile(r"((?:clock_cycles|bytes_per_sec): )(\d+)")
    return figure.sub(lambda m: f"{m[1]}{max(1, int(int(m[2]) * factor))}", text)


@pytest.mark.slow
def test_the_compiler_reads_the_tables_and_schedules_by_them(tmp_path, operators):
    try:
        find_compiler("gpu")
    except CompilerError:
        pytest.skip("needs the GPU compiler: opcast compilers install gpu")
    h100 = find_device("h100-sxm")
    products, _ = matmul_table(own_shapes(["bf16"]), h100, operators)
    collectives, _ = collective_table(h100, [2, 4, 8], CollectiveModel.find())
    own, slow, bad, fast = (tmp_path / f"{n}.txtpb" for n in ("own", "slow", "bad", "fast"))
    own.write_text(products)
    slow.write_text(scaled(products, 1000))
    bad.write_text("nonsense")
    fast.write_text(scaled(collectives, 1000))
    default = hidden()
    assert sum(default) == DOTS
    # A thousand times slower, one product hides an all-reduce, and the first takes the others.
    assert hidden(matmul=slow) != default
    # XLA ignores what it cannot read, so only a schedule shows that a table was read.
    assert hidden(matmul=bad) == default
    # Its own table has these times within a tenth, so its schedule stays.
    assert hidden(matmul=own) == default
    # Collectives that take no time need no shadow.
    assert hidden(matmul=own, collective=fast) != default


@pytest.mark.slow
def test_the_table_of_h100_is_that_of_xla(operators):
    path = PACKS / "published-xla" / "matmul.csv.gz"
    if not path.is_file():
        pytest.skip(f"{path.name} is not at {PACKS} (OPCAST_PUBLISHED_DATA)")
    table = pd.read_csv(path)
    table = table[(table["current"] == 1) & (table["dtype_lhs"] == "bf16")]
    shapes = [tuple(row) for row in table[["b", "m", "n", "k"]].assign(t="bf16").to_numpy()]
    text, _ = matmul_table(shapes, find_device("h100-sxm"), operators)
    said = entries(text)["figure"].to_numpy() / 1.98e9
    error = np.abs(said / (table["latency_us"].to_numpy() * 1e-6) - 1)
    assert error.mean() < 0.12


@pytest.mark.slow
@pytest.mark.exhaustive  # a model is trained
def test_a_vendor_without_rows_takes_the_estimate_which_is_xlas_table():
    """H100's table by a model that has seen MI300X alone, within 12 % in bf16."""
    path, others = PACKS / "published-xla" / "matmul.csv.gz", PACKS / "published-kernels"
    if not path.is_file() or not (others / "gemm.parquet").is_file():
        pytest.skip(f"the packs are not at {PACKS} (OPCAST_PUBLISHED_DATA)")
    amd = product_rows(pd.read_parquet(others / "gemm.parquet"))
    amd = amd[(amd["source"] == "xla") & (amd["device"] == "mi300x") & (amd["dtype"] == "bf16")]
    rows = rows_of_published(amd.reset_index(drop=True), find_device)
    model = OpModel().fit(rows, {"mi300x": find_device("mi300x")}, default_settings())
    table = pd.read_csv(path)
    table = table[(table["current"] == 1) & (table["dtype_lhs"] == "bf16")]
    shapes = [tuple(row) for row in table[["b", "m", "n", "k"]].assign(t="bf16").to_numpy()]
    seconds = product_seconds(shapes, find_device("h100-sxm"), model)
    assert np.abs(seconds / (table["latency_us"].to_numpy() * 1e-6) - 1).mean() < 0.12
