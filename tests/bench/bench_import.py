"""Seconds to import the package and to print the help, beside those of Python alone."""

from __future__ import annotations

import subprocess
import sys
import time

REPEATS = 5
#: Code, and the most seconds that it may take beyond Python's own start.
CASES = {
    "python": ("pass", 0.0),
    "import opcast": ("import opcast", 0.3),
    "opcast --help": (
        "import sys; sys.argv=['opcast','--help']; import opcast.cli as c; c.main()", 0.5,
    ),
}  # fmt: skip


def seconds(code: str) -> float:
    """The best of some runs, which leaves out what else the machine does."""
    best = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    """Print a line for each case; the exit status says whether one takes too long."""
    failed = False
    own = 0.0
    for name, (code, limit) in CASES.items():
        took = seconds(code)
        own = own or took
        failed |= took - own > limit
        print(f"{name:16} {took:6.3f} s  (limit {limit:.1f} s beyond {own:.3f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
