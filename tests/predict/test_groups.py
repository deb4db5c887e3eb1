"""Kernels put together by line, module, kind and pass."""

from dataclasses import dataclass

import pytest

from opcast.common.errors import OpcastError
from opcast.predict.groups import grouped, starring


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
    star = starring([])
    assert star("Net/layers.10/conv1/Block_3") == "Net/layers.*/conv1/Block_*"


def test_layers_that_end_in_a_number_are_starred_where_they_are_alike():
    """A flax user's ``setup``: enc0 and enc1 as repeated layers; conv1, conv2, stages as named."""
    inside = [("attn/q", "dot"), ("attn/out", "dot"), ("mlp", "dot"), ("norm", "add")]
    work = [(f"Net/enc{i}/{path}", what) for i in range(12) for path, what in inside]
    stages = {1: 3, 2: 4, 3: 6, 4: 3}  # blocks of ResNet-50's stages
    work += [(f"Net/layer{s}/{b}/conv1", "conv") for s, n in stages.items() for b in range(n)]
    work += [("Net/enc10/conv1", "conv"), ("Net/enc10/conv2", "conv"), ("Net/head1/out", "dot")]
    star = starring(work[:-3])
    assert star("Net/enc11/attn/q") == star("Net/enc0/attn/q") == "Net/enc*/attn/q"
    assert star("Net/layer3/5/conv1") == "Net/layer3/*/conv1"
    assert starring([*work[:-3], *work[-1:]])("Net/head1/out") == "Net/head1/out"
    # One layer that does other work than its neighbours is one of its own, so all are named.
    assert starring(work)("Net/enc3/mlp") == "Net/enc3/mlp"


def test_other_keys_are_refused_and_nothing_is_no_group():
    with pytest.raises(OpcastError, match="cannot be grouped by 'file'") as told:
        grouped(KERNELS, "file")
    assert "line, module, kind, phase" in told.value.hint
    assert grouped([], "line") == []
