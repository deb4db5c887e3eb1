from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from opcast.common.errors import ProgramError
from opcast.features.lowering.options import LoweringOptions
from opcast.models.contributions import Contribution
from opcast.models.explain import KernelExplanation, Outside
from opcast.predict.program.case import ProgramCase
from opcast.predict.program.explain import ProgramExplanation, explain, explain_lowered
from opcast.predict.program.predictor import Predictor
from opcast.predict.render.program import print_explanation


def case(program, device) -> ProgramCase:
    return ProgramCase(program, LoweringOptions(device=device))


@pytest.fixture(scope="module")
def found(predictor, device, step) -> ProgramExplanation:
    return explain(predictor, case(step, device), top=2)


def shown(found: ProgramExplanation) -> str:
    console = Console(file=StringIO(), width=120)
    print_explanation(console, found)
    return " ".join(console.file.getvalue().split())


def test_costliest_kernels_come_first(found, predictor, device, step) -> None:
    assert len(found.kernels) == 2
    assert found.kernels[0].share >= found.kernels[1].share > 0
    again = predictor.predict(step, device=device)
    assert found.prediction.latency_us == again.latency_us
    by_name = {k.name: k for k in again.kernels}
    for k in found.kernels:
        assert k.explanation.latency_us == pytest.approx(by_name[k.name].latency_us)
        assert k.in_program_us == pytest.approx(by_name[k.name].latency_us)


def test_equal_kernels_count_as_one(predictor, device, step) -> None:
    every = explain(predictor, case(step, device), top=1000)
    hashes = [k.explanation.kernel_hash for k in every.kernels]
    assert len(set(hashes)) == len(hashes)
    assert sum(k.share for k in every.kernels) == pytest.approx(1.0)
    executions = sum(k.executions for k in every.kernels)
    assert executions == sum(k.multiplicity for k in every.prediction.kernels)


def test_an_unknown_kernel_lists_the_costliest(found, predictor, device, step) -> None:
    with pytest.raises(ProgramError, match=found.kernels[0].name):
        explain(predictor, case(step, device), kernel="nonsense")


def test_an_empty_program_has_nothing_to_explain(predictor, device) -> None:
    from opcast.features.kernels.kernel import LoweredProgram

    empty = explain_lowered(predictor, LoweredProgram([], "xla", "cpu"), device)
    assert empty.kernels == ()


def altered(found: ProgramExplanation, **values: object) -> ProgramExplanation:
    kernel = found.kernels[0]
    explanation: KernelExplanation = replace(kernel.explanation, **values)  # type: ignore[arg-type]
    return replace(found, kernels=(replace(kernel, explanation=explanation),))


def test_screen_tells_a_kernel_by_itself_from_the_kernel_in_its_program(found) -> None:
    assert "for its context" not in shown(found)  # this model does not correct
    kernel = found.kernels[0]
    moved = replace(kernel, in_program_us=0.8 * kernel.explanation.latency_us)
    assert "× 0.80 for its context" in shown(replace(found, kernels=(moved,)))


def test_screen_says_why_a_kernel_is_outside(found) -> None:
    far = Outside("log_n_ops", 9.0, 0.0, 5.0, 1.0)
    odd = Outside("device_cores", 1.0, 0.0, 5.0, 0.3)
    text = shown(altered(found, in_domain=False, outside=(far, odd)))
    assert "outside the training domain" in text
    assert "log_n_ops = 9 is above the trained 0 to 5" in text and "device_cores" not in text
    text = shown(altered(found, in_domain=False, outside=(odd,)))
    assert "no training kernel near it combines device_cores" in text
    text = shown(altered(found, domain_score=None, domain_threshold=None, in_domain=True))
    assert "in the domain of the model" in text


def test_screen_sums_what_is_small(found) -> None:
    parts = tuple(Contribution(f"group {i}", 0.1) for i in range(9))
    text = shown(altered(found, contributions=parts, baseline=0.0, log_ratio=0.9))
    assert "group 5" in text and "group 6" not in text
    assert "3 other groups × 1.35 +0.300" in text  # exp(0.3) = 1.35
    assert "together × 2.46 +0.900" in text


def test_screen_notes_once_what_is_missing(predictor, device, step) -> None:
    bare = Predictor(replace(predictor.model, neighbour_file=b""))
    assert shown(explain(bare, case(step, device))).count("holds no neighbour table") == 1
