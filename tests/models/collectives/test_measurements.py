import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from opcast.common.errors import DatasetError, DeviceError
from opcast.models.collectives.fit import fit_curve, fit_residual, fit_tree, read_residual
from opcast.models.collectives.links import Links
from opcast.models.collectives.measurements import parse_nccl_tests, read_collectives, size_bins
from opcast.models.collectives.model import CollectiveModel
from opcast.models.collectives.on_cluster import ClusterCollectives
from opcast.models.collectives.study import (
    four_of_each_cell,
    knots_us,
    study,
    summary,
    three_parameter_us,
    three_parameters,
)
from opcast.models.collectives.table import collective_table
from opcast.simulate.clusters.catalogue import find_cluster
from opcast.simulate.clusters.topology import Cluster, Dimension, Topology
from opcast.simulate.collectives.choose import collective_cost

NCCL = """# Collective test starting: all_gather_perf
# nThread 1 nGpus 4 minBytes 1024 maxBytes 67108864 step: 2(factor) warmup iters: 5 iters: 20
#  Rank  0 Group  0 Pid  41 on      node0 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  41 on      node0 device  1 [0x0a] NVIDIA A100-SXM4-80GB
#  Rank  2 Group  0 Pid  41 on      node1 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  3 Group  0 Pid  41 on      node1 device  1 [0x0a] NVIDIA A100-SXM4-80GB
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
        1024            64     float    none      -1    12.34    0.08    0.06      0    12.10
     1048576         65536     float    none      -1    45.60   23.00   17.25    N/A    45.10
# Avg bus bandwidth    : 8.7
"""


def test_output_of_nccl_tests():
    rows = parse_nccl_tests(NCCL)
    assert rows["bytes"].tolist() == [1024, 1048576]
    assert rows["latency_us"].tolist() == [12.34, 45.60]  # out of place
    assert set(rows["op"]) == {"all_gather"} and set(rows["device"]) == {"NVIDIA A100-SXM4-80GB"}
    assert set(rows["world_size"]) == {4} and set(rows["devices_per_node"]) == {2}


def test_several_outputs_and_what_is_not_said():
    both = parse_nccl_tests(NCCL + NCCL.replace("all_gather", "sendrecv"))
    assert both["op"].tolist() == ["all_gather"] * 2 + ["send_recv"] * 2
    silent = NCCL.split("\n", 1)[1]
    assert set(parse_nccl_tests(silent, "all_reduce.log")["op"]) == {"all_reduce"}
    assert set(parse_nccl_tests(silent, op="alltoall", device="mine")["device"]) == {"mine"}
    with pytest.raises(DatasetError, match="--op"):
        parse_nccl_tests(silent)
    with pytest.raises(DatasetError, match="list of ranks"):
        parse_nccl_tests(NCCL.replace("#  Rank", "# rank"))
    with pytest.raises(DatasetError, match="no results"):
        parse_nccl_tests("nothing")


def curve_rows(device="NVIDIA H100 80GB HBM3", worlds=(2, 4, 8), op="all_reduce"):
    sizes = 2.0 ** np.arange(10, 29)
    rows = [(op, s, n, device) for n in worlds for s in sizes]
    return pd.DataFrame(rows, columns=["op", "bytes", "world_size", "device"])


def test_own_csv_and_devices_of_the_catalogue(tmp_path):
    path = tmp_path / "mine.csv"
    curve_rows(op="all-to-all").assign(latency_us=9.0).to_csv(path, index=False)
    rows, find = read_collectives([path])
    assert set(rows["op"]) == {"alltoall"} and set(rows["source"]) == {"mine"}
    assert find("NVIDIA H100 80GB HBM3").link == 450e9
    with pytest.raises(DeviceError, match="not in the catalogue"):
        find("unknown")


def test_folders_bring_their_device_tables(tmp_path):
    curve_rows("round").assign(latency_us=9.0).to_csv(tmp_path / "collectives.csv.gz", index=False)
    table = pd.DataFrame({"device": ["round"], "link_gbs_unidir": [100.0]})
    table.to_csv(tmp_path / "devices.csv", index=False)
    assert read_collectives([tmp_path])[1]("round").link == 100e9


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DatasetError, match="no such file"):
        read_collectives([tmp_path / "none"])
    with pytest.raises(DatasetError, match="no collectives"):
        read_collectives([tmp_path])
    (tmp_path / "bad.csv").write_text("op,bytes\nall_reduce,1\n")
    with pytest.raises(DatasetError, match="world_size"):
        read_collectives([tmp_path / "bad.csv"])


def links(_):
    return Links(link=1e11, host=3e10, inter_node=1e10, architecture="X")


def test_three_parameters_are_found_again():
    table = collective_table(curve_rows(), links)
    truth = np.array([6.0, 1.5, 0.7])
    assert three_parameters(table, three_parameter_us(truth, table)) == pytest.approx(
        truth, rel=0.01
    )


def test_knots_interpolate_and_leave_gaps():
    table = collective_table(curve_rows(worlds=(4,)), links)
    latency = 5.0 * table.points.size**0.5
    others = collective_table(curve_rows(worlds=(4, 8)), links)
    found = knots_us(table, latency, others)
    assert found[:19] == pytest.approx(latency, rel=0.02) and np.isnan(found[19:]).all()


def test_residuals_follow_their_rows_and_fade():
    octaves = np.arange(10.0, 20.0)
    logs = 0.2 * np.sin(octaves)
    table = fit_residual(octaves, logs)
    assert read_residual(table, octaves) == pytest.approx(logs, abs=0.03)
    assert abs(read_residual(table, np.array([40.0]))[0]) < 0.001


def bumpy(rows):
    """Curve of the shipped parameters' family with a bump that no curve has."""
    table = collective_table(rows, links)
    smooth = three_parameter_us(np.array([6.0, 1.5, 0.7]), table)
    return smooth * (1 + 0.4 * np.exp(-((np.log2(table.points.size) - 20) ** 2)))


def test_tables_take_up_what_curves_leave_over():
    rows = curve_rows()
    table, latency = collective_table(rows, links), bumpy(rows)
    tree = fit_tree(table, latency)
    curve = tree.predict_us(table, known=False)
    known = tree.predict_us(table)
    worst = np.abs(np.log(known / latency)).max()
    assert worst < 0.5 * np.abs(np.log(curve / latency)).max() and worst < 0.12


def test_study_compares_on_the_same_rows():
    parts = [
        curve_rows(d).assign(latency_us=bumpy(curve_rows(d)), platform=d) for d in ("one", "two")
    ]
    rows = pd.concat(parts, ignore_index=True).assign(source="made up", split="train")

    def find(name):
        return Links(**{**links(name).__dict__, "architecture": name})

    errors = study(rows, find)
    held = errors["fitted"].notna()
    assert held.sum() == len(rows) // 5 and errors["left_out"].notna().all()
    assert errors["from_a100"].isna().all()
    assert errors["four_sizes"].isna().sum() == 2 * 3 * 4  # given: four sizes of each cell
    table = summary(errors, ["size"], ["fitted", "ring"])
    assert table["rows"].sum() == held.sum()
    assert (table["fitted mean"] < table["ring mean"]).all()
    assert summary(errors, []).loc["all", "rows"] == held.sum()


def test_four_sizes_of_each_cell():
    table = collective_table(curve_rows(), links)
    given = table.take(four_of_each_cell(table))
    assert sorted(set(np.log2(given.points.size))) == [12, 18, 23, 28] and len(given) == 12


def test_bins_of_sizes():
    names = size_bins(np.array([2**15, 2**20, 2**24, 2**24 + 1]))
    assert names.tolist() == ["up to 32 KiB", "32 KiB to 1 MiB", "1 to 16 MiB", "above 16 MiB"]


@pytest.fixture(scope="module")
def shipped():
    return ClusterCollectives()


def test_clusters_that_were_measured_take_the_curves(shipped):
    box = find_cluster("h100-sxm-x8")
    found = shipped.estimate("all-gather", 2**23, 8, box)
    assert (found.source, found.detail) == ("learned", "known")
    rows = pd.DataFrame(
        {"op": ["all_gather"], "bytes": [2**26], "world_size": [8], "backend": ["nccl"],
         "device": ["NVIDIA H100 80GB HBM3"]}
    )  # fmt: skip
    direct = shipped.model.predict(
        rows, lambda _: Links(450e9, 64e9, 50e9, memory=3.35e12, clock_hz=1.98e9)
    )
    assert found.latency == pytest.approx(direct["latency_s"].iloc[0], rel=1e-6)
    assert found.lo < found.latency < found.hi
    assert shipped.estimate("all_gather", 2**23, 8, box) == found


def test_clusters_that_were_not_take_formulas(shipped):
    pod = find_cluster("dgx-h100-x128")
    across = shipped.estimate("all_reduce", 2**26, range(0, 128, 8), pod)
    assert across.source == "analytical" and across.detail in ("ring", "tree")
    assert across.latency == collective_cost("all_reduce", 2**26, range(0, 128, 8), pod).total
    assert across.hi == pytest.approx(3 * across.latency)
    assert (
        shipped.estimate("all_reduce", 2**26, 8, find_cluster("tpu-v3-x8")).source == "analytical"
    )
    wide = Cluster("mine", "h100-sxm", Topology((Dimension("switch", 32, 4.5e11, name="nvlink"),)))
    assert shipped.estimate("all_reduce", 2**26, 32, wide).source == "analytical"
    nobody = Cluster("mine", "", Topology((Dimension("switch", 4, 1e11),)))
    assert shipped.estimate("all_reduce", 2**20, 4, nobody).source == "analytical"


def test_a_machine_is_known_with_as_many_devices_as_were_measured(shipped):
    rack = find_cluster("gb200-x72")
    four, eight, all_of_it = (shipped.estimate("all_reduce", 2**26, n, rack) for n in (4, 8, 72))
    # NCCL was measured with up to four.
    assert [e.detail for e in (four, eight)] == ["known", "new"]
    assert eight.hi / eight.lo > 1.4 * four.hi / four.lo
    # XLA, which calls NCCL, with up to 72.
    assert all_of_it.detail == "known"
    assert all_of_it == shipped.estimate("all_reduce", 2**26, 72, rack, backend="xla")


def _with_links(box, **own):
    return replace(box, topology=Topology((replace(box.topology.dims[0], **own),)))


def test_another_kind_of_links_is_priced_by_formulas(shipped):
    other = _with_links(find_cluster("h100-sxm-x8"), kind="ring", reduction="")
    found = shipped.estimate("all_reduce", 2**28, 8, other)
    assert found.source == "analytical"
    assert found.latency == collective_cost("all_reduce", 2**28, 8, other).total


@pytest.mark.parametrize("name", ["h100-sxm-x8", "mi300x-x8", "l40s-x8"])
@pytest.mark.parametrize("size", [2**12, 2**20, 2**28])
def test_links_with_other_figures_follow_the_curves(shipped, name, size):
    box = find_cluster(name)
    usual = box.topology.dims[0]
    known = shipped.estimate("all_reduce", size, 8, box)
    closed = collective_cost("all_reduce", size, 8, box).total
    for figure, better, worse in (
        ("latency", 0.9, 1.1),
        ("launch", 0.9, 1.1),
        ("efficiency", 1.1, 0.9),
    ):
        fast, slow = (
            _with_links(box, **{figure: getattr(usual, figure) * factor})
            for factor in (better, worse)
        )
        quick, late = (shipped.estimate("all_reduce", size, 8, own) for own in (fast, slow))
        assert quick.latency <= known.latency <= late.latency
        assert quick.lo <= known.lo and quick.hi == known.hi and known.hi <= late.hi
        # A tenth of one figure changes the time by a tenth at most.
        assert late.latency <= 1.12 * known.latency
        own = collective_cost("all_reduce", size, 8, slow).total
        assert late.latency == pytest.approx(known.latency * own / closed)


def test_other_links_follow_the_curves_and_are_new(shipped):
    box = find_cluster("h100-sxm-x8")
    faster = replace(box.topology.dims[0], bandwidth=1.01 * 450e9)
    known = shipped.estimate("all_reduce", 2**28, 8, box)
    new = shipped.estimate("all_reduce", 2**28, 8, replace(box, topology=Topology((faster,))))
    assert (known.detail, new.detail) == ("known", "new")
    assert known.latency / 1.01 <= new.latency < known.latency
    assert new.hi / new.lo > known.hi / known.lo


@pytest.mark.parametrize("name", ["h100-sxm", "mi300x"])
def test_an_unchanged_copy_of_a_chip_has_its_collectives(shipped, name, tmp_path):
    (tmp_path / "copy.yaml").write_text(f"name: copy\nbase: {name}\n")
    box = find_cluster(f"{name}-x8")
    copy = replace(box, device=str(tmp_path / "copy.yaml"))
    for size in (2**16, 2**28):
        own, base = (shipped.estimate("all_reduce", size, 8, c) for c in (copy, box))
        assert own == base and base.source == "learned"


def test_pairwise_links_carry_what_gfx950_measured(shipped):
    """1 GiB over eight gfx950: 4.69 ms measured under XLA, whose pack is of that chip."""
    box = find_cluster("mi355x-x8")
    closed = collective_cost("all_reduce", 2**30, 8, box).total
    assert closed == pytest.approx(4.69e-3, rel=0.2)
    found = shipped.estimate("all_reduce", 2**30, 8, box, "xla")
    assert found.latency == pytest.approx(4.69e-3, rel=0.05)


def test_formulas_and_curves_agree_on_long_collectives(shipped):
    for name in ("h100-sxm-x8", "a100-sxm-80gb-x8", "rtx-pro-6000-x4", "mi300x-x8"):
        box = find_cluster(name)
        for kind in ("all_reduce", "reduce_scatter"):
            learned = shipped.estimate(kind, 2**28, box.size, box).latency
            assert collective_cost(kind, 2**28, box.size, box).total == pytest.approx(
                learned, rel=0.25
            )


def test_saved_residuals_come_back(tmp_path):
    rows = curve_rows()
    own = CollectiveModel.find().calibrated(rows.assign(latency_us=bumpy(rows)), links)
    own.save(tmp_path / "own.json")
    again = CollectiveModel.load(tmp_path / "own.json")
    assert again.tree.residuals.keys() == own.tree.residuals.keys()
    expected = own.predict(rows, links)["latency_s"]
    assert np.allclose(again.predict(rows, links)["latency_s"], expected, rtol=2e-3)
    content = json.loads((tmp_path / "own.json").read_text())
    assert "scale_up/all_reduce/nccl/NVIDIA H100 80GB HBM3/8" in content["residuals"]


def test_fit_curve_stays_positive():
    table = collective_table(curve_rows(), links)
    fitted = fit_curve(table, bumpy(curve_rows()), np.zeros(17) + 1.0, 1.0)
    assert np.isfinite(fitted).all()


def test_xla_waits_longer_for_small_collectives(shipped):
    box = find_cluster("h100-sxm-x8")
    nccl = shipped.estimate("all_reduce", 2**12, 8, box)
    xla = shipped.estimate("all_reduce", 2**12, 8, box, backend="xla")
    assert (xla.source, xla.detail) == ("learned", "known")
    # An executable of one all-reduce takes 20 to 50 us on eight H100 (XLA's table).
    assert nccl.latency < 18e-6 < xla.latency < 60e-6
    rack = find_cluster("gb200-x72")
    few, many = (
        shipped.estimate("all_gather", 1024, n, rack, backend="xla").latency for n in (8, 64)
    )
    # A ring: about 1.2 us for each of 7 and of 63 steps.
    assert many - few == pytest.approx(56 * 1.3e-6, rel=0.3)
    shift = shipped.estimate("collective_permute", 2**30, 8, box, backend="xla")
    assert shift.source == "learned" and 2**30 / shift.latency < 450e9


def test_tables_of_xla_become_rows(tmp_path):
    row = {"device": "gb300", "kind": "all-to-all", "pattern": None, "n_devices": 4,
           "total_devices": 64, "bytes": 4096, "latency_us": 20.0, "current": 1}  # fmt: skip
    table = pd.DataFrame(
        [
            row,
            {**row, "kind": "collective-permute", "pattern": "one-way", "n_devices": 64},
            {**row, "kind": "collective-permute", "pattern": "ring", "n_devices": 64},
            {**row, "n_devices": 1},
            {**row, "current": 0},
        ]
    )
    table.to_csv(tmp_path / "collectives.csv", index=False)
    rows, find = read_collectives([tmp_path])
    assert rows["op"].tolist() == ["alltoall", "send_recv", "collective_permute"]
    assert rows["world_size"].tolist() == [4, 2, 2] and set(rows["backend"]) == {"xla"}
    # GB200 and GB300 were measured as one.
    assert set(rows["group"]) == {"gb200"}
    assert find("gfx950").peers == 7 and find("gb300").peers == 0
    assert find("gfx950").bandwidth("scale_up", 2) == pytest.approx(537e9 / 7)
