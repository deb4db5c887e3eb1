"""Every reader on mutated real files, briefly; ``tests/bench/fuzz.py`` does it for long."""

import json
import logging
import random
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..support.cases import every
from .fuzzing import KINDS, ROOT, TARGETS, attempt, draw, mutate

PLAIN = [name for name, target in TARGETS.items() if not target.native]
NATIVE = [name for name, target in TARGETS.items() if target.native]
MUTATIONS = st.lists(
    st.tuples(
        st.sampled_from(KINDS), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32 - 1)
    ),
    min_size=1, max_size=6,
)  # fmt: skip


@pytest.mark.parametrize("name", TARGETS)
def test_seeds_are_accepted(name, tmp_path):
    if name not in NATIVE:  # those are tried in the process that fuzzes them
        assert {attempt(TARGETS[name], data, tmp_path) for data in TARGETS[name].seeds()} == {
            "accepted"
        }


@pytest.mark.parametrize("name", every(2, PLAIN))
def test_mutated_files_raise_nothing_but_what_users_are_told(name, tmp_path_factory):
    target, folder = TARGETS[name], tmp_path_factory.mktemp("fuzz")
    seeds = target.seeds()

    @settings(
        max_examples=20, deadline=None, database=None, derandomize=True,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(st.sampled_from(range(len(seeds))), MUTATIONS)
    def check(place, mutations):
        assert attempt(target, mutate(seeds[place], mutations), folder) in ("accepted", "refused")

    logging.disable(logging.WARNING)
    try:
        check()
    finally:
        logging.disable(logging.NOTSET)


@pytest.mark.parametrize("name", every(2, NATIVE))
def test_native_readers_neither_crash_nor_hang(name, tmp_path):
    out, keep = tmp_path / "counts.json", tmp_path / "kept"
    command = [sys.executable, ROOT / "tests/bench/fuzz.py", "--minutes", 0.06, "--target", name,
               "--out", out, "--keep", keep]  # fmt: skip
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    kept = "\n".join(p.read_text() for p in keep.glob("*.log")) if keep.exists() else ""
    assert done.returncode == 0, f"{done.stdout}\n{kept}"
    (counts,) = json.loads(out.read_text())["targets"].values()
    assert counts["faults"] == counts["crashes"] == counts["hangs"] == 0


def test_mutations_change_files_and_repeat_themselves():
    data = b"name: x\nsize: 12.5\n"
    found = [mutate(data, draw(random.Random(i))) for i in range(200)]
    assert found == [mutate(data, draw(random.Random(i))) for i in range(200)]
    assert sum(own != data for own in found) > 180
    assert mutate(data, [("number", 0.0, 2)]) == b"name: x\nsize: 1\n"
    assert mutate(data, [("cut", 0.5, 0)]) == data[:9]
    assert mutate(b"a", [("nest", 0.0, 0)]) == b"((()))a"


#: What fuzzing found, cut down: each raised something else than an error that users are told.
FOUND = {
    "a layout of another rank": "HloModule m, is_scheduled=true\n\nENTRY e {\n"
    "  p = f32[8,4]{1,0} parameter(0)\n  ROOT r = f32[8]{3,0} reshape(p)\n}\n",
    "dimensions of a product that are no numbers": "HloModule m, is_scheduled=true\n\nENTRY e {\n"
    "  a = f32[8,8]{1,0} parameter(0)\n  b = f32[8,8]{1,0} parameter(1)\n"
    '  ROOT c = f32[8,8]{1,0} custom-call(a, b), custom_call_target="__cublas$gemm", '
    'backend_config={"gemm_backend_config":{"alpha_real":1,"beta":0,"dot_dimension_numbers":'
    '{"lhs_contracting_dimensions":["\'\'"],"rhs_contracting_dimensions":["0"]}}}\n}\n',
}


@pytest.mark.parametrize("name", FOUND)
def test_what_fuzzing_found_is_mended(name, tmp_path):
    assert attempt(TARGETS["HLO text"], FOUND[name].encode(), tmp_path) in ("refused", "accepted")
