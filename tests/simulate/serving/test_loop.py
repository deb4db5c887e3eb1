import pytest

from opcast.common.errors import PlanError
from opcast.simulate.serving.load import Chunk
from opcast.tests.support.serving_loop import Request, serve


def second(chunks, batch, length):
    return 1.0


def by_tokens(chunks, batch, length):
    return 0.001 * (sum(c.tokens for c in chunks) + batch)


def watched(requests, **limits):
    """What each iteration was asked for."""
    seen = []

    def watch(*iteration):
        seen.append(iteration)
        return 1.0

    serve(requests, watch, 10_000, **limits)
    return seen


def test_one_request_by_hand():
    # One iteration for the prompt, which makes the first token, and one for each further token.
    found = serve([Request(2.0, 5, 3)], second, 100)
    assert found.first_token.tolist() == [1.0]
    assert found.per_token.tolist() == [1.0]
    assert found.latency.tolist() == [3.0]
    assert found.makespan == 2 + 1 + 2
    assert (found.iterations, found.largest_batch, found.largest_cache) == (3, 1, 8)


def test_requests_join_a_running_batch():
    found = serve([Request(0.0, 5, 4), Request(1.5, 5, 2)], second, 100)
    # The second comes during the second iteration and runs in the third and fourth.
    assert found.first_token.tolist() == [1.0, 1.5]
    assert found.makespan == 4.0
    assert found.largest_batch == 2


def test_prompts_are_cut_to_the_budget():
    found = serve([Request(0.0, 10, 1)], second, 100, token_budget=4)
    assert found.iterations == 3
    assert watched([Request(0.0, 10, 2)], token_budget=4) == [
        ([Chunk(4, 0)], 0, 0.0), ([Chunk(4, 4)], 0, 0.0), ([Chunk(2, 8)], 0, 0.0), ([], 1, 11.0),
    ]  # fmt: skip


def test_prompts_of_an_iteration_stay_apart():
    seen = watched([Request(0.0, n, 1) for n in (5, 5, 7)], token_budget=12)
    assert seen == [([Chunk(5), Chunk(5), Chunk(2)], 0, 0.0), ([Chunk(5, 2)], 0, 0.0)]


def test_running_requests_count_against_the_budget():
    requests = [Request(0.0, 2, 5) for _ in range(6)]
    seen = watched(requests, token_budget=3)
    sizes = [sum(c.tokens for c in chunks) + batch for chunks, batch, _ in seen]
    assert max(sizes) == 3
    assert sum(sizes) == 6 * (2 + 4)
    assert max(batch for _, batch, _ in watched(requests, max_batch=2)) == 2
    for limits in ({"token_budget": 0}, {"max_batch": 0}):
        with pytest.raises(PlanError, match="at least 1"):
            serve(requests, second, 100, **limits)


def test_the_cache_holds_back_what_does_not_fit():
    both = [Request(0.0, 5, 5), Request(0.0, 5, 5)]
    wide, narrow = serve(both, second, 20), serve(both, second, 19)
    assert wide.makespan == 5.0
    assert narrow.makespan == 10.0
    assert (narrow.largest_batch, narrow.largest_cache) == (1, 10)
    assert serve(both, second, 20, max_batch=1).makespan == 10.0


def test_more_load_means_more_waiting_and_all_are_served():
    times = []
    for gap in (1.0, 0.05):
        requests = [Request(i * gap, 50, 10) for i in range(40)]
        found = serve(requests, by_tokens, 300)
        assert (found.finished > 0).all()
        assert found.output_tokens == 400
        times.append(found.first_token.mean())
    assert times[1] > times[0]
    data = found.to_dict()
    assert data["ttft_p50_ms"] <= data["ttft_p95_ms"] <= data["ttft_p99_ms"]
    assert data["output_tokens_per_s"] == pytest.approx(400 / found.makespan)


@pytest.mark.parametrize(
    ("requests", "said"),
    [([], "no requests"), ([Request(0.0, 0, 1)], "at least 1"), ([Request(0.0, 90, 20)], "110")],
)
def test_bad_traces(requests, said):
    with pytest.raises(PlanError, match=said):
        serve(requests, second, 100)
