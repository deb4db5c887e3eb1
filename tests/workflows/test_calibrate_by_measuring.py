"""`opcast calibrate` for kernel models: from a dataset, and by measuring on this machine."""

import json
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from opcast.cli import app
from opcast.common.errors import DatasetError, DeviceError, WorseModelError
from opcast.datagen.profile.plan import Item
from opcast.features.dataset import Dataset
from opcast.models.adapt.device_correction import DeviceCorrection
from opcast.models.cost_model import CostModel
from opcast.predict.locate import find_model
from opcast.workflows.calibrate_by_measuring import Calibration, local_device, run_calibrate_budget
from opcast.workflows.settings import CalibrateSettings

COMMITTED = Path(__file__).resolve().parents[2] / "datagen" / "datasets" / "cpu"


def run(*arguments):
    return CliRunner().invoke(app, [str(a) for a in arguments], catch_exceptions=False)


@pytest.fixture(scope="module")
def twice_as_slow(tmp_path_factory):
    """A dataset as of a machine on which every kernel takes twice as long."""
    data = Dataset.load(COMMITTED)
    kept = data.frame[data.frame["level"] != "program"].sample(1500, random_state=0)
    columns = [c for c in kept if c.startswith("latency_us")]
    found = Dataset(kept.assign(**{c: 2 * kept[c] for c in columns}), data.runs)
    out = tmp_path_factory.mktemp("slow")
    found.save(out)
    return out, str(kept["device"].iloc[0])


def test_a_kernel_dataset_calibrates(twice_as_slow, tmp_path):
    data, device = twice_as_slow
    out = tmp_path / "m"
    result = run(
        "calibrate", "--device", device, "--data", data, "--samples", 60, "--out", out,
        "--plot", tmp_path / "curve.svg",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    assert "active" in result.output and "needed" in result.output
    assert (tmp_path / "curve.svg").stat().st_size > 1000
    model = CostModel.load(out)
    correction = model.corrections[device].correction
    assert correction.count == 60
    assert np.median(correction.errors) == pytest.approx(np.log(2), abs=0.35)


def test_a_gpu_calibrates_the_model_of_gpus(twice_as_slow, tmp_path, monkeypatch):
    # Kernels of a CPU teach a GPU nothing: that is refused otherwise.
    monkeypatch.setattr("opcast.workflows.calibrate_from_dataset.check_unseen", lambda *_, **__: 0)
    data, _ = twice_as_slow
    dataset = Dataset.load(data)
    frame = dataset.frame.sample(60, random_state=0).assign(device="h100-sxm")
    Dataset(frame, dataset.runs).save(tmp_path / "d")
    out = tmp_path / "m"
    result = run("calibrate", "--device", "h100-sxm", "--data", tmp_path / "d",
                 "--samples", 20, "--out", out)  # fmt: skip
    assert result.exit_code == 0, result.output
    assert (
        CostModel.load(out).estimator.name == CostModel.load(find_model("gpu-xla")).estimator.name
    )


def test_what_is_worse_than_before_is_not_saved(twice_as_slow, tmp_path):
    """Kernels of a CPU, said to be an H100's: what some teach is wrong for those of others."""
    data, _ = twice_as_slow
    dataset = Dataset.load(data)
    frame = dataset.frame.sample(60, random_state=0).assign(device="h100-sxm")
    Dataset(frame, dataset.runs).save(tmp_path / "d")
    words = ("calibrate", "--device", "h100-sxm", "--data", tmp_path / "d", "--samples", 20)
    with pytest.raises(WorseModelError, match=r"is not saved: error .* before, .* after"):
        run(*words, "--out", tmp_path / "m")
    assert not (tmp_path / "m").exists()
    # Without a file to write it is said, and nothing is refused.
    result = run(*words)
    assert result.exit_code == 0 and "each held out of the calibration" in result.output


def test_errors_of_programs_are_of_those_that_were_not_learned():
    """Two programs share nothing: each is predicted from the other, and their errors are equal."""
    rng = np.random.default_rng(0)
    sites = rng.normal(size=(6, 2))
    covariance = np.exp(-np.square(sites[:, None] - sites[None]).sum(2)) + 0.1 * np.eye(6)
    errors, inverse = rng.normal(size=6), np.linalg.inv(covariance)
    order = np.array([3, 1, 0, 5, 2, 4])
    posterior = SimpleNamespace(inverse=inverse, weights=inverse @ errors)
    correction = DeviceCorrection(posterior, (0.0, 0.0), order)
    # Samples 0, 2 and 3 are kernels 3, 0 and 5: predicted from samples 1, 4 and 5.
    found = correction.without([0, 3, 5])
    own, rest = [0, 2, 3], [1, 4, 5]
    expected = (
        covariance[np.ix_(own, rest)] @ np.linalg.inv(covariance[np.ix_(rest, rest)]) @ errors[rest]
    )
    assert [found[kernel] for kernel in (3, 0, 5)] == pytest.approx(expected.tolist())
    assert correction.without([7]) == {}


def test_another_machine_of_a_trained_name_does_not_take_its_place(
    twice_as_slow, tmp_path, monkeypatch
):
    # Ceilings say all of it: there is nothing to learn.
    monkeypatch.setattr("opcast.workflows.calibrate_from_dataset.check_unseen", lambda *_, **__: 0)
    data, device = twice_as_slow
    dataset = Dataset.load(data)
    for record in dataset.runs.values():
        own = record["device"]
        for table in ("peak_flops", "vector_flops"):
            own[table] = {d: rate / 2 for d, rate in own[table].items()}
        own["levels"] = [{**x, "bandwidth": x["bandwidth"] / 2} for x in own["levels"]]
    dataset.save(tmp_path / "other")
    run(
        "calibrate", "--device", device, "--data", tmp_path / "other", "--samples", 20,
        "--out", tmp_path / "m",
    )  # fmt: skip
    model, trained = CostModel.load(tmp_path / "m"), CostModel.load(find_model("default"))
    assert set(model.devices) == {device, f"{device}~104gf-24.1gbs"}
    assert model.devices[device] == trained.devices[device]
    assert set(model.corrections) == {f"{device}~104gf-24.1gbs"}


def test_too_small_a_dataset_is_refused(twice_as_slow):
    data, device = twice_as_slow
    with pytest.raises(DatasetError, match="are needed"):
        run("calibrate", "--device", device, "--data", data, "--samples", 1000)


def test_it_takes_data_or_a_budget(twice_as_slow):
    data, device = twice_as_slow
    for arguments in ((), ("--data", data, "--budget", "5m"), ("--budget", "soon")):
        result = run("calibrate", "--device", device, *arguments)
        assert result.exit_code == 2
        assert "--data or --budget" in result.output or "not a duration" in result.output


@pytest.mark.slow
@pytest.mark.exhaustive  # half a minute; the demo does the same
def test_a_short_budget_measures_on_this_machine(tmp_path, monkeypatch):
    out = tmp_path / "m"
    console = Console(record=True, width=120)
    settings = CalibrateSettings("local", budget_s=10.0, out=out, ops=4)
    rounds = run_calibrate_budget(console, settings)
    assert json.loads((out / "settings.json").read_text())["budget_s"] == 10.0
    assert rounds[0].learned == 0
    learned = [r.learned for r in rounds]
    assert learned == list(np.cumsum([0, *(r.kernels for r in rounds[:-1])]))
    assert rounds[0].error == rounds[0].before  # nothing was learned yet
    assert "calibrated" in console.export_text()
    model = CostModel.load(out)
    device = local_device("local", model)
    assert model.corrections[device.name].count == sum(r.kernels for r in rounds)


def test_only_the_device_at_hand_can_be_measured():
    model = CostModel.load(find_model("default"))
    with pytest.raises(DeviceError, match="not this machine's device"):
        local_device("h100-sxm", model)


def test_nothing_is_measured_twice():
    model = CostModel.load(find_model("default"))
    device = next(iter(model.devices.values()))
    run_ = Calibration(model, device, CalibrateSettings("local", budget_s=10.0))
    row = Dataset.load(COMMITTED).frame.query("level != 'program'").iloc[0].to_dict()
    assert run_.samples.add([row]) == [row["kernel_hash"]]
    assert run_.samples.add([{**row, "latency_us_p50": 7.0}]) == []
    assert run_.samples.seconds[row["kernel_hash"]] == 7e-6
    assert len(run_.samples) == 1


def test_labels_of_loops_are_learned_as_of_kernels_by_themselves():
    def recurrent(x, w):
        return jax.lax.fori_loop(0, 50, lambda _, h: jnp.tanh(h @ w), x)

    model = CostModel.load(find_model("default"))
    device = next(iter(model.devices.values()))
    run_ = Calibration(model, device, CalibrateSettings("local", budget_s=10.0))
    text = jax.jit(recurrent).lower(jnp.ones((4, 256)), jnp.ones((256, 256))).as_text()
    candidate = run_._candidate(Item("given", 0, name="recurrent", text=text))
    (product,) = (k for k in candidate.kernels if k.kind == "gemm")
    factor = candidate.factors[product.hash]
    assert 0.1 < factor < 0.6
    assert {f for h, f in candidate.factors.items() if h != product.hash} == {1.0}
    row = {"level": "kernel", "kernel_hash": product.hash, "kernel_ir": product.ir}
    run_.samples.add([{**row, "latency_us_p50": 7.0}], 0, candidate.factors)
    assert run_.samples.seconds[product.hash] == pytest.approx(7e-6 / factor)


def test_candidates_are_compiled_until_the_budget_ends(monkeypatch):
    """Measuring takes no time here: all that is compiled is measured, and more is compiled."""
    from opcast.datagen.profile.plan import zoo_suite
    from opcast.workflows import calibrate_by_measuring as calibrate

    model = CostModel.load(find_model("default"))
    device = next(iter(model.devices.values()))
    settings = CalibrateSettings("local", budget_s=100.0, ops=20)
    run_ = Calibration(model, device, settings)
    monkeypatch.setattr(calibrate, "COMPILING", 0.0)
    monkeypatch.setattr(run_, "_candidate", lambda item: item)
    monkeypatch.setattr(run_, "_chosen", lambda candidates: list(range(len(candidates))))
    measured = []

    def measure(measurer, chosen):
        measured.extend(chosen)
        run_.rounds.append(calibrate.Round(0, 1, tuple(c.key for c in chosen), 0.0, 0.0, 0.0))

    monkeypatch.setattr(run_, "_measure", measure)
    run_.run(progress=False)
    keys = [item.key for item in measured]
    suite = zoo_suite(settings.suite)
    assert len(keys) == len(set(keys)) == 20 + len(suite)
    assert [k.startswith("op-") for k in keys[:9]] == [True] * 8 + [False]


@pytest.mark.parametrize("probe", [0.0, 30.0])
def test_a_budget_holds_what_a_slow_machine_compiles(probe, monkeypatch):
    """By a clock of its own: an op compiles in 2 s, a program in 18, each is measured in 4."""
    from opcast.workflows import calibrate_by_measuring as calibrate

    clock = [1000.0]
    monkeypatch.setattr(calibrate.time, "monotonic", lambda: clock[0])
    model = CostModel.load(find_model("default"))
    settings = CalibrateSettings("local", budget_s=240.0)
    run_ = Calibration(model, next(iter(model.devices.values())), settings, probe)

    def compiled(item):
        clock[0] += 2.0 if item.stream == "op" else 18.0
        return item

    def measure(measurer, chosen):
        clock[0] += 4.0 * len(chosen)
        run_.rounds.append(calibrate.Round(0, 1, tuple(c.key for c in chosen), 0.0, 0.0, 0.0))

    monkeypatch.setattr(run_, "_candidate", compiled)
    monkeypatch.setattr(run_, "_chosen", lambda candidates: list(range(min(4, len(candidates)))))
    monkeypatch.setattr(run_, "_measure", measure)
    run_.run(progress=False)
    # The probe came before; four programs of the last round may end late, by 16 s.
    assert 0.7 * 240 < probe + clock[0] - 1000.0 < 1.1 * 240
    assert run_.longest[0].startswith("compiling zoo-") and run_.longest[1] == 18.0


@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_calibrating_beats_the_prior_or_leaves_it(factor):
    """Simulated rounds on a machine whose memory is slower by a factor, and which drifts."""
    from opcast.features.kernels.extract import kernels_from_irs
    from opcast.models.adapt.device_correction import DeviceCorrection, kernel_sites
    from opcast.models.core.kernel_table import kernel_table

    model = CostModel.load(find_model("default"))
    device = next(iter(model.devices.values()))
    frame = Dataset.load(COMMITTED).frame.query("level != 'program'").drop_duplicates("kernel_hash")
    kernels = kernels_from_irs(frame["kernel_ir"].sample(600, random_state=1).tolist())
    table = kernel_table(kernels, device)
    plain = model.estimator.predict(kernels, device)
    rng = np.random.default_rng(0)
    law = np.log(factor) * kernel_sites(table, device).share[:, 1]
    rounds = np.repeat(np.arange(12), 50)
    drift = rng.normal(0, 0.15, 12)[rounds]
    truth = plain.latency * np.exp(law)
    known, rest = rounds < 6, rounds >= 6
    labels = truth * np.exp(drift + rng.normal(0, 0.2, 600))
    at = np.flatnonzero(known)
    found = DeviceCorrection.fit(
        table.take(at), device, plain.take(at), labels[known], rounds[known]
    )
    left = np.flatnonzero(rest)
    calibrated = found.shifted(plain.take(left), found.mean(table.take(left), device)).latency
    before = np.abs(np.log(plain.latency[rest] / truth[rest])).mean()
    after = np.abs(np.log(calibrated / truth[rest])).mean()
    if factor == 1.0:
        # Nothing to learn but drift: the model stays within a few per cent of what it was.
        assert after < 0.03
    else:
        assert after < 0.5 * before
