"""Pytest plug-in: predicted times as performance regression tests, without the device.

Enable it with ``pytest_plugins = ["opcast.predict.pytest_plugin"]`` in ``conftest.py``. A failed
``assert opcast.predict(step, state, batch, device="h100-sxm") < 5e-3`` then explains itself, and
the fixture ``predicted`` compares with a file of earlier predictions.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ..common.interval import HasLatency, InSeconds
from ..common.units import duration

#: Number of kernels listed for a failed comparison.
_TOP = 5
#: Compared times, and their suffixes in messages.
_TIMES = {"latency_us": "", "device_us": " of kernels"}
#: File of predictions in the test suite's root folder.
_BASELINE = "opcast-baseline.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("opcast")
    group.addoption(
        "--opcast-update",
        action="store_true",
        help="Write predictions of the fixture 'predicted' to the baseline instead of comparing.",
    )
    group.addoption(
        "--opcast-baseline",
        default=_BASELINE,
        metavar="FILE",
        help=f"Baseline of the fixture 'predicted' (default: {_BASELINE} in the root folder).",
    )


def pytest_assertrepr_compare(op: str, left: object, right: object) -> list[str] | None:
    """Explain a failed comparison of a predicted time."""
    for side in (left, right):
        if isinstance(side, InSeconds):
            return [f"{_short(left)} {op} {_short(right)}", *_slowest(side)]
    return None


def _short(value: object) -> str:
    if isinstance(value, InSeconds):
        result: Any = value
        return (
            f"{duration(result.latency_us)} ({duration(result.lo_us)} to {duration(result.hi_us)})"
        )
    return duration(value * 1e6) if isinstance(value, int | float) else repr(value)


def _slowest(result: object) -> list[str]:
    top = getattr(result, "top", None)
    return [
        f"{duration(k.total_us):>9}  {k.name}  {k.source_line}".rstrip()
        for k in (top(_TOP) if top else ())
    ]


@pytest.fixture
def predicted(request: pytest.FixtureRequest) -> Callable[..., HasLatency]:
    """Predict a function and compare with the baseline.

    ``predicted(step, state, batch, device="h100-sxm")`` fails if the time exceeds the upper bound
    of the interval in the baseline, or ``tolerance`` times its estimate. It also fails if the sum
    of PyTorch's kernels, which the host's launches may hide, grew by that factor, or if the test is
    not in the baseline; ``--opcast-update`` adds it.
    """
    config = request.config
    path = config.rootpath / str(config.getoption("--opcast-baseline"))
    update = bool(config.getoption("--opcast-update"))
    seen: dict[str, int] = {}

    def check(
        program: object, *args: object, tolerance: float | None = None, **options: Any
    ) -> HasLatency:
        from .api import predict

        found: Any = predict(program, *args, **options)
        # Several predictions of one test are numbered.
        node = request.node.nodeid
        seen[node] = seen.get(node, 0) + 1
        key = node if seen[node] == 1 else f"{node}#{seen[node]}"
        if update:
            _write(path, key, found)
        result: HasLatency = found
        if update:
            return result
        old = _read(path).get(key)
        if old is None:
            pytest.fail(f"{path.name} has no {key}: run pytest --opcast-update", pytrace=False)
        factor = tolerance if tolerance is not None else old["hi_us"] / old["latency_us"]
        for key, what in _TIMES.items():
            if key in old and getattr(found, key) > old[key] * factor:
                said = _short(found) if not what else duration(getattr(found, key)) + what
                allowed = f"at most {duration(old[key] * factor)}"
                line = f"{said} on {found.device}, {allowed} by {path.name} "
                lines = [line + f"({duration(old[key])} then)", *_slowest(found)]
                pytest.fail("\n".join(lines), pytrace=False)
        return result

    return check


def _read(path: Path) -> dict[str, dict[str, float]]:
    from ..common.files import parse_json

    if not path.is_file():
        return {}
    try:
        return dict(parse_json(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        pytest.fail(f"{path}: no baseline; delete it and run pytest --opcast-update", pytrace=False)


def _write(path: Path, key: str, found: Any) -> None:
    import json

    from ..common.files import write_text

    # Read again each time, since other tests of the run write to it, too.
    known = _read(path)
    times = ("latency_us", "lo_us", "hi_us", "device_us")
    own = {name: round(getattr(found, name), 3) for name in times if hasattr(found, name)}
    known[key] = {"device": found.device, **own}
    write_text(path, json.dumps(dict(sorted(known.items())), indent=1) + "\n")
