"""What becomes of a task, whatever it raises."""

import json

import pytest

from opcast.common.errors import DeviceError, InternalError, PlanError
from opcast.server import jobs


class Predictors(dict):
    """Has no model; whoever asks for one meets the given error."""

    def __init__(self, error):
        super().__init__()
        self.error = error

    def __missing__(self, name):
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "what"),
    [
        (DeviceError("no such device"), 404, "no such device"),
        (PlanError("too many"), 422, "too many"),
        (InternalError("opcast fails at x.py:1"), 500, "opcast fails at x.py:1"),
        (MemoryError(), 422, "more memory"),
        (RecursionError(), 422, "too deeply"),
        (IndexError("of ours"), 422, "IndexError: of ours"),
    ],
)
def test_every_error_is_an_answer(error, status, what):
    task = {"kind": "program", "model": "default", "trip_count": None}
    found, body = jobs.answer(Predictors(error), task, b"")
    data = json.loads(body)
    assert found == status and what in data["what"] and set(data) >= {"error", "where", "hint"}


def test_json_has_no_infinity(monkeypatch):
    monkeypatch.setitem(jobs._KINDS, "program", lambda *_: {"latency_us": float("inf")})
    status, body = jobs.answer({}, {"kind": "program"}, b"")
    assert status == 422 and b"not finite" in body
