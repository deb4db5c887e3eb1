"""A running server, asked over loopback."""

import base64
import http.client
import json
import signal
import socket
import subprocess
import sys
import time

import pytest

import opcast
from opcast.datagen.zoo import export
from opcast.predict.operator.case import OperatorCase
from opcast.predict.operator.predict import predict_op
from opcast.server import answers

from . import malformed

KERNELS, PROGRAM, SIMULATE = "/v1/predict/kernels", "/v1/predict/program", "/v1/simulate"
LINEAR = "linear m={} n=4096 k=4096 dtype=bf16 backend=vllm"
#: Products, element-wise operations and a reduction, for one device.
PLAIN = """module {
  func.func public @main(%x: tensor<64x128xf32>, %w: tensor<128x256xf32>) -> tensor<64xf32> {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<64x128xf32>, tensor<128x256xf32>) -> tensor<64x256xf32>
    %t = stablehlo.tanh %y : tensor<64x256xf32>
    %s = stablehlo.multiply %t, %y : tensor<64x256xf32>
    %r = stablehlo.reduce(%s init: %zero) applies stablehlo.add across dimensions = [1]
      : (tensor<64x256xf32>, tensor<f32>) -> tensor<64xf32>
    return %r : tensor<64xf32>
  }
}
"""


def test_it_tells_what_it_serves(client):
    health = client.get("/health").json()
    assert health == {
        "status": "ok", "version": opcast.__version__, "models": ["default"], "compiles": False,
    }  # fmt: skip
    (model,) = client.get("/v1/models").json()
    assert model["name"] == "default" and model["predicts"] == "programs"
    devices = {d["name"]: d for d in client.get("/v1/devices").json()}
    assert devices["h100-sxm"]["learned"] and devices["h100-sxm"]["platform"] == "gpu"
    assert {"tpu-v5e", "b200"} <= set(devices)


def test_asking_for_a_device_does_not_make_it_a_learned_one(client, ask):
    devices = client.get("/v1/devices").json()
    new = next(d["name"] for d in devices if d["platform"] == "gpu" and not d["learned"])
    status, found = ask(KERNELS, {"device": new, "ops": [LINEAR.format(64)]})
    assert status == 200 and found["scope"][0] in ("unseen", "sibling")
    assert client.get("/v1/devices").json() == devices


def test_operators_of_other_vendors_are_of_their_libraries(ask):
    """Of a 16-bit product without a library only XLA's are measured on AMD's chips."""
    text = "linear m=64 n=4096 k=4096 dtype=bf16"
    own = predict_op(OperatorCase(text, "mi300x"))
    assert own.family == "xla/linear"
    _, found = ask(KERNELS, {"device": "mi300x", "ops": [text]})
    assert found["latency_us"] == [pytest.approx(own.latency_us)]
    columns = {"m": [64], "n": 4096, "k": 4096, "dtype": "bf16"}
    _, found = ask(KERNELS, {"device": "mi300x", "operator": "linear", "columns": columns})
    assert found["latency_us"] == [pytest.approx(own.latency_us)]


def test_operators_are_answered_as_on_the_command_line(ask):
    texts = [LINEAR.format(64), "conv batch=8 cin=64 cout=64 ksize=3 insize=56 dtype=fp32"]
    status, found = ask(KERNELS, {"device": "h100-sxm", "ops": [*texts, texts[0]]})
    assert status == 200 and found["count"] == 3
    for row, text in enumerate(texts):
        expected = predict_op(OperatorCase(text, "h100-sxm"))
        for name in ("latency_us", "lo_us", "hi_us", "roofline_us"):
            assert found[name][row] == pytest.approx(getattr(expected, name), rel=1e-6)
        assert found["bound"][row] == expected.bound and found["scope"][row] == expected.scope
        assert found["in_domain"][row] == expected.in_domain
    again = ask(KERNELS, {"device": "h100-sxm", "ops": [*texts, texts[0]]})
    assert again == (200, found)


def test_columns_are_the_same_operators(ask):
    texts = [LINEAR.format(m) for m in (3, 5, 3)]
    _, by_text = ask(KERNELS, {"device": "l4", "ops": texts})
    columns = {"m": [3, 5, 3], "n": 4096, "k": 4096, "dtype": "bf16", "backend": "vllm"}
    query = {"device": "l4", "operator": "linear", "columns": columns}
    assert ask(KERNELS, query) == (200, by_text)
    status, some = ask(KERNELS, query | {"fields": ["latency_us"]})
    assert status == 200 and set(some) == {"device", "model", "count", "latency_us"}
    one = {"m": 3, "n": 4096, "k": 4096, "dtype": "bf16", "backend": "vllm"}
    _, found = ask(KERNELS, query | {"columns": one})
    assert found["latency_us"] == by_text["latency_us"][:1]


def test_kernels_are_answered_as_datasets_hold_them(ask):
    predictor = opcast.load()
    lowered = opcast.lower(malformed.TEXT.encode(), "op")
    kernels = [k for k in lowered.kernels if k.takes_time]
    query = {"device": "tpu-v4", "kernels": [k.ir for k in kernels]}
    status, found = ask(KERNELS, query)
    assert status == 200
    assert found["latency_us"] == pytest.approx(predictor.latencies_us(kernels, "tpu-v4"), rel=1e-6)
    assert ask(KERNELS, query) == (200, found)
    status, error = ask(KERNELS, query | {"kernels": [kernels[0].ir + " ", "HloModule"]})
    assert status == 422 and error["error"] == "ProgramError"


def test_programs_are_predicted_as_on_the_command_line(client, ask):
    expected = opcast.load().predict(PLAIN, device="h100-sxm", lowering="fused").to_dict()
    options = {"device": "h100-sxm", "lowering": "fused"}
    status, found = ask(PROGRAM, options | {"program": PLAIN})
    assert status == 200
    assert found["latency_us"] == pytest.approx(expected["latency_us"], rel=1e-9)
    names = [k["name"] for k in expected["kernels"]]
    assert list(found) == list(expected) and [k["name"] for k in found["kernels"]] == names
    raw = {"content": PLAIN.encode(), "headers": {"Content-Type": "text/plain"}}
    assert client.post(PROGRAM, params=options, **raw).json() == found


def test_pages_of_programs(client, ask):
    options = {"device": "h100-sxm", "lowering": "fused"}
    raw = {"content": PLAIN.encode(), "headers": {"Content-Type": "text/plain"}}
    answer = client.post("/v1/report", params=options, timeout=120, **raw)
    assert answer.status_code == 200, answer.text[:500]
    assert answer.headers["content-type"].startswith("text/html")
    expected = opcast.load().predict(PLAIN, **options)
    assert "program on h100-sxm" in answer.text and "tpu-v5p" in answer.text
    assert expected.kernels[0].name in answer.text
    status, found = ask("/v1/report", {**options, "lowering": "xla", "program": malformed.TEXT})
    assert status == 403 and "compile" in found["what"]
    assert ask("/v1/report", {**options, "program": "no program"})[0] == 422


def test_answers_are_those_of_the_document(ask):
    _, program = ask(PROGRAM, {"device": "h100-sxm", "lowering": "op", "program": malformed.TEXT})
    body = {"workload": "llama", "cluster": "dgx-h100-x16", "settings": {"layers": 2, "batch": 16}}
    _, step = ask(SIMULATE, body)
    _, more = ask(SIMULATE, body | {"explain": True, "jitter": 0.1})
    given = ((program, answers.ProgramAnswer), (step, answers.StepAnswer))
    for found, schema in (*given, (more, answers.StepAnswer)):
        assert schema.model_validate(found).model_dump(exclude_unset=True) == found
    assert set(more) - set(step) == {"samples", "terms", "learned_of_the_whole"}


def test_bytecode_is_uploaded_or_encoded(client, ask):
    code, options = malformed.bytecode(), {"device": "a100-pcie-40gb", "lowering": "op"}
    text = base64.b64encode(code).decode()
    status, found = ask(PROGRAM, options | {"program": text, "encoding": "base64"})
    assert status == 200 and found["lowering"] == "op"
    raw = {"content": code, "headers": {"Content-Type": "application/octet-stream"}}
    assert client.post(PROGRAM, params=options, **raw).json() == found


def test_nothing_is_compiled_unless_allowed(ask):
    body = {"device": "h100-sxm", "program": malformed.TEXT}
    status, error = ask(PROGRAM, body | {"lowering": "xla"})
    assert status == 403 and "--allow-compile" in error["hint"]
    assert ask(PROGRAM, body)[1]["lowering"] == "fused"
    assert ask(PROGRAM, body | {"program": malformed.HLO})[1]["lowering"] == "xla"  # it is already


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        ("llama", {}, []),
        (
            "llama-3-8b",
            {"price": 2.0, "power_cap_w": 400.0, "framework": "nanotron", "compiled": True},
            ["--price", "2", "--power-cap", "400W", "--framework", "nanotron", "--compiled"],
        ),
    ],
)
def test_steps_are_simulated_as_on_the_command_line(ask, workload, options, words):
    sizes = {"layers": 2, "batch": 16}
    status, found = ask(SIMULATE, {
        "workload": workload, "cluster": "dgx-h100-x16", "plan": "tp=8,dp=2", "settings": sizes,
        **options,
    })  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "opcast", "simulate", "--workload", workload, "--cluster",
         "dgx-h100-x16", "--plan", "tp=8,dp=2", "--set", "layers=2,batch=16", "--json", *words],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert status == 200 and found == json.loads(done.stdout)
    known = answers.StepAnswer.model_validate(found)
    assert set(known.model_dump(exclude_unset=True, by_alias=True)) == set(found)


SERVING = "/v1/simulate-serving"


def test_serving_is_simulated_as_on_the_command_line(ask):
    body = {
        "workload": "llama-3.1-8b", "device": "h100-sxm", "plan": "tp=1", "concurrency": 4,
        "count": 8, "output": "16", "model": "roofline", "price": 2.0, "slo": "ttft=1s",
        "prefill": "tp=1", "transfer": 2.0, "block": 128, "watermark": 0.05, "drafts": 2,
        "accepted": 1.5, "draft": "llama-3.2-1b", "router": "least-loaded",
    }  # fmt: skip
    status, found = ask(SERVING, body)
    done = subprocess.run(
        [sys.executable, "-m", "opcast", "simulate-serving", "--workload", "llama-3.1-8b",
         "--device", "h100-sxm", "--plan", "tp=1", "--concurrency", "4", "--count", "8",
         "--output", "16", "--model", "roofline", "--price", "2", "--slo", "ttft=1s",
         "--prefill", "tp=1", "--transfer", "2", "--block", "128", "--watermark", "0.05",
         "--drafts", "2", "--accepted", "1.5", "--draft", "llama-3.2-1b", "--router",
         "least-loaded", "--json"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert status == 200 and found == json.loads(done.stdout)
    known = answers.ServingAnswer.model_validate(found)
    assert set(known.model_dump(exclude_unset=True, by_alias=True)) == set(found)
    assert "request_goodput:" in found
    status, error = ask(SERVING, body | {"rate": 2.0})
    assert status == 422 and "concurrency and rate" in error["what"]
    status, error = ask(SERVING, body | {"prefill": ""})
    assert status == 422 and "need prefill workers" in error["what"]


@pytest.mark.parametrize(
    ("path", "body", "status", "what"),
    [
        (KERNELS, {"device": "h1000", "ops": ["x"]}, 404, "h1000"),
        (KERNELS, {"device": "h100-sxm", "ops": ["linear m=1"]}, 422, "needs n, k, dtype"),
        (KERNELS, {"device": "h100-sxm", "ops": [LINEAR.format(0)]}, 422, "m=0 is not from 1"),
        (KERNELS, {"device": "h100-sxm", "ops": []}, 422, "at least 1"),
        (KERNELS, {"device": "h100-sxm", "ops": ["x"], "kernels": ["x"]}, 422, "not permitted"),
        (KERNELS, {"device": "h100-sxm", "ops": ["x"] * 1001}, 413, "exceed the limit of 1000"),
        (KERNELS, {"device": "h100-sxm", "ops": ["x"], "model": "other"}, 404, "is served"),
        (KERNELS, {"device": "h100-sxm", "ops": ["x"], "fields": ["time"]}, 422, "no field"),
        (KERNELS, {"device": "x.yaml", "ops": ["x"]}, 404, "not the name of a device"),
        (KERNELS, {"device": "../x", "ops": ["x"]}, 422, "letters and digits"),
        (SIMULATE, {"workload": "llama", "cluster": "dgx-h100-x16", "plan": "p.yaml"}, 422,
         "settings such as tp=8,dp=2"),
        (KERNELS, {"device": "h100-sxm", "operator": "linear",
                   "columns": {"m": [1, 2], "n": [1], "k": 1, "dtype": "bf16"}}, 422, "rows"),
        (PROGRAM, {"device": "h100-sxm", "program": ""}, 422, "either a program"),
        (PROGRAM, {"device": "h100-sxm", "program": "/etc/passwd"}, 422, "cannot parse"),
        (PROGRAM, {"device": "h100-sxm", "program": "?", "encoding": "base64"}, 400, "base64"),
        (PROGRAM, {"program": PLAIN}, 422, "required"),
        (SIMULATE, {"workload": "llama", "cluster": "dgx-h100-x16", "plan": "tp=3"}, 422, "3"),
        (SIMULATE, {"workload": "llama", "cluster": "x.yaml"}, 422, "not read"),
    ],
)  # fmt: skip
def test_refusals_say_what_is_wrong(ask, path, body, status, what):
    found, error = ask(path, body)
    assert found == status, error
    assert set(error) == {"error", "what", "where", "hint"}
    assert what in error["what"], error


def test_an_object_that_is_none_gets_an_example(ask):
    body = {"workload": "llama", "cluster": "dgx-h100-x16", "settings": "batch=4"}
    status, error = ask(SIMULATE, body)
    assert status == 422 and error["where"] == "settings"
    assert error["hint"] == 'such as {"batch": 16, "seq": 4096}; see /docs'


def test_an_option_of_an_upload_is_given_once(client):
    raw = {"content": PLAIN.encode(), "headers": {"Content-Type": "text/plain"}}
    answer = client.post(f"{PROGRAM}?device=h100-sxm&device=l4", **raw)
    assert answer.status_code == 400 and "given more than once" in answer.json()["what"]
    assert answer.json()["where"] == "query 'device'"


def test_what_is_no_request_of_ours_is_refused_alike(client):
    for answer, status in (
        (client.post(KERNELS, content=b"{"), 415),
        (client.post(KERNELS, content=b"{", headers={"Content-Type": "application/json"}), 400),
        (client.get("/nothing"), 404),
        (client.delete("/health"), 405),
        (client.post(KERNELS, content=b"x" * (73 * 2**20)), 413),
    ):
        assert answer.status_code == status
        assert set(answer.json()) == {"error", "what", "where", "hint"}


def test_metrics_are_read_by_prometheus(client, ask):
    from prometheus_client.parser import text_string_to_metric_families

    ask(KERNELS, {"device": "h100-sxm", "ops": [LINEAR.format(77)] * 2})
    text = client.get("/metrics").text
    found = {s.name: s.value for f in text_string_to_metric_families(text) for s in f.samples}
    assert found["opcast_kernels_total"] >= 2 and found["opcast_cache_entries"] >= 1
    assert found["opcast_requests_in_flight"] == 0


@pytest.mark.slow
def test_it_answers_what_it_has_begun_and_ends(start):
    big = {"device": "h100-sxm", "operator": "linear", "columns": {
        "m": list(range(1, 10_001)), "n": 4096, "k": 4096, "dtype": "bf16", "backend": "vllm",
    }}  # fmt: skip
    import httpx

    body = json.dumps(big).encode()
    with start("--token", "t", "--memory", "2") as (url, process):
        headers = {"Authorization": "Bearer t", "Content-Type": "application/json"}
        assert httpx.get(f"{url}/v1/models").status_code == 401
        request = http.client.HTTPConnection(httpx.URL(url).netloc.decode(), timeout=90)
        request.putrequest("POST", KERNELS)
        for name, value in {**headers, "Content-Length": len(body)}.items():
            request.putheader(name, value)
        # Begun, but not to be ended before the signal is there: half of it is still to come.
        request.endheaders(body[: len(body) // 2])
        while "requests_in_flight 1.0" not in httpx.get(f"{url}/metrics", headers=headers).text:
            time.sleep(0.05)
        process.send_signal(signal.SIGTERM)
        request.send(body[len(body) // 2 :])
        answer = request.getresponse()
        assert answer.status == 200 and json.load(answer)["count"] == 10_000
        request.close()
        assert process.wait(60) in (0, -signal.SIGTERM)


def test_what_cannot_be_started_says_why():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        for options, why in (
            (("--host", "0.0.0.0"), "no token is set"),
            (("--port", port), "cannot listen"),
        ):
            done = subprocess.run(
                [sys.executable, "-m", "opcast", "serve", *options],
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            assert done.returncode == 1 and why in done.stderr, done.stderr


@pytest.mark.slow
def test_programs_are_compiled_where_that_is_allowed(start):
    import httpx

    body = {"device": "cpu-amd-epyc-2c", "lowering": "xla", "program": malformed.TEXT}
    with start("--model", "cpu-xgboost", "--allow-compile") as (url, _):
        answer = httpx.post(url + PROGRAM, json=body, timeout=90)
        assert answer.status_code == 200, answer.text
        assert answer.json()["compiler"].endswith("cpu") and answer.json()["lowering"] == "xla"


def test_what_would_change_it_is_asked_at_once(ask, tmp_path):
    """Of a device file with other figures, a power cap, and a workload of other settings."""
    points = [{"design": {"boost_mhz": 1500}, "power_cap_w": 400, "settings": {"batch": 16}}]
    points += [{"design": {"no_such_figure": 1}}, {"power_cap_w": 1}]
    body = {"device": "h100-sxm", "lowering": "fused", "workload": "mlp", "points": points}
    status, found = ask("/v1/what-if", body)
    assert status == 200
    changed, unknown, low = found["points"]
    file, program = tmp_path / "what-if.yaml", tmp_path / "mlp.mlir"
    file.write_text("name: what-if\nbase: h100-sxm\nboost_mhz: 1500\n")
    export("mlp", {"batch": 16}, program)
    asked = {"device": file, "lowering": "fused", "power_cap_w": 400.0}
    own = opcast.load().predict(program, **asked).to_dict()
    del own["kernels"]
    assert set(changed) == set(own) and changed["notes"] == own["notes"]
    for name in ("latency_us", "lo_us", "hi_us", "energy_j", "peak_memory_bytes"):
        assert changed[name] == pytest.approx(own[name], rel=1e-9)
    assert "no_such_figure" in unknown["what"] and unknown["error"] == "DeviceError"
    assert "outside 175 to 700 W" in low["what"]


def test_a_program_or_a_workload_is_asked(ask):
    body = {"device": "h100-sxm", "lowering": "fused", "workload": "mlp"}
    status, found = ask(PROGRAM, body | {"settings": {"batch": 16}})
    assert status == 200
    lines = [k["source_line"] for k in found["kernels"] if k["source_line"]]
    # Where the package lies is the server's own affair.
    assert lines and all(line.startswith("opcast/") for line in lines)
    for given in {"program": PLAIN}, {"workload": ""}:
        status, found = ask(PROGRAM, body | given)
        assert status == 422 and "either a program or a workload" in found["what"]
    given = {"workload": "", "program": PLAIN}
    for own in {"settings": {"batch": 16}}, {"points": [{"settings": {"batch": 16}}]}:
        status, found = ask("/v1/what-if" if "points" in own else PROGRAM, body | given | own)
        assert status == 422 and found["what"] == "a program has no settings"
    status, found = ask(PROGRAM, body | {"settings": {"bath": 16}})
    assert status == 422 and "no parameter 'bath'" in found["what"] and "batch" in found["hint"]
