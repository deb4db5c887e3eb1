"""The file of fitted constants: every number has a unit, every section the rows it rests on."""

from __future__ import annotations

import pytest
import yaml

from opcast.common.paths import PACKAGE
from opcast.features.operators.physics import fitted


def test_every_constant_has_a_unit_and_every_section_its_rows() -> None:
    path = PACKAGE / "features" / "operators" / "fitted.yaml"
    sections = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert sections.pop("version") == 1
    for name, section in sections.items():
        assert section.pop("rests_on"), name
        for constant, own in section.items():
            # Tables have numbers alone, whose units stand above them.
            assert isinstance(own, dict) or len(own.split()) == 2, (name, constant)


def test_constants_are_attributes_and_unknown_ones_are_refused() -> None:
    assert fitted("products").rotation == 6.0
    assert fitted("products").rows("quantisation")["fp8", "vllm"] == (4200.0, 1650.0, 4.0, 0.2)
    with pytest.raises(AttributeError, match=r"no constant 'rotations' in fitted\.yaml"):
        _ = fitted("products").rotations
