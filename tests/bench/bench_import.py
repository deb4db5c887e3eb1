"""CPU time to import the package, print the help and predict little, beside Python alone."""

from __future__ import annotations

import resource
import subprocess
import sys

REPEATS = 5
#: Code, and the most CPU time in seconds that it may take beyond Python's own start.
CASES = {
    "python": ("pass", 0.0),
    "import opcast": ("import opcast", 0.3),
    "opcast --help": (
        "import sys; sys.argv=['opcast','--help']; import opcast.cli as c; c.main()", 0.5,
    ),
    "predict --op": (
        "import sys; sys.argv=['opcast','predict','--device','h100-sxm','--op',"
        "'linear m=77 n=4096 k=4096 dtype=bf16 backend=trtllm kernel=torch_flow'];"
        "import opcast.cli as c; c.main()", 1.0,
    ),
    "predict a program": (
        "import opcast; opcast.predict('func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> "
        "{ %y = stablehlo.add %x, %x : tensor<8xf32> return %y : tensor<8xf32> }', "
        "device='h100-sxm', lowering='fused')", 1.5,
    ),
}  # fmt: skip


def seconds(code: str) -> float:
    """CPU time of the best of some runs, which leaves out what else the machine does."""
    best = float("inf")
    for _ in range(REPEATS):
        before = _of_children()
        subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
        best = min(best, _of_children() - before)
    return best


def _of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main() -> None:
    """Print a line for each case; the exit status says whether one takes too long."""
    failed = False
    own = 0.0
    for name, (code, limit) in CASES.items():
        took = seconds(code)
        own = own or took
        failed |= took - own > limit
        print(f"{name:17} {took:6.3f} s  (limit {limit:.1f} s beyond {own:.3f} s)")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
