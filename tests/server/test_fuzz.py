"""Nothing that is sent crashes the server, hangs it, or makes it answer 500."""

import numpy as np
import pytest

from . import fuzzing

pytest.importorskip("schemathesis")


@pytest.fixture(autouse=True)
def healthy(client):
    """Whatever was sent, the server is well and no request is left at work."""
    yield
    assert client.get("/health").status_code == 200
    assert "opcast_requests_in_flight 0.0" in client.get("/metrics").text


def test_requests_drawn_from_the_document(url):
    found = fuzzing.fuzz_api(url, examples=4)
    assert found["sent"] >= 40 and not found["status 500"]


def test_malformed_programs(client):
    found = fuzzing.fuzz_programs(client, 40, seed=0)
    assert found["sent"] == 40 and found["status 422"] > 10 and not found["unexpected errors"]


def test_deep_programs(client):
    found = fuzzing.fuzz_depth(client, 3000)
    assert found["sent"] == 16 and not found["unexpected errors"]


def test_malformed_kernels(client):
    found = fuzzing.fuzz_kernels(client, 30, seed=0)
    assert found["sent"] == 30 and not found["unexpected errors"]


@pytest.mark.exhaustive
def test_many_requests_drawn_from_the_document(url):
    assert not fuzzing.fuzz_api(url, examples=150)["status 500"]


@pytest.mark.exhaustive
def test_many_malformed_programs(client):
    found = fuzzing.fuzz_programs(client, 1000, seed=1) + fuzzing.fuzz_depth(client, 30_000)
    assert found["status 422"] > 100


@pytest.mark.slow
def test_tens_of_megabytes_of_noise(client):
    # Large enough that a copy too many would show.
    noise = np.random.default_rng(0).integers(0, 256, 66 * 2**20, np.uint8).tobytes()
    headers = {"Content-Type": "application/octet-stream"}
    options = {"device": "h100-sxm", "lowering": "op"}
    for start_of in (b"", b"ML\xefR", b"module {"):
        answer = client.post(
            "/v1/predict/program", params=options, content=start_of + noise, headers=headers
        )
        assert answer.status_code == 422, answer.text
