from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import textwrap
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest

from opcast.common.errors import ProfileError
from opcast.datagen.dataset_folder import done_programs, read_failures, replace_shards
from opcast.datagen.profile.anchors import AnchorLog
from opcast.datagen.profile.measure import first_runs, median_width
from opcast.datagen.profile.plan import Item, Plan, ProfileSettings, given_items
from opcast.datagen.profile.profile import profile
from opcast.datagen.profile.run import ProfileRun
from opcast.datagen.profile.runner import Runner, rotation
from opcast.features.dataset import Dataset
from opcast.features.devices.device import DeviceSpec, MemoryLevel

SPEC = DeviceSpec("cpu-x", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e9, 1e10),), 1e-6)

TEXT = """module @m {{
  func.func public @main(%a: tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32> {{
    %0 = stablehlo.dot_general %a, %a, contracting_dims = [1] x [0]
      : (tensor<{n}x{n}xf32>, tensor<{n}x{n}xf32>) -> tensor<{n}x{n}xf32>
    %1 = stablehlo.tanh %0 : tensor<{n}x{n}xf32>
    return %1 : tensor<{n}x{n}xf32>
  }}
}}
"""
BAD = "module @bad {\n  func.func public @main() { nonsense }\n}\n"
#: Adds to its own state: donated argument 0 is output 0.
TRAIN = """module @train {
  func.func public @main(
      %w: tensor<256xf32> {tf.aliasing_output = 0 : i32}, %g: tensor<256xf32>
  ) -> (tensor<256xf32>, tensor<f32>) {
    %0 = stablehlo.add %w, %g : tensor<256xf32>
    %c = stablehlo.constant dense<0.0> : tensor<f32>
    %1 = stablehlo.reduce(%0 init: %c) applies stablehlo.add across dimensions = [0]
      : (tensor<256xf32>, tensor<f32>) -> tensor<f32>
    return %0, %1 : tensor<256xf32>, tensor<f32>
  }
}
"""


@dataclass
class Source:
    name: str
    mlir: str
    family: str = "test"


def tiny(*sizes: int) -> list[Source]:
    return [Source(f"net{n}", TEXT.format(n=n)) for n in sizes]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five good programs, one malformed and one too big, with one measured again."""
    folder = tmp_path_factory.mktemp("dataset")
    sources = [*tiny(8, 16, 64, 96, 128), Source("bad", BAD), Source("huge", TEXT.format(n=8192))]
    result = profile(
        folder,
        ProfileSettings(max_memory=200e6, replicate_share=0.2, patience=0.0),
        sources=sources,
        device_spec=SPEC,
    )
    assert (result.programs, result.failed, result.stopped) == (6, 2, "done")
    return folder


def test_rows_of_five_tiny_programs(measured: Path) -> None:
    frame = Dataset.load(measured).frame
    kernels = frame[frame["level"] == "kernel"]
    assert set(kernels["program"].str.split("#").str[0]) == {
        f"given-net{n}" for n in (8, 16, 64, 96, 128)
    }
    assert (kernels["repeats"] >= 7).all()
    assert (kernels["latency_us_p10"] > 0).all()
    assert (kernels["latency_us_p10"] <= kernels["latency_us_p50"]).all()
    assert (kernels["latency_us_p50"] <= kernels["latency_us_p90"]).all()
    product = kernels[(kernels["kind"] == "gemm") & (kernels["program"] == "given-net128")]
    assert product["flops"].iloc[0] == 2 * 128**3


def test_whole_programs_take_longer_than_their_kernels(measured: Path) -> None:
    frame = Dataset.load(measured).frame
    whole = frame[frame["level"] == "program"].set_index("program")["latency_us_p50"]
    parts = frame[frame["level"] == "kernel"].groupby("program")["latency_us_p10"].sum()
    assert set(whole.index) == set(parts.index)
    assert (whole > 0.8 * parts.loc[whole.index]).all()


def test_failures_have_reasons(measured: Path) -> None:
    reasons = {f["program"]: f["reason"] for f in read_failures(measured)}
    assert set(reasons) == {"given-bad", "given-huge"}
    # Its argument alone: 8192² · 4 bytes.
    assert "0.268 GB" in reasons["given-huge"]
    assert "limit is 0.2 GB" in reasons["given-huge"]


def test_record_has_anchors_replicates_and_versions(measured: Path) -> None:
    (record,) = Dataset.load(measured).runs.values()
    assert set(record["anchors"]["values_us"]) == {"gemm", "vector", "memory", "single"}
    assert len(record["anchors"]["times_s"]) >= 3  # begin, shard, end
    assert record["replicated"]
    assert record["counts"]["worker_starts"] == 2
    assert {"jax", "compiler", "python", "os", "xla_flags"} <= set(record["host"])
    assert record["state"] == "done"
    assert os.uname().nodename not in json.dumps(record).replace("anchor", "")


def test_replicates_are_rows_of_the_same_kernels(measured: Path) -> None:
    frame = Dataset.load(measured).frame
    again = frame[frame["program"].str.endswith("#1") & (frame["level"] == "kernel")]
    assert len(again)
    assert set(again["kernel_hash"]) <= set(frame[~frame.index.isin(again.index)]["kernel_hash"])
    assert frame["sample_id"].is_unique


def test_nothing_is_left_to_do(measured: Path) -> None:
    before = sorted(path.name for path in measured.iterdir())
    sources = [*tiny(8, 16, 64, 96, 128), Source("bad", BAD), Source("huge", TEXT.format(n=8192))]
    result = profile(measured, ProfileSettings(max_memory=200e6), sources=sources, device_spec=SPEC)
    assert (result.run_id, result.samples, result.stopped) == ("", 0, "done")
    assert (result.setup_s, result.check_s) == (result.elapsed_s, 0.0)
    assert sorted(path.name for path in measured.iterdir()) == before


@pytest.mark.exhaustive  # it measures again
def test_another_device_of_a_folder_has_everything_to_do(measured: Path, tmp_path: Path) -> None:
    for path in measured.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    other = dataclasses.replace(SPEC, name="cpu-y")
    result = profile(
        tmp_path,
        ProfileSettings(max_memory=200e6, patience=0.0),
        sources=tiny(8),
        device_spec=other,
    )
    assert (result.programs, result.stopped) == (1, "done")
    # Starting JAX comes before the first program, another worker's start after the last one.
    assert result.setup_s > 0.1 and result.check_s > 0.1
    assert result.setup_s + result.check_s < result.elapsed_s
    frame = Dataset.load(tmp_path).frame
    both = frame[frame["program"] == frame.loc[frame["device"] == "cpu-y", "program"].iloc[0]]
    assert set(both["device"]) == {SPEC.name, "cpu-y"}


def test_replacing_shards_keeps_every_row(measured: Path, tmp_path: Path) -> None:
    for path in measured.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    before = Dataset.load(tmp_path)
    merged = replace_shards(tmp_path, Dataset.load(tmp_path).frame)
    assert [path.name for path in tmp_path.glob("*.parquet")] == [merged.name]
    assert Dataset.load(tmp_path).hash == before.hash
    assert done_programs(tmp_path) == done_programs(measured)


#: With a third argument, it waits for ever before it measures what follows the first file.
SCRIPT = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from opcast.datagen.profile.plan import ProfileSettings
    from opcast.datagen.profile.profile import profile
    from opcast.datagen.profile.run import ProfileRun
    from opcast.features.devices.device import DeviceSpec, MemoryLevel
    spec = DeviceSpec("cpu-x", "cpu", {"f32": 1e11}, {"f32": 1e10}, (MemoryLevel(1e9, 1e10),), 1e-6)
    text = open(sys.argv[2]).read()

    class Source:
        family = "test"
        def __init__(self, n):
            self.name, self.mlir = f"net{n}", text.replace("64", str(n))

    measure = ProfileRun._measure

    def hold(self, batch, ahead):
        if list(Path(sys.argv[1]).glob("*.parquet")):
            print("held", flush=True)
            time.sleep(600)
        measure(self, batch, ahead)

    if __name__ == "__main__":
        if len(sys.argv) > 3:
            ProfileRun._measure = hold
        sources = [Source(n) for n in range(8, 20, 2)]
        settings = ProfileSettings(
            check_every_s=0.0, replicate_share=0.0, patience=0.0, max_memory=200e6
        )
        profile(sys.argv[1], settings, sources=sources, device_spec=spec, progress=False)
    """
)


@pytest.mark.exhaustive  # tests/trust/test_faults.py kills a profiler, too
def test_kill_and_resume(tmp_path: Path) -> None:
    script, text, out = tmp_path / "run.py", tmp_path / "net.mlir", tmp_path / "out"
    script.write_text(SCRIPT)
    text.write_text(TEXT.format(n=64))
    command = [sys.executable, str(script), str(out), str(text)]
    with subprocess.Popen([*command, "hold"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        process.send_signal(signal.SIGKILL)
    first = Dataset.load(out).frame  # no half files: it loads
    assert 0 < first["program"].nunique() < 6
    subprocess.run(command, check=True, timeout=90)
    frame = Dataset.load(out).frame
    assert set(frame["program"]) == {f"given-net{n}" for n in range(8, 20, 2)}
    rows = pd.concat([pd.read_parquet(path) for path in out.glob("*.parquet")])
    assert not rows.duplicated(["program", "kernel_hash", "level"]).any()
    assert set(first["sample_id"]) <= set(frame["sample_id"])


def test_donated_state_is_chained() -> None:
    import jax

    from opcast.features.ir.reader import read_program
    from opcast.features.lowering.xla import compile_native

    native = compile_native(read_program(TRAIN), name="train")
    aliases = native.aliases
    assert aliases == ((0, 0),)
    import numpy as np

    def arguments(_: int) -> list[np.ndarray]:
        return [np.zeros(256, np.float32), np.ones(256, np.float32)]

    runner = Runner(native.run, arguments, aliases)
    for _ in range(5):
        assert runner.step() > 0
    # Five steps of adding one.
    assert np.asarray(jax.device_get(runner.arguments[0][0])).tolist() == [5.0] * 256


def test_wrong_device_says_what_to_install(tmp_path: Path) -> None:
    settings = ProfileSettings(device="tpu", max_memory=200e6)
    with pytest.raises(ProfileError, match=r"JAX sees a cpu.*jax\[tpu\]"):
        profile(tmp_path, settings, sources=tiny(8), device_spec=SPEC)
    with pytest.raises(ProfileError, match="unknown device"):
        profile(tmp_path, ProfileSettings(device="npu"), sources=tiny(8))


def test_user_mistakes(tmp_path: Path) -> None:
    with pytest.raises(ProfileError, match="budget"):
        profile(tmp_path)
    with pytest.raises(ProfileError, match="two programs"):
        given_items([*tiny(8), *tiny(8)])
    with pytest.raises(ProfileError, match="cannot be read"):
        given_items([tmp_path / "none.mlir"])
    with pytest.raises(ProfileError, match="unknown streams"):
        Plan({"ops": 1.0})


def test_plan_shares_time_and_repeats_itself() -> None:
    def order(done: set[str]) -> list[Item]:
        plan = Plan({"op": 0.5, "random": 0.5}, seed=3)
        items: list[Item] = []
        while len(items) < 60:
            batch = plan.next_batch(done)
            plan.spent[batch[0].stream] = plan.spent.get(batch[0].stream, 0.0) + 1.0
            items += batch
        return items

    items = order(set())
    assert [i.key for i in items] == [i.key for i in order(set())]
    assert {i.stream for i in items[:16]} == {"op", "random"}
    done = {i.key for i in items[:20]}
    assert not done & {i.key for i in order(done)}


def test_anchors_see_a_disturbance() -> None:
    log = AnchorLog()
    assert log.add(0.0, {"a": 100.0, "b": 10.0}) == 1.0
    # Geometric mean of 2 and 1.5: √3.
    assert log.add(1.0, {"a": 200.0, "b": 15.0}) == pytest.approx(3**0.5)


def test_repeats_and_intervals() -> None:
    assert first_runs(10e-6) == 25
    assert first_runs(0.05) == 9
    assert first_runs(0.6) == 3
    assert first_runs(2.0) == 2
    # n = 9: ranks 4.5 ± 2.94, so values 1 and 8 (of 0 to 8); median 4 + 100.
    assert median_width([100.0 + i for i in range(9)]) == pytest.approx((108 - 101) / 104)
    assert rotation(1e6, 30e6) == 8
    assert rotation(20e6, 32e6) == 2
    assert rotation(500e6, 32e6) == 1


def test_a_resumed_folder_keeps_the_description_that_the_machine_agrees_with(tmp_path, caplog):
    measured = replace(SPEC, source="measured")
    slow = replace(measured, peak_flops={"f32": 4e10}, levels=(MemoryLevel(1e9, 4e9),))

    class Client:
        now = measured

        def ask(self, what: str) -> dict[str, object]:
            assert what == "ceilings"
            return {"device": asdict(self.now)}

    own = ProfileRun(tmp_path, ProfileSettings(), [], None)
    own._measurer = SimpleNamespace(client=Client())
    own._earlier = {"a": {"device": asdict(measured)}, "b": {"device": asdict(slow)}}
    assert own._known_device("cpu-x") == measured
    Client.now = replace(slow, peak_flops={"f32": 5e10})
    assert own._known_device("cpu-x") == slow
    Client.now = replace(measured, peak_flops={"f32": 1e12})
    assert own._known_device("cpu-x") is None
    assert "measured anew" in caplog.text
    # Other names and descriptions that were given are not compared.
    assert own._known_device("cpu-y") is None
    own._earlier = {"a": {"device": asdict(SPEC)}}
    assert own._known_device("cpu-x") == SPEC
