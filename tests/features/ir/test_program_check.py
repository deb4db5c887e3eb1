"""Faults of programs are told from those of opcast."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import pytest

import opcast
from opcast.common.errors import DeviceError, InternalError, ProgramError
from opcast.features.devices.catalogue import find_device
from opcast.features.ir.program_check import program_fault
from opcast.features.ir.reader import read_program
from opcast.features.kernels import extract as kernels
from opcast.features.lowering.lower import lower

DATA = Path(__file__).parents[1] / "data"
HEAD = """HloModule m

sum {
  a = f32[] parameter(0)
  b = f32[] parameter(1)
  ROOT s = f32[] add(a, b)
}

ENTRY main {
  x = f32[8,4] parameter(0)
  z = f32[] constant(0)
"""
GOOD = HEAD + "  ROOT y = f32[8] reduce(x, z), dimensions={1}, to_apply=sum\n}\n"


def module(line: str) -> str:
    return f"{HEAD}  ROOT y = {line}\n}}\n"


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("f32[8] reduce(x, z), dimensions={5}, to_apply=sum", "{5} of reduce do not fit 2"),
        ("f32[8,4] reduce(x, z), dimensions={1}, to_apply=sum", "reduce of f32[8,4] cannot be"),
        ("f32[8] reduce(x, z), dimensions={1}", "reduce lacks 1 of the computations"),
        ("f32[8] reduce(x), dimensions={1}, to_apply=sum", "reduce lacks 1 of its operands"),
        ("f32[8] reduce(x, z), to_apply=sum", "attributes of reduce cannot be read (KeyError"),
        ("f32[8,4] add(x)", "add lacks 1 of its operands"),
        ("f32[8,4] add(x, z)", "add of f32[8,4], f32[] cannot be f32[8,4]"),
        ("f32[4,8] transpose(x), dimensions={0,0}", "dimensions={0,0} of transpose do not fit"),
        ("f32[8,4] transpose(x), dimensions={1,0}", "transpose of f32[8,4] cannot be f32[8,4]"),
        ("f32[8,4] broadcast(z), dimensions={0}", "dimensions of broadcast are 1, not 0"),
        ("f32[5] reshape(x)", "reshape of f32[8,4] cannot be f32[5]"),
        ("f32[8,2] slice(x), slice={[0:8]}", "the limits of slice do not fit"),
        ("f32[8,2] slice(x), slice={[0:8], [0:9]}", "the limits of slice do not fit"),
        ("f32[8,8] pad(x, z), padding=0_0", "padding of 1 dimensions"),
        ("f32[16] concatenate(x, x), dimensions={0}", "different numbers of dimensions"),
        ("f32[8,8] dot(x, x), lhs_contracting_dims={1}, rhs_contracting_dims={0}", "[4] and [8]"),
        ("f32[8,8] dot(x, x), lhs_contracting_dims={2}, rhs_contracting_dims={0}", "do not fit 2"),
        ("f32[] get-tuple-element(x), index=0", "of an array"),
        ("f32[4611686018427387904,4] broadcast(z), dimensions={}", "more than 2^60 elements"),
    ],
)  # fmt: skip
def test_an_op_that_does_not_fit_its_operands_is_named(line: str, fault: str) -> None:
    found, op = program_fault(read_program(module(line)).program)
    assert fault in found
    assert op == "y"


def test_a_body_that_changes_the_state_is_named() -> None:
    text = """HloModule m

body {
  p = (s32[], f32[8]) parameter(0)
  ROOT i = s32[] get-tuple-element(p), index=0
}

test {
  p = (s32[], f32[8]) parameter(0)
  ROOT t = pred[] constant(false)
}

ENTRY main {
  p = (s32[], f32[8]) parameter(0)
  ROOT w = (s32[], f32[8]) while(p), condition=test, body=body
}
"""
    assert program_fault(read_program(text).program) == (
        "body does not return the state of the loop", "w",
    )  # fmt: skip


@pytest.mark.parametrize(
    "path", sorted([*DATA.rglob("*.hlo"), *DATA.rglob("*.mlir")]), ids=lambda path: path.name
)
def test_nothing_is_wrong_with_programs_that_compilers_took(path: Path) -> None:
    assert program_fault(read_program(path).program) == ("", "")


def test_malformed_programs_are_the_users_fault() -> None:
    with pytest.raises(ProgramError, match=r"malformed: dimensions=\{5\} of reduce") as caught:
        lower(module("f32[8] reduce(x, z), dimensions={5}, to_apply=sum"), "fused")
    assert caught.value.where == "y"
    assert isinstance(caught.value.__cause__, IndexError)


@pytest.mark.parametrize("kind", [KeyError, AssertionError, IndexError])
def test_a_rule_that_fails_on_a_good_program_is_the_fault_of_opcast(monkeypatch, kind) -> None:
    # A mock, whose frames are not opcast's, as the tests' own are where they lie in its folder.
    monkeypatch.setattr(kernels, "is_free", Mock(side_effect=kind("nonesuch")))
    with pytest.raises(InternalError, match=f"{kind.__name__}: .*nonesuch") as caught:
        lower(GOOD, "op")
    assert isinstance(caught.value.__cause__, kind)
    assert "features/kernels/extract.py:" in caught.value.what and "(_visit)" in caught.value.what
    assert caught.value.where == "z"
    assert "report it" in caught.value.hint
    assert not isinstance(caught.value, ProgramError)


def test_lower_takes_a_path_and_the_name_of_a_device(tmp_path) -> None:
    path = tmp_path / "step.mlir"
    path.write_text(jax.jit(jnp.sin).lower(jax.ShapeDtypeStruct((64,), "float32")).as_text())
    spec = find_device("h100-sxm")
    expected = [k.hash for k in lower(read_program(path), "fused", device=spec).kernels]
    for program in (path, str(path), path.read_bytes(), path.read_text()):
        found = opcast.lower(program, "fused", device="h100-sxm")
        assert (found.target, [k.hash for k in found.kernels]) == (spec.name, expected)
    assert opcast.lower(path, "op", device="local").target == "any"
    saved = tmp_path / "device.json"
    saved.write_text(spec.to_json())
    assert opcast.lower(path, "fused", device=saved).target == spec.name


@pytest.mark.parametrize(
    ("device", "what"),
    [
        ("h100-smx", "h100-smx"), (17, "a device cannot be a int"),
        (Path("nonesuch.json"), "no such device file"), ("nonesuch.yaml", "nonesuch.yaml"),
    ],
)  # fmt: skip
def test_lower_says_which_devices_it_takes(device, what: str) -> None:
    with pytest.raises(DeviceError) as caught:
        opcast.lower(GOOD, "fused", device=device)
    assert what in str(caught.value)
    assert "malformed" not in str(caught.value)
