"""Run every benchmark of this folder in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def main() -> None:
    failed = []
    for script in sorted(Path(__file__).parent.glob("bench_*.py")):
        print(f"== {script.stem}", flush=True)
        if subprocess.run([sys.executable, script], check=False).returncode:
            failed.append(script.stem)
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
