"""Parsing and analysing a ResNet-50 data-parallel train step, about 12,000 StableHLO ops."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from common import best, resnet50, show
from opcast.features.cost.flops import program_cost
from opcast.features.ir.reader import read_program


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = resnet50(Path(scratch))
        text = path.read_text()
        parse = best(lambda: read_program(text).module)
        read = best(lambda: read_program(text).program)
        program = read_program(text).program
        cost = best(lambda: program_cost(program))
        whole = best(lambda: program_cost(read_program(text).program))
        print(f"{program.op_count} ops, {len(text) / 1e6:.1f} MB of text")
        show("parse and analyse", whole, 2.0, f"{whole / parse:.1f} times MLIR's parser alone")
        print(f"     MLIR parser {parse:.3f} s, reader {read - parse:.3f} s, cost {cost:.3f} s")


if __name__ == "__main__":
    main()
