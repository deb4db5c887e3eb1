"""Print what happens when files, disks and processes fail: faults, outcomes, fuzz counts.

Runs the tests of ``tests/trust`` and of compile processes and tells how each ended, then
fuzzes for ``--minutes`` (or takes the counts of an earlier ``fuzz.py --out`` by ``--counts``).
``--quick`` leaves out the slow tests. Ends with status 1 if anything fails.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TESTS = (
    "tests/trust/test_faults.py", "tests/trust/test_attacks.py",
    "tests/features/test_compile_process.py", "tests/features/test_cache.py",
    "tests/predict/test_sweep.py", "tests/datagen/test_profiler.py",
)  # fmt: skip
#: Of the files that hold other tests too, those that are about faults.
_FAULTS = re.compile(
    r"trust\.|crash|hang|memory|does_not_start|damaged|two_processes|read_only|full_disk|kill|"
    r"cannot_be_written|stopped|missing_compiler|another_jaxlib"
)


def main() -> None:
    """Run tests and fuzzing, print two tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without slow tests")
    parser.add_argument("--minutes", type=float, default=0.0, help="of fuzzing")
    parser.add_argument("--counts", type=Path, help="what fuzz.py --out wrote")
    given = parser.parse_args()
    failed = faults(given.quick)
    with tempfile.TemporaryDirectory() as scratch:
        counts = given.counts
        if counts is None and given.minutes:
            counts = Path(scratch) / "counts.json"
            script = Path(__file__).with_name("fuzz.py")
            command = [sys.executable, script, "--minutes", given.minutes, "--out", counts]
            subprocess.run(list(map(str, command)), check=False, stdout=subprocess.DEVNULL)
        failed += 0 if counts is None else fuzzing(json.loads(counts.read_text()))
    sys.exit(1 if failed else 0)


def faults(quick: bool) -> int:
    """Print each fault and attack with its outcome; returns how many did not end well."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={path}", *TESTS]
        if quick:
            command += ["-m", "not slow"]
        subprocess.run(command, cwd=ROOT, check=False, stdout=subprocess.DEVNULL)
        cases = list(ET.parse(path).iter("testcase"))
    print("fault or attack | outcome\n---|---")
    bad = 0
    for name, (passed, skipped, failed) in grouped(cases).items():
        parts = [(passed, "as it should"), (skipped, "not tried here"), (failed, "FAILED")]
        print(f"{name} | " + ", ".join(f"{n} × {text}" for n, text in parts if n))
        bad += failed
    return bad


def grouped(cases: list[ET.Element]) -> dict[str, tuple[int, int, int]]:
    """Passed, skipped and failed cases by the test's name in words."""
    found: dict[str, tuple[int, int, int]] = {}
    for case in cases:
        full = f"{case.get('classname')}.{case.get('name')}"
        if not _FAULTS.search(full):
            continue
        name = str(case.get("name")).split("[")[0].removeprefix("test_").replace("_", " ")
        outcomes = {child.tag for child in case}
        failed = bool(outcomes & {"failure", "error"})
        skipped = "skipped" in outcomes
        passed, left, broken = found.get(name, (0, 0, 0))
        found[name] = (passed + (not failed and not skipped), left + skipped, broken + failed)
    return found


def fuzzing(data: dict[str, object]) -> int:
    """Print the counts of a fuzz run; returns how many files were not read or refused in order."""
    targets = data["targets"]
    assert isinstance(targets, dict)
    columns = list(next(iter(targets.values())))
    print(f"\nfuzzed for {data['minutes']:g} minutes | " + " | ".join(columns))
    print("---|" + "|".join("---:" for _ in columns))
    for name, row in targets.items():
        print(f"{name} | " + " | ".join(f"{row[c]:,}" for c in columns))
    sums = {c: sum(row[c] for row in targets.values()) for c in columns}
    print("all | " + " | ".join(f"{sums[c]:,}" for c in columns))
    return sum(sums[c] for c in ("faults", "crashes", "hangs"))


if __name__ == "__main__":
    main()
