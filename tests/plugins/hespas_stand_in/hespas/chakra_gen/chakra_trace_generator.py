import argparse
import json
from pathlib import Path
from types import SimpleNamespace

from hespas.estimator import choice


def main(args=None):
    parser = argparse.ArgumentParser()
    parser.add_argument("config")
    parser.add_argument("--mlir_file")
    parser.add_argument("--output")
    found = parser.parse_args(args)
    estimator = json.loads(Path(found.config).read_text())["perf_estimator"]
    cls = choice.available[estimator["method"]][0]
    module = SimpleNamespace(mlir_string=Path(found.mlir_file).read_text())
    result = cls(estimator["hardware"]).get_estimate(module)
    Path(found.output).write_text(str(result.runtime_estimate))
