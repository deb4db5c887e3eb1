"""Kernels put together by line, module, kind and pass."""

from dataclasses import dataclass

import pytest

from opcast.common.errors import OpcastError
from opcast.predict.groups import grouped, starred


@dataclass
class Kernel:
    kind: str
    total_us: float
    source_line: str = ""
    module: str = ""
    phase: str = ""
    what: str = "add"


KERNELS = [
    Kernel("gemm", 4.0, "m.py:3", "Net/layers.0/up", "forward", "dot"),
    Kernel("fusion", 1.0, "m.py:3", "Net/layers.0/up", "backward"),
    Kernel("gemm", 3.0, "m.py:4", "Net/layers.1/up", "forward", "dot"),
    Kernel("copy", 2.0),
]


def test_groups_are_sums_with_the_costliest_first():
    lines = grouped(KERNELS, "line")
    assert [(g.name, g.total_us, g.share) for g in lines] == [
        ("m.py:3", 5.0, 0.5),
        ("m.py:4", 3.0, 0.3),
        ("(no line)", 2.0, 0.2),
    ]
    assert [k.kind for k in lines[0].kernels] == ["gemm", "fusion"]
    assert lines[0].shares(lambda k: k.what) == {"dot": 0.8, "add": 0.2}


def test_modules_of_all_layers_are_one_and_passes_apart():
    assert [(g.name, g.total_us) for g in grouped(KERNELS, "module")] == [
        ("Net/layers.*/up", 7.0),
        ("", 2.0),
        ("Net/layers.*/up (backward)", 1.0),
    ]
    assert [g.name for g in grouped(KERNELS, "kind")] == ["gemm", "copy", "fusion"]
    assert [g.name for g in grouped(KERNELS, "phase")] == ["forward", "", "backward"]


def test_layers_are_starred_and_names_with_numbers_are_not():
    assert starred("Net/layers.10/conv1/Block_3") == "Net/layers.*/conv1/Block_*"


def test_other_keys_are_refused_and_nothing_is_no_group():
    with pytest.raises(OpcastError, match="not put together by 'file'") as told:
        grouped(KERNELS, "file")
    assert "line, module, kind, phase" in told.value.hint
    assert grouped([], "line") == []
