"""Simulated steps as traces: replayed, and run by the rules of ASTRA-sim."""

import json
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from opcast.cli import app
from opcast.predict.cluster.step import StepPredictor
from opcast.predict.export.chakra import export_step
from opcast.simulate.chakra.folder import read_folder
from opcast.simulate.chakra.messages import CommType, NodeType
from opcast.simulate.chakra.step_network import Axes, fitted_network, network_seconds, ring_work
from opcast.simulate.chakra.timeline import run_traces
from opcast.simulate.step.costs import Message
from opcast.simulate.step.named_workloads import read_workload
from opcast.simulate.step.plan import Group, parse_plan

from ...support.cases import later

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import astra_sim

LLAMA = ("llama", ("layers=8", "batch=64"))
MOE = ("moe", ("layers=4", "batch=64"))


def export(model, plan, out, cluster="dgx-h100-x16", most_nodes=4000):
    work = read_workload(model[0], list(model[1]))
    predictor = StepPredictor(cluster, None)
    found = predictor.predict(work, parse_plan(plan), remedy=False)
    costs = predictor.costs(work)
    said = export_step(found, costs, predictor.cluster, predictor.spec, out, most_nodes)
    return found, said


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        later(LLAMA, "dp=16"),
        later(LLAMA, "tp=8,pp=2"),
        (MOE, "dp=16,ep=8"),
        later(LLAMA, "fsdp=16"),
        (LLAMA, "dp=2,fsdp=8,recompute=full"),
        later(LLAMA, "tp=2,cp=2,dp=2,pp=2"),
        (LLAMA, "tp=2,pp=4,dp=2,schedule=interleaved,virtual=2"),
        later(LLAMA, "dp=4,pp=4,schedule=zero-bubble,zero=1"),
        (LLAMA, "dp=8,tp=2,zero=2,microbatches=4,overlap=false"),
        later(MOE, "tp=2,dp=8,ep=4,sp=false,hide_experts=true"),
    ],
)
def test_traces_take_the_predicted_time(model, plan, tmp_path):
    found, said = export(model, plan, tmp_path)
    ours = found.step.total
    assert said["ranks"] == 16 and said["step_us"] == ours * 1e6
    traces, groups = read_folder(tmp_path)
    # With our own times of collectives the schedule is the one that was predicted ...
    assert run_traces(traces, groups).makespan_us / 1e6 == pytest.approx(ours, rel=0.03)
    # ... and with those that ASTRA-sim computes on the network beside them, one at a time.
    assert astra_sim.simulate(tmp_path) / 1e9 == pytest.approx(ours, rel=0.1)


def test_a_folder_holds_micro_batches_stages_and_groups(tmp_path):
    found, _ = export(LLAMA, "tp=2,pp=2,dp=4,microbatches=4", tmp_path)
    traces, groups = read_folder(tmp_path)
    first, last = traces[0], traces[15]
    kinds = Counter(n.collective for n in first)
    # The first stage sends four micro-batches and receives as many gradients.
    assert kinds["send"] == kinds["recv"] == 4
    (sends,) = {(n.attrs["comm_src"], n.attrs["comm_dst"]) for n in first if n.collective == "send"}
    assert sends == (0, 8)
    (back,) = {(n.attrs["comm_src"], n.attrs["comm_dst"]) for n in last if n.collective == "send"}
    assert back == (15, 7)
    # Four layers, both passes, four micro-batches: a gather and a scatter among two ranks.
    assert kinds["all_gather"] == kinds["reduce_scatter"] == 4 * 2 * 4
    assert {tuple(groups[n.attrs["pg_name"]]) for n in first if n.collective == "all_gather"} == {
        (0, 1)
    }
    # Gradients of four layers and the embedding, each in f32 on half of the ranks, once.
    reduced = [n for n in first if n.collective == "all_reduce"]
    assert len(reduced) == 5
    assert {tuple(groups[n.attrs["pg_name"]]) for n in reduced} == {(0, 2, 4, 6)}
    w = found.workload
    layer = w.attention_parameters + w.expert_parameters
    sizes = sorted(n.bytes for n in reduced)
    assert sizes == pytest.approx([4 * w.vocab * w.d_model / 2, *[4 * layer / 2] * 4], rel=0.01)
    # Bytes that each rank puts in: two gathers of half of a micro-batch's activations each.
    gather = next(n for n in first if n.collective == "all_gather")
    tokens = w.batch // 4 // 4 * w.seq
    assert gather.bytes == 2 * tokens * w.d_model * 2 // 2
    assert sum(n.type == NodeType.COMP for n in first) == 4 * 2 * 5 + 1


def test_many_layers_become_one_block_of_the_same_time(tmp_path):
    fine, said = export(LLAMA, "tp=2,dp=8,microbatches=8", tmp_path / "fine")
    _, short = export(LLAMA, "tp=2,dp=8,microbatches=8", tmp_path / "coarse", most_nodes=160)
    assert short["nodes"] < said["nodes"] / 2
    coarse = astra_sim.simulate(tmp_path / "coarse") / 1e9
    assert coarse == pytest.approx(fine.step.total, rel=0.1)


def test_rings_carry_what_their_algorithms_send():
    # Four parts of 64 bytes among four ranks: 6 messages of 16 each for an all-reduce.
    assert ring_work("all_reduce", 4, 256.0) == (24.0, 24 * 16.0)
    assert ring_work("all_gather", 4, 64.0) == (12.0, 12 * 16.0)
    assert ring_work("reduce_scatter", 4, 256.0) == (12.0, 12 * 16.0)
    assert ring_work("alltoall", 4, 256.0) == (24.0, 24 * 16.0)
    assert ring_work("send_recv", 2, 256.0) == (1.0, 256.0)


def test_groups_are_rings_along_their_outermost_axis():
    axes = Axes([Group(2, 1), Group(4, 2), Group(2, 2), Group(2, 8)], 16)
    assert axes.sizes == [2, 2, 2, 2]
    assert axes.members(Group(2, 1), 5) == (4, 5)
    # 1, 3, 5 and 7: 1 and 5 differ in the outer axis of the group, so they are neighbours.
    assert axes.members(Group(4, 2), 3) == (1, 5, 3, 7)
    assert axes.of(Group(4, 2)) == [1, 2]


def test_the_network_gives_each_axis_its_bandwidth_and_latency():
    axes = Axes([Group(4, 1), Group(2, 4)], 8)

    def message(kind, group, size, latency, rate):
        sent, carried = ring_work(kind, group.size, size)
        return Message("x", kind, group, size, sent * latency + carried / rate)

    inner, outer = Group(4, 1), Group(2, 4)
    counts = {
        message("all_reduce", inner, 1e6, 1e-6, 4e11): 3.0,
        message("all_reduce", inner, 1e8, 1e-6, 4e11): 1.0,
        message("all_reduce", outer, 1e6, 5e-6, 5e10): 3.0,
        message("all_reduce", outer, 1e8, 5e-6, 5e10): 1.0,
    }
    network = fitted_network(counts, axes)
    assert [d.latency for d in network.dims] == pytest.approx([1e-6, 5e-6])
    # Both links of a ring together.
    assert [d.bandwidth for d in network.dims] == pytest.approx([8e11, 1e11])
    said = [network_seconds(m, axes, network) for m in counts]
    assert said == pytest.approx([m.seconds for m in counts])


def test_all_to_alls_load_the_links_as_direct_ones_do(tmp_path):
    export(MOE, "tp=2,dp=8,ep=8", tmp_path)
    traces, groups = read_folder(tmp_path)
    node = next(n for n in traces[0] if n.collective == "all_to_all")
    assert node.attrs["comm_type"] == CommType.ALL_TO_ALL
    work = read_workload(MOE[0], list(MOE[1]))
    assert len(groups[node.attrs["pg_name"]]) == 8
    # A rank's tokens to each of its experts, out and back; round a ring of 8 they travel 4 hops.
    found = StepPredictor("dgx-h100-x16", None).predict(work, parse_plan("tp=2,dp=8,ep=8"))
    tokens = work.batch // 8 // found.plan.microbatches * work.seq // 2
    assert node.bytes == pytest.approx(2 * tokens * work.top_k * work.d_model * 2 / 4)


def test_the_command_exports_a_step(tmp_path):
    def run(*arguments, code=0):
        result = CliRunner().invoke(app, ["export", "chakra", *map(str, arguments)])
        assert result.exit_code == code, result.output
        return result.output if code else result.stdout

    options = ("--cluster", "dgx-h100-x16", "--model", "roofline", "--out", tmp_path)
    step = ("--workload", "llama", "--set", "layers=2,batch=16", "--plan", "dp=16")
    said = json.loads(run(*step, *options, "--json"))
    assert said["ranks"] == 16 and said["collectives"]["all_reduce"]["count"] == 4
    assert np.isclose(said["communication_us"], said["astra_sim_communication_us"], rtol=0.05)
    assert "by ASTRA-sim's formulas" in run(*step, *options)
    assert "--lowering does not apply" in run(*step, *options, "--lowering", "op", code=2)
    assert "--plan does not apply" in run("step.mlir", *options, "--plan", "dp=2", code=2)
    assert "give a partitioned program" in run(*options, code=2)
