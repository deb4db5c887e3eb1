"""``python -m opcast.datagen.campaign``: a campaign without opcast's other requirements."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ...common.errors import OpcastError
from ...common.options import seconds_of
from .plan import DEVICES, CampaignSettings, outline
from .run import Outcome, run_campaign


def summary(outcome: Outcome) -> str:
    """One-line summary of a call."""
    counts = f"{outcome.done} measured, {outcome.failed} failed, {outcome.left} left"
    where = f" -> {outcome.archive}" if outcome.archive else ""
    return f"{counts}; {outcome.why}{where}"


@contextmanager
def ended_as_interrupted() -> Iterator[None]:
    """Treat SIGTERM as Ctrl-C: a preempted machine sends it first."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def main() -> int:
    """Run the command line; returns the exit status."""
    parser = argparse.ArgumentParser(prog="opcast campaign", description=__doc__)
    out = CampaignSettings.out
    parser.add_argument("--out", type=Path, default=out, help="folder; the same again goes on")
    parser.add_argument("--budget", default="25m", help="time of all slices, such as 25m")
    parser.add_argument("--slice", default="", help="time of this call, such as 8m")
    parser.add_argument("--device", default="auto", choices=DEVICES)
    parser.add_argument("--programs", type=Path, help="folder of StableHLO or HLO to measure, too")
    parser.add_argument("--plan", action="store_true", help="print what would be measured")
    given = parser.parse_args()
    try:
        settings = CampaignSettings(
            given.out,
            seconds_of(given.budget),
            seconds_of(given.slice) if given.slice else None,
            given.device,
            given.programs,
            given.plan,
        )
        if settings.plan:
            print("\n".join(outline(settings)))
            return 0
        with ended_as_interrupted():
            outcome = run_campaign(settings, lambda what: print(what, file=sys.stderr))
    except (OpcastError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; what was measured is kept, the same command goes on", file=sys.stderr)
        return 130
    print(summary(outcome))
    return outcome.status


if __name__ == "__main__":
    sys.exit(main())
