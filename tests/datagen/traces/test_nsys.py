from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from opcast.common.errors import DatasetError
from opcast.datagen.traces.aten import traced_operators
from opcast.datagen.traces.importer import import_trace, read_trace, trace_files
from opcast.datagen.traces.nsys import read_nsys, read_nsys_csv
from opcast.datagen.traces.xla import traced_programs
from opcast.features.dataset import Dataset
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.reader import read_program
from opcast.features.kernels.kernel import LoweredProgram
from opcast.features.lowering.lower import lower

from ...support.traces import HLO, nsys_sqlite

RUN = [
    ("loop_tanh_fusion.1", "loop_tanh_fusion_1", 4000),
    ("dot.2", "sm90_xmma_gemm_f32f32", 9000),
    ("dot.2", "splitKreduce_kernel", 1000),
    ("all-reduce.3", "ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7000),
]
CSV = """Processing [t.sqlite] with [cuda_gpu_trace.py]...

Start (ns),Duration (ns),CorrId,GrdX,GrdY,GrdZ,BlkX,Strm,Device,Ctx,Bytes (MB),Name
1000,4000,1,1,1,1,128,7,NVIDIA H100 80GB HBM3 (0),1,,loop_tanh_fusion_1
6000,500,2,,,,,7,NVIDIA H100 80GB HBM3 (0),1,0.5,[CUDA memcpy HtoD]
20000,6000,3,1,1,1,128,7,NVIDIA H100 80GB HBM3 (0),1,,loop_tanh_fusion_1
26000,500,4,,,,,7,NVIDIA H100 80GB HBM3 (0),1,0.5,[CUDA memcpy HtoD]
"""
SUMMARY = """Time (%),Total Time (ns),Instances,Avg (ns),Med (ns),Min (ns),Max (ns),StdDev (ns),Name
80.0,12000,3,4000.0,3900.0,3800,4300,200,loop_tanh_fusion_1
20.0,3000,1,3000.0,3000.0,3000,3000,0,"void other<int, 4>(float*)"
"""


def program() -> LoweredProgram:
    return lower(read_program(HLO), cache=False)


def test_kernels_of_xla_by_their_ranges(tmp_path: Path) -> None:
    slower = [(op, name, length + 2000 * (op == "dot.2")) for op, name, length in RUN]
    path = nsys_sqlite(tmp_path / "t.sqlite", [RUN, slower, slower])
    trace = read_trace(path)
    assert trace.of_xla and trace.device_name.startswith("NVIDIA H100")
    (found,) = traced_programs(trace, [program()])
    assert found.module == "jit_step(7)" and len(found.runs) == 3
    assert found.durations["loop_tanh_fusion.1"] == pytest.approx([4e-6] * 3)
    # Both kernels of the product count, in each run.
    assert found.durations["dot.2"] == pytest.approx([10e-6, 14e-6, 14e-6])
    first = found.runs[0]
    assert first.exposed == pytest.approx(7e-6) == first.collectives
    # Four kernels, half a microsecond apart.
    assert first.gaps == pytest.approx(1.5e-6) and first.span == pytest.approx(22.5e-6)


def test_a_dataset_of_xla_kernels(tmp_path: Path) -> None:
    trace = read_nsys(nsys_sqlite(tmp_path / "t.sqlite", [RUN] * 4))
    spec = find_device("h100-sxm")
    with pytest.raises(DatasetError, match=r"no HLO of jit_step\(7\).*--program"):
        import_trace(trace, tmp_path / "out", spec)
    result = import_trace(trace, tmp_path / "out", spec, given=[program()])
    assert result.matched == 1.0 and result.samples == 4
    frame = Dataset.load(tmp_path / "out").frame
    assert set(frame["kind"]) == {"fusion", "gemm", "collective", "program"}
    product = frame[frame["kind"] == "gemm"].iloc[0]
    assert product["latency_us_p50"] == pytest.approx(10.0) and product["repeats"] == 4
    whole = frame[frame["level"] == "program"].iloc[0]
    assert whole["latency_us_p50"] == pytest.approx(22.5) and whole["repeats"] == 3
    assert "jit_step" not in frame.to_csv()


def test_what_does_not_match_is_counted(tmp_path: Path) -> None:
    other = [*RUN, ("fusion.99", "fusion_99", 11_000)]
    trace = read_nsys(nsys_sqlite(tmp_path / "t.sqlite", [other, other]))
    result = import_trace(trace, tmp_path / "out", find_device("h100-sxm"), given=[program()])
    # 11 of 32 microseconds.
    assert result.unmatched == [("fusion.99", pytest.approx(11 / 32))]
    assert result.matched == pytest.approx(21 / 32)


def test_operators_of_pytorch_by_their_ranges(tmp_path: Path) -> None:
    text = "aten::addmm, seq = 3, op_id = 4, sizes = [[1024], [512, 256], [256, 1024], [], []]"
    run = [(text, "ampere_bf16_s16816gemm_bf16_128x128", 9000), ("range", "other", 1000)]
    trace = read_nsys(nsys_sqlite(tmp_path / "t.sqlite", [run] * 2, module="", text="{}"))
    product = traced_operators(trace.devices[0].executed.events)[0]
    assert product.row["dtype"] == "bf16" and product.row["n"] == 1024
    assert product.seconds == pytest.approx([9e-6, 9e-6])


def test_tables_of_nsys_stats(tmp_path: Path) -> None:
    listed, summed = tmp_path / "trace.csv", tmp_path / "sum.csv"
    listed.write_text(CSV)
    summed.write_text(SUMMARY)
    trace = read_nsys_csv(listed)
    assert trace.device_name == "NVIDIA H100 80GB HBM3" and trace.devices[0].index == 0
    # Kernels are named after instructions, with what C does not allow replaced.
    (found,) = traced_programs(trace, [program()])
    assert found.durations == {"loop_tanh_fusion.1": pytest.approx([4e-6, 6e-6])}
    summary = read_trace(summed)
    assert not summary.ordered and "no times of start" in summary.notes[0]
    (found,) = traced_programs(summary, [program()])
    assert found.durations["loop_tanh_fusion.1"] == pytest.approx([3.9e-6] * 3)
    assert found.runs == []


def test_a_librarys_kernels_in_a_table_count_as_not_matched(tmp_path: Path) -> None:
    """Of two runs of 15 us, 9 are of a kernel that no instruction of the program is named as."""
    rows = ["Start (ns),Duration (ns),CorrId,Strm,Device,Name"]
    for start in (0, 100_000):
        rows += [f"{start},4000,1,7,H100 (0),loop_tanh_fusion_1",
                 f"{start + 5000},9000,2,7,H100 (0),sm90_xmma_gemm_bf16"]  # fmt: skip
    (tmp_path / "t.csv").write_text("\n".join(rows) + "\n")
    trace = read_nsys_csv(tmp_path / "t.csv")
    (found,) = traced_programs(trace, [program()])
    assert found.unmatched == {"sm90_xmma_gemm_bf16": pytest.approx(18e-6)}
    assert [run.span for run in found.runs] == pytest.approx([14e-6, 14e-6])
    result = import_trace(trace, tmp_path / "out", find_device("h100-sxm"), given=[program()])
    assert result.matched == pytest.approx(4 / 13)


def test_errors_say_what_to_do(tmp_path: Path) -> None:
    whole = nsys_sqlite(tmp_path / "t.sqlite", [RUN] * 200).read_bytes()
    cut = tmp_path / "cut.sqlite"
    cut.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match="cut off or damaged"):
        read_trace(cut)
    report = tmp_path / "t.nsys-rep"
    report.write_bytes(b"anything")
    with pytest.raises(DatasetError, match="nsys export --type sqlite"):
        read_trace(report)
    table = tmp_path / "t.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(DatasetError, match=r"its columns are a, b.*cuda_gpu_trace"):
        read_trace(table)
    empty = tmp_path / "e.pb"
    empty.write_bytes(b"")
    with pytest.raises(DatasetError, match="empty"):
        read_trace(empty)
    with pytest.raises(DatasetError, match="no such file"):
        trace_files([tmp_path / "absent"])
    with pytest.raises(DatasetError, match="no profile in this directory"):
        trace_files([tmp_path])


def test_replays_of_graphs_without_their_kernels_are_told(tmp_path: Path) -> None:
    path = nsys_sqlite(tmp_path / "t.sqlite", [RUN])
    assert read_trace(path).notes == []
    with closing(sqlite3.connect(path)) as base:
        # The columns that nsys exports at the granularity of graphs, its default.
        base.execute(
            "CREATE TABLE CUPTI_ACTIVITY_KIND_GRAPH_TRACE (start INTEGER NOT NULL, end INTEGER "
            "NOT NULL, deviceId INTEGER, contextId INTEGER, streamId INTEGER, correlationId "
            "INTEGER, globalPid INTEGER, graphId INTEGER, graphExecId INTEGER)"
        )
        row = (100, 900, 0, 1, 7, 55, 5 << 24, 109, 110)
        base.executemany(
            "INSERT INTO CUPTI_ACTIVITY_KIND_GRAPH_TRACE VALUES (?,?,?,?,?,?,?,?,?)", [row] * 2
        )
        base.commit()
    (note,) = read_trace(path).notes
    assert note.startswith("2 replays of CUDA graphs")
    assert "--cuda-graph-trace=node" in note


def test_columns_and_tables_that_present_versions_add(tmp_path: Path) -> None:
    path = nsys_sqlite(tmp_path / "t.sqlite", [RUN, RUN])
    with closing(sqlite3.connect(path)) as base:
        for column in ("contextId", "greenContextId", "graphNodeId", "launchType", "mangledName"):
            base.execute(f"ALTER TABLE CUPTI_ACTIVITY_KIND_KERNEL ADD COLUMN {column} INTEGER")
        for column in ("rangeId", "domainId", "endGlobalTid", "jsonTextId"):
            base.execute(f"ALTER TABLE NVTX_EVENTS ADD COLUMN {column} INTEGER")
        # A domain, a mark, and a range that was still open at the end.
        for start, end, kind in ((0, None, 75), (50, None, 34), (60, -1, 59)):
            columns = "(start, end, eventType, text, globalTid)"
            values = (start, end, kind, "step 1", (5 << 24) + 77)
            base.execute(f"INSERT INTO NVTX_EVENTS {columns} VALUES (?,?,?,?,?)", values)
        base.execute("CREATE TABLE META_DATA_EXPORT (name TEXT, value TEXT)")
        base.execute("INSERT INTO META_DATA_EXPORT VALUES ('EXPORT_SCHEMA_VERSION', '3.25.0')")
        base.commit()
    (found,) = traced_programs(read_trace(path), [program()])
    assert len(found.runs) == 2
    assert found.durations["dot.2"] == pytest.approx([10e-6, 10e-6])
