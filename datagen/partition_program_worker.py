"""Partitions one program with XLA's own partitioner; runs in a process with pretended devices.

Started by :mod:`.partition_program`, with a JSON job on standard input.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def main() -> None:
    """Read the job, compile, leave the partitioner's dump in the job's folder."""
    from ..features._jax_compat import compile_module, parse_module, with_shardings
    from .zoo.partition_worker import dump_flags

    job = json.loads(sys.stdin.read())
    module = parse_module(Path(job["program"]).read_bytes())
    outputs = {int(out): number for out, number in job["outputs"].items()}
    module = with_shardings(module, job["arguments"], outputs, job["devices"])
    Path(job["dump"]).mkdir(parents=True, exist_ok=True)
    compile_module(module, 1, job["devices"], dump_flags(job["dump"]))


if __name__ == "__main__":
    main()
