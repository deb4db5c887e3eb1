"""An architect's question: many programs on many designs, in one command."""

import json
from pathlib import Path

import pandas as pd
import pytest

import opcast as package
from opcast.common.errors import DeviceError
from opcast.features.devices.catalogue import load_designs, load_device_file

from ...support.commands import opcast

MINE = """name: mine
platform: gpu
hbm_bandwidth_gbps: 5e3
memory_gb: 96
vector_tflops: {f32: 60}
"""
RANGES = """name: big
base: h100-sxm
hbm_bandwidth_gbps: {from: 2000, to: 5000, steps: 4}
peak_tflops: {bf16: [500, 2000]}
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("many")
    for family in ("mlp", "lstm"):
        done = opcast("zoo", "export", family, "--set", "batch=8", "--out", path / f"{family}.mlir")
        assert done.returncode == 0, done.stderr
    (path / "mine.yaml").write_text(MINE)
    (path / "ranges.yaml").write_text(RANGES)
    return path


@pytest.fixture
def drawn(monkeypatch):
    """Figures that were saved."""
    figure = pytest.importorskip("matplotlib.figure")
    kept, save = [], figure.Figure.savefig

    def keep(own, *args, **options):
        kept.append(own)
        save(own, *args, **options)

    monkeypatch.setattr(figure.Figure, "savefig", keep)
    return kept


def test_programs_times_devices_make_a_table_and_a_plot(folder):
    pytest.importorskip("matplotlib")
    out, plot = folder / "table.parquet", folder / "p.png"
    done = opcast(
        "predict", folder / "mlp.mlir", folder / "lstm.mlir", "--device",
        f"a100-sxm-80gb,{folder / 'mine.yaml'},{folder / 'ranges.yaml'}", "--lowering", "fused",
        "--out", out, "--plot", plot,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    table = pd.read_parquet(out)
    # Two programs on a device, the minimal file and 4 × 2 designs.
    assert len(table) == 2 * (1 + 1 + 8)
    assert (table["error"] == "").all()
    assert (table["lo_us"] <= table["latency_us"]).all()
    designs = table[table["program"].str.endswith("mlp.mlir")].dropna(subset="peak_tflops.bf16")
    assert sorted(set(designs["hbm_bandwidth_gbps"])) == [2000, 3000, 4000, 5000]
    times = designs[designs["peak_tflops.bf16"] == 500].sort_values("hbm_bandwidth_gbps")
    # Trees of products are not quite monotone.
    assert (times["latency_us"].diff().dropna() < 2e-3 * times["latency_us"].iloc[0]).all()
    assert plot.stat().st_size > 1000
    assert "NOT fit" not in done.stdout
    # Notes of designs are said once, not once for each.
    assert " ".join(done.stdout.split()).count("share the kernels") == 1


def test_a_function_of_a_file_is_traced_for_each_device(folder):
    (folder / "train.py").write_text(
        "import jax.numpy as jnp\n"
        "def step(x, w):\n"
        "    return jnp.tanh(x @ w)\n"
        "example_args = (jnp.zeros((256, 512)), jnp.zeros((512, 512)))\n"
    )
    program, options = f"{folder / 'train.py'}:step", ("--lowering", "fused", "--json")
    devices = "a100-sxm-80gb", "tpu-v5e"
    done = opcast("predict", program, "--device", ",".join(devices), *options)
    assert done.returncode == 0, done.stderr
    table = json.loads(done.stdout)
    assert [(row["program"], row["device"]) for row in table] == [(program, d) for d in devices]
    for row, device in zip(table, devices, strict=True):
        alone = json.loads(opcast("predict", program, "--device", device, *options).stdout)
        assert row["error"] == "" and row["latency_us"] == pytest.approx(alone["latency_us"])
    # A function that is not there costs only its own row.
    other = f"{folder / 'train.py'}:other"
    done = opcast("predict", other, program, "--device", devices[0], *options)
    bad, good = json.loads(done.stdout)
    assert "no function 'other'" in bad["error"] and good["latency_us"] > 0


def test_one_bad_program_costs_only_its_rows(folder):
    (folder / "bad.mlir").write_text("module {")
    done = opcast(
        "predict", folder / "bad.mlir", folder / "mlp.mlir", "--device", "a100-sxm-80gb",
        "--lowering", "fused", "--json",
    )  # fmt: skip
    assert done.returncode == 0
    bad, good = json.loads(done.stdout)
    assert "bad.mlir" in bad["error"]
    assert bad["latency_us"] is None
    assert good["latency_us"] > 0
    alone = opcast("predict", folder / "bad.mlir", "--device", "a30,a40", "--lowering", "fused")
    assert alone.returncode == 1


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--out", "table.xlsx"], ".parquet, .csv or .json"),
        (["--device", "a30,a40", "--top", "3"], "give one PROGRAM and one --device"),
        (["--device", "a30,a40", "--model", "roofline,default"], "single --model"),
        (["--device", "a30,nonsense"], "nonsense"),
    ],
)
def test_what_does_not_go_together_is_refused(folder, options, said):
    done = opcast("predict", folder / "mlp.mlir", *options)
    assert done.returncode != 0
    assert said in " ".join(done.stderr.replace("│", "").split())


def test_a_table_has_memory_cost_and_energy(folder):
    args = (
        "predict", folder / "mlp.mlir", folder / "lstm.mlir", "--device", "a30,v5e",
        "--lowering", "fused", "--price", "v5e=1.2", "--price", "3.6",
    )  # fmt: skip
    shown = opcast(*args)
    assert shown.returncode == 0, shown.stderr
    head, *rows = shown.stdout.splitlines()
    assert " ".join(head.split()) == (
        "time 90 % interval memory cost per million runs device program"
    )
    assert all("MiB fits" in row for row in rows[:4])
    for row in json.loads(opcast(*args, "--json").stdout):
        price = {"a30": 3.6, "tpu-v5e": 1.2}[row["device"]]
        assert row["cost"] == pytest.approx(price / 3600 * row["latency_us"] * 1e-6)
        assert row["cost_lo"] < row["cost"] < row["cost_hi"]
        # The board power of TPUs is not stated.
        assert (row["energy_j"] is None) == (row["device"] == "tpu-v5e")


def test_a_strict_table_fails_where_one_cell_was_not_learned(folder):
    args = ("predict", folder / "mlp.mlir", "--lowering", "fused", "--model", "roofline")
    done = opcast(*args, "--device", "a30,a40", "--json")
    assert done.returncode == 0
    done = opcast(*args, "--device", "a30,a40", "--json", "--strict")
    assert done.returncode == 1
    assert all("only a roofline estimate" in row["error"] for row in json.loads(done.stdout))


def test_a_price_of_another_device_is_refused(folder):
    args = ("predict", folder / "mlp.mlir", "--device", "a30", "--lowering", "fused", "--price")
    assert opcast(*args, "a30=2").returncode == 0
    done = opcast(*args, "a40=2")
    assert done.returncode != 0 and "no price for a30" in " ".join(done.stderr.split())


def test_a_device_without_a_price_says_so(folder):
    words = ("--device", "a30,a40", "--lowering", "fused", "--price", "a30=2", "--json")
    rows = json.loads(opcast("predict", folder / "mlp.mlir", *words).stdout)
    assert [row["cost"] is None for row in rows] == [False, True]
    assert "no cost: --price has none for a40" in rows[1]["notes"]


def test_a_program_is_lowered_once_for_all_designs(folder, monkeypatch):
    import opcast.features.lowering.lower as lowering

    made, own = [], lowering.lower_with
    monkeypatch.setattr(lowering, "lower_with", lambda *a: made.append(a) or own(*a))
    opcast(
        "predict", folder / "mlp.mlir", "--device", folder / "ranges.yaml", "--lowering", "fused"
    )
    assert len(made) == 1


def test_ctrl_c_keeps_what_is_predicted(folder, monkeypatch):
    import opcast.features.lowering.lower as lowering

    own = lowering.lower_with

    def stop(source, options):
        if options.device.name == "h100-sxm":
            raise KeyboardInterrupt
        return own(source, options)

    monkeypatch.setattr(lowering, "lower_with", stop)
    out = folder / "part.csv"
    words = "--device", "a100-sxm-80gb,h100-sxm,l4", "--lowering", "fused", "--out", out
    done = opcast("predict", folder / "mlp.mlir", *words)
    assert done.returncode == 130
    assert "interrupted: 1 of 3 predictions are shown and written to" in done.stderr
    assert "missing: h100-sxm, l4" in done.stderr
    # Nothing that was asked for is left out, here as in print.
    table = pd.read_csv(out)
    assert list(table["device"]) == ["a100-sxm-80gb", "h100-sxm", "l4"]
    assert list(table["latency_us"].isna()) == [False, True, True]
    assert set(table["error"].dropna()) == {"not predicted: interrupted"}
    assert done.stdout.count("interrupted") == 2
    none = opcast("predict", folder / "mlp.mlir", "--device", "h100-sxm,l4", *words[2:])
    assert none.returncode == 130


def test_lines_of_devices_can_be_told_apart(folder, drawn):
    from opcast.features.lowering.options import LoweringOptions
    from opcast.predict.program import many
    from opcast.predict.program.case import ProgramCase

    predictor = package.load("gpu-xla")
    names = [str(folder / "ranges.yaml"), "a100-sxm-80gb", "h100-sxm", "l4", "t4", "l40s", "b200"]
    frame = many.predict_many(
        [folder / "mlp.mlir"],
        many.find_chips(names, predictor.devices),
        {"xla": many.by_xla(predictor, ProgramCase(None, LoweringOptions("fused")))},
        opened=Path,
    )
    many.plot_predictions(frame, folder / "lines.png")
    (axes,) = drawn[0].axes
    lines = axes.get_lines()
    # Two designs of the other range, and six devices.
    assert len({line.get_color() for line in lines}) == 8


def test_many_lines_have_colours_of_their_own_and_no_bands(tmp_path, drawn):
    from opcast.predict.program import many

    rows = [
        {"program": f"p{p}.mlir", "device": "mine", "hbm": hbm, "cores": float(cores), "error": "",
         "latency_us": 1e3 * p + cores, "lo_us": 900.0 * p, "hi_us": 2e3 * p}
        for p in (1, 2, 3) for cores in (80, 120, 160, 200) for hbm in (4.0, 8.0)
    ]  # fmt: skip
    names = ["program", "device", "hbm", "cores", "latency_us", "lo_us", "hi_us", "error"]
    many.plot_predictions(pd.DataFrame(rows)[names], tmp_path / "many.png")
    (axes,) = drawn[0].axes
    assert len({line.get_color() for line in axes.get_lines()}) == 12
    assert not axes.collections


@pytest.mark.parametrize("devices", [3, 40])
def test_a_legend_of_many_lines_lies_in_the_picture(tmp_path, drawn, devices):
    """Designs of a program share a name where there are too many; named devices keep theirs."""
    pyplot = pytest.importorskip("matplotlib.pyplot")
    from opcast.predict.program import many

    at = {"error": "", "latency_us": 1e3, "lo_us": 900.0, "hi_us": 2e3}
    designs = [
        {"program": f"p{p}.mlir", "device": "mine", "cores": c, "hbm": h, "l2": m, **at}
        for p in (1, 2, 3) for c in (80.0, 120.0, 160.0) for h in (2.0, 4.0, 8.0) for m in (1, 2, 3)
    ]  # fmt: skip
    named = [{"program": "p1.mlir", "device": f"d{n}", **at} for n in range(devices)]
    names = ["program", "device", "cores", "hbm", "l2", "latency_us", "lo_us", "hi_us", "error"]
    many.plot_predictions(pd.DataFrame(designs + named)[names], tmp_path / "many.png")
    (axes,) = drawn[0].axes
    told = [text.get_text() for text in axes.get_legend().get_texts()]
    ours = [f"p{p}, any hbm, l2" for p in (1, 2, 3)]
    assert told[:3] == ours
    assert sorted(told[3:]) == sorted(f"p1 on d{n}" for n in range(devices))
    # 3 · 3 · 3 lines over the cores, and one for each device.
    assert len(axes.get_lines()) == 27 + devices
    # What is saved is cut around everything drawn, so that no name is outside the picture.
    image = pyplot.imread(tmp_path / "many.png")
    legend = axes.get_legend().get_window_extent()
    assert image.shape[1] / 120 > legend.width / drawn[0].dpi + 4
    assert image.shape[0] / 120 > legend.height / drawn[0].dpi


def test_the_documented_route_in_python(folder):
    designs = load_designs(folder / "ranges.yaml")
    lowered = package.lower(folder / "mlp.mlir", "fused", device=designs[0].device)
    times = [package.load().predict_lowered(lowered, d.device).latency_us for d in designs]
    assert len(times) == 8
    # Trees of products are not quite monotone.
    assert times[0] >= 0.998 * times[-1]


def test_a_file_with_the_documented_minimum_is_enough(folder):
    done = opcast("predict", folder / "mlp.mlir", "--device", folder / "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert "lowering fused" in done.stdout
    assert "compiler_target" in " ".join(done.stdout.split())
    assert load_device_file(folder / "mine.yaml").bandwidth == 5e12


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("core_count: {from: 1, to: 2}", "not a range"),
        ("core_count: {from: 1, to: 2, steps: 1}", "not a range"),
        ("core_count: {from: 1, to: 2, steps: 2, by: 3}", "not a range"),
        ("core_count: {from: 1, to: 2, steps: 5}", "value twice"),
        ("core_count: []", "empty"),
        ("core_count: [1, fast]", "must be a number"),
        ("core_count: {from: 1, to: 9000, steps: 9000}\nmemory_gb: [1, 2]", "18000 designs"),
    ],
)
def test_ranges_that_are_none(tmp_path, text, said):
    path = tmp_path / "x.yaml"
    path.write_text(f"name: x\nbase: h100-sxm\n{text}\n")
    with pytest.raises(DeviceError, match=said):
        load_designs(path)


def test_ranges_by_hand(tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "name: x\nbase: h100-sxm\nhbm_bandwidth_gbps: {from: 1e3, to: 4e3, steps: 3, scale: log}\n"
        "core_count: {from: 100, to: 103, steps: 3}\n"
    )
    designs = load_designs(path)
    assert [d.figures["hbm_bandwidth_gbps"] for d in designs[::3]] == pytest.approx(
        [1000, 2000, 4000]
    )
    # Counts are whole: 101.5 is rounded to even.
    assert [d.device.core_count for d in designs[:3]] == [100, 102, 103]
    assert designs[0].device.name == "x(hbm_bandwidth_gbps=1000,core_count=100)"
    with pytest.raises(DeviceError, match="range of designs"):
        load_device_file(path)
