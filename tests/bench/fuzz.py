"""Fuzz every reader of files: ``fuzz.py --minutes 10``; prints counts, keeps what made a fault.

Files that are real are mutated at random and read. Only errors that say what is wrong may come out.
Each target runs in a process of its own, which a crash or a hang ends; the file that it read then
is kept, and the run goes on. ``--out`` writes the counts for ``trust_report.py``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import random
import resource
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "trust"))

#: Seconds of one file after which its reader counts as stuck, and its private memory.
STUCK_S, MEMORY = 600, 6 * 2**30
COUNTS = ("accepted", "refused", "contained", "faults", "crashes", "hangs")


def main() -> None:
    """Run all targets, or the one of a worker process."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of all targets together")
    parser.add_argument("--target", action="append", help="only this one; may be given again")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file for the counts")
    parser.add_argument("--keep", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        work(given.target[0], given.worker, 60 * given.minutes, given.seed)
        return
    run(given)


def run(given: argparse.Namespace) -> None:
    """Run targets one after the other and print a table."""
    from fuzzing import TARGETS

    names = given.target or list(TARGETS)
    total = sum(TARGETS[name].weight for name in names)
    rows: dict[str, dict[str, int]] = {}
    print(f"{'target':24}" + "".join(f"{c:>10}" for c in COUNTS))
    for name in names:
        seconds = 60 * given.minutes * TARGETS[name].weight / total
        rows[name] = one_target(name, seconds, given.seed, given.keep)
        print(f"{name:24}" + "".join(f"{rows[name][c]:>10}" for c in COUNTS), flush=True)
    sums = {c: sum(row[c] for row in rows.values()) for c in COUNTS}
    print(f"{'all':24}" + "".join(f"{sums[c]:>10}" for c in COUNTS))
    if given.out is not None:
        data = {"minutes": given.minutes, "seed": given.seed, "targets": rows}
        given.out.write_text(json.dumps(data, indent=1) + "\n")
    sys.exit(1 if sums["faults"] + sums["crashes"] + sums["hangs"] else 0)


def one_target(name: str, seconds: float, seed: int, keep: Path) -> dict[str, int]:
    """Counts of a target; a new process takes over where one ends."""
    counts = dict.fromkeys(COUNTS, 0)
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            command = [sys.executable, __file__, f"--target={name}", "--seed", str(seed)]
            command += ["--minutes", str(left / 60), "--worker", scratch]
            with (folder / "errors").open("w") as errors:
                code = subprocess.run(command, stderr=errors, check=False).returncode
            written = folder / "counts"
            done = json.loads(written.read_text() or "{}") if written.is_file() else {}
            for key, count in done.items():
                counts[key] += count
            for finding in folder.glob("fault-*"):
                keep_file(keep, name, finding, finding.with_suffix(".log"))
            if code:
                counts["hangs" if "Timeout" in (folder / "errors").read_text() else "crashes"] += 1
                keep_file(keep, name, folder / "case", folder / "errors")
        seed += 1
    return counts


def keep_file(keep: Path, name: str, case: Path, log: Path) -> None:
    """Keep a file that made a fault, with what was printed."""
    if case.suffix == ".log":
        return
    keep.mkdir(parents=True, exist_ok=True)
    target = keep / f"{name.replace(' ', '-').strip('-')}-{len(list(keep.iterdir()))}"
    target.write_bytes(case.read_bytes() if case.is_file() else b"")
    target.with_name(target.name + ".log").write_text(log.read_text() if log.is_file() else "")


def work(name: str, folder: Path, seconds: float, seed: int) -> None:
    """Read mutated files for some seconds; the file being read is always on disk."""
    from fuzzing import TARGETS, attempt, draw, mutate

    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    target, rng = TARGETS[name], random.Random(f"{name} {seed}")
    counts: dict[str, int] = {}
    seeds, seen = target.seeds(), set[Any]()
    (folder / "counts").write_text("{}")
    scratch = folder / "scratch"
    scratch.mkdir()
    for data in seeds:
        assert attempt(target, data, scratch) == "accepted", f"a seed of {name} is refused"
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        data = mutate(rng.choice(seeds), draw(rng))
        (folder / "case").write_bytes(data)
        faulthandler.dump_traceback_later(STUCK_S, exit=True)
        try:
            outcome = attempt(target, data, scratch)
        except Exception as error:
            outcome = "faults"
            frames = traceback.extract_tb(error.__traceback__)
            place = (type(error).__name__, frames[-1].filename, frames[-1].lineno)
            if place not in seen:
                seen.add(place)
                (folder / f"fault-{len(seen)}").write_bytes(data)
                (folder / f"fault-{len(seen)}.log").write_text(traceback.format_exc())
        faulthandler.cancel_dump_traceback_later()
        counts[outcome] = counts.get(outcome, 0) + 1
        (folder / "counts").write_text(json.dumps(counts))


if __name__ == "__main__":
    main()
