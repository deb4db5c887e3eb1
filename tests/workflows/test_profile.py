"""What ``opcast profile`` says at its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from opcast.datagen.profile.plan import ProfileResult
from opcast.workflows.profile import run_profile
from opcast.workflows.settings import ProfileSettings


@pytest.mark.parametrize(
    ("parts", "told"),
    [
        ((25.3, 9.8), "90 s (set-up and probe 25 s, final check 10 s), budget"),
        # Hosts of a fleet are set up beside one another.
        ((), "90 s, budget"),
    ],
)
def test_what_a_budget_did_not_go_to_is_told(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    parts: tuple[float, ...],
    told: str,
) -> None:
    def measured(folder: Path, *_: object, **__: object) -> ProfileResult:
        return ProfileResult(folder, "r", 412, 31, 0, 90.2, "budget", *parts)

    monkeypatch.setattr("opcast.datagen.profile.profile.profile", measured)
    run_profile(ProfileSettings(tmp_path, "local", 50.0, 0, "standard", "ops=1", quiet=True))
    said = capsys.readouterr().err
    assert f"wrote {tmp_path}: 412 samples of 31 programs, 0 failed, {told}" in said
