"""Simulators: estimators on recorded answers, drivers against the tools themselves."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import entry_points, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from opcast.common.errors import DeviceError, ModelError
from opcast.features.devices.catalogue import device_names, find_device, load_device_file
from opcast.features.ir.hlo_reader import parse_hlo
from opcast.features.kernels.extract import extract_kernels, kernel_from_ir
from opcast.features.kernels.kernel import Kernel
from opcast.features.table.roofline import roofline
from opcast.features.table.row import rows
from opcast.models.core.registry import UNTRAINED, estimator_class, make_estimator
from opcast.models.simulators import base
from opcast.models.simulators.arrays import passes, product_of, shared_cycles
from opcast.models.simulators.base import SimulatorEstimator
from opcast.models.simulators.iree import IreeEstimator
from opcast.models.simulators.scalesim import ScaleSimEstimator
from opcast.models.simulators.zigzag import ZigZagEstimator

from ...support.cases import later
from .recorded import DATA, RECORDING, Recorded, ReplayedTool

V3 = find_device("tpu-v3")
TPUS = [name for name in device_names() if name.startswith("tpu-")]

#: The tools, run in this process, leave files open.
LEAKS = pytest.mark.filterwarnings(
    "ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"
)
GEMM = """HloModule m
ENTRY e {{
  a = {t}[{m},{k}] parameter(0)
  b = {t}[{k},{n}] parameter(1)
  ROOT r = {t}[{m},{n}] dot(a, b), lhs_contracting_dims={{1}}, rhs_contracting_dims={{0}}
}}
"""
CONV = """HloModule m
ENTRY e {
  x = bf16[2,8,8,16] parameter(0)
  w = bf16[3,3,16,32] parameter(1)
  ROOT r = bf16[2,8,8,32] convolution(x, w), window={size=3x3 pad=1_1x1_1},
    dim_labels=b01f_01io->b01f
}
"""
#: The gradient of a convolution with stride 2 by its input: its own input is dilated with zeros.
DILATED = """HloModule m
ENTRY e {
  x = bf16[2,4,4,32] parameter(0)
  w = bf16[3,3,32,16] parameter(1)
  ROOT r = bf16[2,8,8,16] convolution(x, w), window={size=3x3 pad=1_2x1_2 lhs_dilate=2x2},
    dim_labels=b01f_01io->b01f
}
"""
ADD = """HloModule m
ENTRY e {
  a = f32[1024,1024] parameter(0)
  ROOT r = f32[1024,1024] add(a, a)
}
"""


def gemm(m: int, n: int, k: int, dtype: str = "bf16") -> Kernel:
    return kernel_from_ir(GEMM.format(m=m, n=n, k=k, t=dtype))


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPCAST_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tools answer from ``data``; their packages need not be installed."""
    versions: dict[str, str] = {}
    for path in DATA.glob("*.json"):
        versions |= Recorded(path.stem).versions
    monkeypatch.setattr(base, "ToolProcess", ReplayedTool)
    monkeypatch.setattr(base, "version", lambda name: versions.get(name) or version(name))


def no_tool(self: object, job: dict[str, Any]) -> dict[str, Any]:
    raise AssertionError("the tool was asked")


@pytest.mark.parametrize("name", TPUS)
def test_arrays_of_the_catalogue_make_the_peak(name: str) -> None:
    spec = find_device(name)
    units = spec.array_rows * spec.array_columns * spec.arrays_per_core * spec.core_count
    assert 2 * units * spec.clock_hz == pytest.approx(spec.peak_flops["bf16"], rel=0.01)


def test_a_device_file_may_describe_an_array(tmp_path: Path) -> None:
    path = tmp_path / "chip.yaml"
    path.write_text("name: mine\nbase: tpu-v4\narray_rows: 256\nnotes: wider\n")
    spec = load_device_file(path)
    assert (spec.array_rows, spec.array_columns, spec.arrays_per_core) == (256, 128, 4)


@pytest.mark.parametrize("name", ["scalesim", "zigzag"])
@pytest.mark.usefixtures("replayed")
def test_a_device_without_arrays_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="lacks array_rows, array_columns, arrays_per_core"):
        make_estimator(name).predict([gemm(8, 8, 8)], find_device("h100-sxm"))


def test_what_to_install_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaleSimEstimator, "packages", ("opcast-no-such-package",))
    with pytest.raises(ModelError, match=r"opcast-no-such-package.*pip install '\.\[scalesim\]"):
        ScaleSimEstimator().predict([gemm(8, 8, 8)], V3)


def test_estimators_are_entry_points() -> None:
    assert set(UNTRAINED) <= {"roofline", "scalesim", "zigzag", "iree", "compiler"}
    for name in UNTRAINED:
        assert estimator_class(name).name == name
    known = {point.name for point in entry_points(group="opcast.estimators")}
    if "scalesim" not in known:
        pytest.skip("the package is installed from before the simulators were there")
    assert set(UNTRAINED) <= known


def test_unknown_parameters_are_refused() -> None:
    for make in (
        lambda: ScaleSimEstimator("rs"), lambda: ZigZagEstimator(0), lambda: IreeEstimator("O9")
    ):  # fmt: skip
        with pytest.raises(ModelError):
            make()


def test_products_of_kernels() -> None:
    kernels = [gemm(64, 32, 16), kernel_from_ir(CONV), kernel_from_ir(ADD)]
    found = [product_of(k, row) for k, row in zip(kernels, rows(kernels), strict=True)]
    plain, conv, none = found
    assert not isinstance(plain, str) and not isinstance(conv, str)
    assert (plain.batch, plain.m, plain.n, plain.k, plain.fold) == (1, 64, 32, 16, 1.0)
    # 2 × 8 × 8 outputs; 32 features; 3 × 3 taps of 16 channels
    assert (conv.batch, conv.m, conv.n, conv.k, conv.bits) == (1, 128, 32, 144, 16)
    assert conv.fold == pytest.approx((2 * 8 * 8 * 16) / (128 * 144))  # 1 / 9
    assert none == "no matrix product (fusion)"


def test_zeros_of_a_dilated_input_are_not_multiplied() -> None:
    kernel = kernel_from_ir(DILATED)
    (row,) = rows([kernel])
    product = product_of(kernel, row)
    assert not isinstance(product, str)
    # Along one side the taps on real elements are, of 8 outputs: odd ones 1, even ones 2, less
    # those beyond the edge. 128 outputs × 288 taps are dense; the kernel's own count is the truth.
    assert product.m == int(np.ceil(128 * kernel.flops / (2 * 128 * 288 * 16)))
    assert product.m < 128 / 3


@pytest.mark.parametrize(
    ("folds", "length", "overhead", "arrays", "expected"),
    [
        (6, 20, 22, 1, 6 * 42),
        (6, 20, 22, 2, 3 * 42),
        (1, 100, 10, 4, 10 + 25),  # one fold's rows go to four arrays
        (3, 100, 10, 2, 3 * (10 + 50)),  # 180, not two rounds of 110
        (3, 0, 110, 2, 2 * 110),  # nothing to split
    ],
)
def test_folds_are_shared_among_arrays(
    folds: int, length: int, overhead: int, arrays: int, expected: int
) -> None:
    assert shared_cycles(folds, length, overhead, arrays) == expected


def test_passes_follow_the_peaks() -> None:
    assert passes("bf16", V3) == passes("tf32", V3) == 1.0
    assert passes("f32", V3) == pytest.approx(61.5 / 10.2)
    assert passes("s8", find_device("tpu-v5e")) == pytest.approx(0.5)


# SCALE-Sim


@pytest.mark.parametrize(
    ("dataflow", "across", "down", "length", "expected"),
    [
        # Loading R rows, then T inputs skewed over R and C: 2R + C + T - 2 a fold.
        ("ws", 8, 8, 5, 2 * 8 + 8 + 5 - 2),
        ("ws", 9, 17, 20, 2 * 3 * (2 * 8 + 8 + 20 - 2)),
        ("is", 9, 20, 17, 2 * 3 * (2 * 8 + 8 + 17 - 2)),
        # Outputs stay: R + C + T - 2.
        ("os", 20, 17, 9, 3 * 3 * (8 + 8 + 9 - 2)),
    ],
)
def test_cycles_of_scalesim_are_the_formula(
    dataflow: str, across: int, down: int, length: int, expected: int
) -> None:
    pytest.importorskip("scalesim")
    from opcast.models.simulators.scalesim import compute_cycles

    assert compute_cycles(across, down, length, 8, 8, dataflow) == expected


CONFIG = """[general]
run_name = stock
[architecture_presets]
ArrayHeight: 8
ArrayWidth: 8
IfmapSramSzkB: 64
FilterSramSzkB: 64
OfmapSramSzkB: 64
IfmapOffset: 0
FilterOffset: 10000000
OfmapOffset: 20000000
Dataflow: {dataflow}
Bandwidth: 10
ReadRequestBuffer: 32
WriteRequestBuffer: 32
[layout]
IfmapCustomLayout: False
IfmapSRAMBankBandwidth: 10
IfmapSRAMBankNum: 10
IfmapSRAMBankPort: 2
FilterCustomLayout: False
FilterSRAMBankBandwidth: 10
FilterSRAMBankNum: 10
FilterSRAMBankPort: 2
[sparsity]
SparsitySupport: false
[run_presets]
InterfaceBandwidth: CALC
UseRamulatorTrace: False
"""
SHAPES = [(5, 8, 8), (20, 17, 9), (33, 8, 30)]  # m n k


@LEAKS
@pytest.mark.parametrize("dataflow", ["ws", "os", "is"])
def test_the_driver_agrees_with_stock_scalesim(
    dataflow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("scalesim")
    import scalesim.memory.double_buffered_scratchpad_mem as memory
    from scalesim.scale_sim import scalesim

    from opcast.models.simulators.scalesim import run

    # Version 3.0.0 gives int() a list of arrays with one element, which NumPy 2.4 refuses.
    monkeypatch.setattr(
        memory, "max", lambda *a: float(np.max(a[0] if len(a) == 1 else a)), raising=False
    )
    (tmp_path / "c.cfg").write_text(CONFIG.format(dataflow=dataflow))
    lines = [f"l{i},{m},{n},{k},\n" for i, (m, n, k) in enumerate(SHAPES)]
    (tmp_path / "t.csv").write_text("Layer,M,N,K,\n" + "".join(lines))
    ones = "".join(f"l{i}{',1' * 20},\n" for i in range(len(SHAPES)))
    (tmp_path / "l.csv").write_text("Layer\n" + ones)
    stock = scalesim(
        save_disk_space=True, verbose=False, config=str(tmp_path / "c.cfg"),
        topology=str(tmp_path / "t.csv"), layout=str(tmp_path / "l.csv"), input_type_gemm=True,
    )  # fmt: skip
    stock.run_scale(top_path=str(tmp_path / "out"))
    with (tmp_path / "out" / "stock" / "COMPUTE_REPORT.csv").open() as file:
        table = list(csv.reader(file))[1:]
    reported = [int(row[2]) for row in table]
    for (m, n, k), last in zip(SHAPES, reported, strict=True):
        job = {"m": m, "n": n, "k": k, "rows": 8, "columns": 8, "dataflow": dataflow}
        ways = run(job)["ways"]
        cycles = [w["folds"] * (w["length"] + w["overhead"]) for w in ways]
        # The report has the number of the last cycle, counted from 0.
        assert last + 1 in cycles


@pytest.mark.usefixtures("replayed")
def test_scalesim_estimates_a_product_by_hand() -> None:
    found = ScaleSimEstimator(progress=False).predict([gemm(4096, 256, 256)], V3)
    # 2 × 2 folds of 2·128 + 128 + 4096 - 2 on two arrays; the other way round 2 × 32 folds of 638.
    cycles = min(2 * (2 * 128 + 128 + 4096 - 2), 32 * (2 * 128 + 128 + 256 - 2))
    assert cycles == 8956
    memory_s = 2 * (4096 * 256 + 256 * 256 + 4096 * 256) / 450e9
    assert found.latency[0] == pytest.approx(max(cycles / 940e6, memory_s) + V3.floor)
    assert found.source.tolist() == ["simulator:scalesim"]
    assert found.in_domain.all()


@pytest.mark.usefixtures("replayed")
def test_precision_multiplies_the_passes() -> None:
    text = GEMM.format(m=512, n=512, k=512, t="f32").replace(
        "rhs_contracting_dims={0}", "rhs_contracting_dims={0}, operand_precision={highest,highest}"
    )
    exact, rounded = kernel_from_ir(text), gemm(512, 512, 512, "f32")
    once, often = (
        ScaleSimEstimator(progress=False).predict([kernel], V3).latency[0] - V3.floor
        for kernel in (rounded, exact)
    )
    assert often / once == pytest.approx(61.5 / 10.2)


# ZigZag


@LEAKS
@pytest.mark.parametrize(
    "shape",
    [
        (1, 128, 32, 64),
        later((1, 64, 64, 64)),
        later((4, 32, 32, 32)),
    ],
)
def test_the_driver_agrees_with_stock_zigzag(
    shape: tuple[int, int, int, int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("zigzag")
    import yaml
    from zigzag.api import get_hardware_performance_zigzag

    from opcast.models.simulators import zigzag

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    b, m, n, k = shape
    job = {
        "b": b, "m": m, "n": n, "k": k, "bits": 16, "input_bits": 16, "rows": 16, "columns": 16,
        "arrays": 2, "bits_per_cycle": 512, "on_chip_bits": 1 << 23, "memory_bits": 1 << 33,
        "orders": 4,
    }  # fmt: skip
    turned = {**job, "m": n, "n": m}
    stock = []
    for own in [job] if m == n else [job, turned]:
        parts = zigzag.described(own)
        Path("a.yaml").write_text(yaml.safe_dump(parts["accelerator"], sort_keys=False))
        Path("m.yaml").write_text(yaml.safe_dump(parts["mapping"]))
        Path("w.yaml").write_text(yaml.safe_dump(parts["workload"]))
        _, cycles, _ = get_hardware_performance_zigzag(
            "w.yaml", "a.yaml", "m.yaml", dump_folder="out", lpf_limit=4,
            nb_spatial_mappings_generated=1, loma_show_progress_bar=False,
        )  # fmt: skip
        stock.append(cycles)
    found = zigzag.run(job)
    assert found["cycles"] == min(stock)
    assert found["ideal"] == b * m * n * k / (16 * 16 * 2)
    assert found["cycles"] >= found["ideal"]
    recorded = Recorded("zigzag")
    assert recorded.versions == {"zigzag-dse": version("zigzag-dse")}
    if shape == (1, 128, 32, 64):
        if RECORDING:
            recorded.add(job, found)
        assert recorded.reply(job) == found


@pytest.mark.usefixtures("replayed")
def test_zigzag_knows_the_bandwidth() -> None:
    # A product with little to do for its traffic takes at least the time of the traffic.
    kernel = gemm(2048, 16, 2048)
    answer, slow = (
        ZigZagEstimator(4, progress=False).answers([kernel], spec)[0].seconds
        for spec in (V3, replace(V3, levels=(replace(V3.levels[0], bandwidth=45e9),)))
    )
    moved = 2 * (2048 * 16 + 2048 * 2048 + 2048 * 16)
    assert answer >= 0.99 * moved / 450e9
    assert slow >= 0.99 * moved / 45e9


# All of them


@pytest.mark.usefixtures("replayed")
def test_other_kernels_take_the_roofline_and_say_why() -> None:
    kernels = [kernel_from_ir(ADD), gemm(64, 64, 64)]
    estimator = ScaleSimEstimator(progress=False)
    found = estimator.predict(kernels, V3)
    expected = roofline(kernels[:1], V3).latency_s + V3.floor
    np.testing.assert_allclose(found.latency[:1], expected)
    assert found.source.tolist() == ["roofline", "simulator:scalesim"]
    assert found.in_domain.tolist() == [False, True]
    assert estimator.reasons(kernels, V3) == ["no matrix product (fusion)", ""]
    notes = estimator.notes(kernels, V3)
    assert notes[0].endswith("models 1 of 2 kernels; nothing is calibrated")
    assert notes[1] == "1 kernels take the roofline: no matrix product (fusion)"
    assert (found.lo < found.latency).all() and (found.latency < found.hi).all()


@pytest.mark.usefixtures("replayed")
def test_no_kernels_are_no_work() -> None:
    assert len(ScaleSimEstimator().predict([], V3).latency) == 0


@pytest.mark.usefixtures("replayed")
def test_answers_stay_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    first = ScaleSimEstimator(progress=False).predict([gemm(64, 64, 64)], V3)
    monkeypatch.setattr(base.ToolProcess, "ask", no_tool)
    again = ScaleSimEstimator(progress=False).predict([gemm(64, 64, 64)] * 2, V3)
    assert again.latency.tolist() == first.latency.tolist() * 2
    asks: list[Callable[[], SimulatorEstimator]] = [
        lambda: ScaleSimEstimator("os", progress=False), lambda: ScaleSimEstimator(progress=False),
    ]  # fmt: skip
    for make, device in zip(asks, (V3, find_device("tpu-v4")), strict=True):
        with pytest.raises(AssertionError, match="was asked"):
            make().predict([gemm(64, 64, 64)], device)


@pytest.mark.usefixtures("replayed")
def test_a_limit_of_time_is_a_reason_until_it_is_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = gemm(64, 64, 64)
    short = ScaleSimEstimator(limit_s=0.01, progress=False)
    with monkeypatch.context() as patched:
        hung = {"error": "no answer within 0.01 s", "hung": True}
        patched.setattr(base.ToolProcess, "ask", lambda self, job: hung)
        assert short.reasons([kernel], V3) == ["no answer within 0.01 s"]
    assert short.predict([kernel], V3).source.tolist() == ["roofline"]
    with monkeypatch.context() as patched:
        patched.setattr(base.ToolProcess, "ask", no_tool)
        again = ScaleSimEstimator(limit_s=0.005, progress=False)
        assert again.reasons([kernel], V3) == ["no answer within 0.01 s"]
    assert ScaleSimEstimator(limit_s=60.0, progress=False).reasons([kernel], V3) == [""]


def test_recorded_answers_are_those_of_scalesim(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scalesim")
    recorded = Recorded("scalesim")
    assert recorded.versions == {"scalesim": version("scalesim")}
    job = {"m": 8, "n": 8, "k": 8, "rows": 8, "columns": 8, "dataflow": "ws"}
    with base.ToolProcess("scalesim", 60.0) as process:
        assert process.ask({"m": 1})["error"] == "KeyError: 'n'"
        assert process.ask(job)["ways"][0] == {"folds": 1, "length": 8, "overhead": 22}
        for request, reply in recorded.replies.items():
            assert process.ask(json.loads(request)) == reply
    monkeypatch.setattr(base, "START_S", 0.0)
    with base.ToolProcess("scalesim", 0.01) as process:
        assert process.ask(job) == {"error": "no answer within 0.01 s", "hung": True}


def test_a_tool_whose_process_dies_is_started_again() -> None:
    pytest.importorskip("scalesim")
    with base.ToolProcess("no_such_tool", 60.0) as process:
        for _ in range(2):
            error = process.ask({})["error"]
            assert error.startswith("the tool's process died: ModuleNotFoundError")


def test_model_folders(tmp_path: Path) -> None:
    ScaleSimEstimator("os", limit_s=5.0).save(tmp_path / "model")
    found = ScaleSimEstimator.load(tmp_path / "model")
    assert (found.params, found.limit_s) == ({"dataflow": "os"}, 5.0)
    with pytest.raises(ModelError, match="not 'zigzag'"):
        ZigZagEstimator.load(tmp_path / "model")


# The TPU's compiler


def test_the_compilers_estimates() -> None:
    text = (Path(__file__).parents[2] / "features" / "data" / "absent" / "v5e_pool.hlo").read_text()
    kernels, _ = extract_kernels(parse_hlo(text))
    spec = find_device("tpu-v5e")
    found = make_estimator("compiler").predict(kernels, spec)
    told = np.array([kernel.cycles > 0 for kernel in kernels])
    assert told.any() and not told.all()
    cycles = np.array([kernel.cycles for kernel in kernels])
    np.testing.assert_allclose(found.latency[told], cycles[told] / spec.clock_hz)
    assert set(found.source[told]) == {"compiler:libtpu"}
    assert set(found.source[~told]) == {"roofline"}
    with pytest.raises(DeviceError, match="only the TPUs' does"):
        make_estimator("compiler").predict(kernels, find_device("h100-sxm"))


# IREE


def test_iree_runs_on_this_machine_alone() -> None:
    with pytest.raises(DeviceError, match="not the CPU of this machine"):
        IreeEstimator().check(V3)


def test_a_fusion_becomes_its_computation() -> None:
    from opcast.models.simulators.iree import unfused

    program = parse_hlo(
        "HloModule m\nf {\n  p = f32[4,2] parameter(0)\n  q = f32[8] bitcast(p)\n"
        "  ROOT s = f32[8] add(q, q)\n}\nENTRY e {\n  a = f32[4,2] parameter(0)\n"
        "  ROOT r = f32[8] fusion(a), kind=kLoop, calls=f\n}\n"
    )
    ops = unfused(program).entry_computation.ops
    assert [op.opcode for op in ops] == ["parameter", "reshape", "add"]


def test_the_median_of_the_repeats_counts() -> None:
    from opcast.models.simulators.iree import median_seconds

    rows = [{"run_type": "iteration", "cpu_time": t, "time_unit": "us"} for t in (9, 2, 4)]
    rows.append({"run_type": "aggregate", "cpu_time": 100, "time_unit": "us"})
    told = json.dumps({"benchmarks": rows})
    assert median_seconds(told, "cpu_time") == pytest.approx(4e-6)


@pytest.mark.usefixtures("replayed")
def test_iree_measurements_are_the_latencies() -> None:
    local = replace(find_device("h100-sxm"), name=local_name(), platform="cpu")
    kernels = [gemm(256, 256, 256, "f32"), gemm(16, 16, 16, "f32")]
    estimator = IreeEstimator(repeats=3, time_s=0.02, limit_s=120.0, progress=False)
    found = estimator.predict(kernels, local)
    assert found.source.tolist() == ["measured:iree"] * 2
    jobs = [estimator.job(k, row, local) for k, row in zip(kernels, rows(kernels), strict=True)]
    replies = [Recorded("iree").reply(job) for job in jobs if not isinstance(job, str)]
    assert found.latency.tolist() == [reply["seconds"] for reply in replies]


@pytest.mark.usefixtures("replayed")
def test_iree_says_what_it_cannot_run() -> None:
    local = replace(find_device("h100-sxm"), name=local_name(), platform="cpu")
    text = "HloModule m\nENTRY e {\n  a = f32[8,4] parameter(0)\n  ROOT r = f32[8,4] copy(a)\n}\n"
    (reason,) = IreeEstimator(limit_s=120.0, progress=False).reasons([kernel_from_ir(text)], local)
    assert reason == "StableHLO has no copy"


@pytest.mark.slow
def test_recorded_answers_are_those_of_iree() -> None:
    reason = "needs the extra iree (390 MB), which the tests do not install"
    for module in ("iree.compiler", "iree.runtime"):
        pytest.importorskip(module, reason=reason)
    recorded = Recorded("iree")
    assert recorded.versions == {name: version(name) for name in recorded.versions}
    with base.ToolProcess("iree", 120.0) as process:
        for request, reply in recorded.replies.items():
            found = process.ask(json.loads(request))
            if "error" in reply:
                assert found == reply
            else:  # a measurement: of this machine, now
                assert found.keys() == reply.keys() and found["seconds"] > 0


def local_name() -> str:
    from opcast.features.devices.device import local_device_name

    return local_device_name()
