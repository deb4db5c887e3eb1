"""Run what others read of opcast with their own tools, and print one table of outcomes.

``make clients`` runs all of it; ``python tests/clients/run.py NAME...`` some. Tools come from PyPI,
each into a virtual environment of its own that is thrown away. A client that cannot be had is
skipped with the reason; one that is there and fails makes the exit status 1.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
#: Seconds for an installation from PyPI, for a tool's own run, and for the server to start.
INSTALL_S, RUN_S, START_S = 600, 600, 300
PROGRAM = (
    "module { func.func public @main(%a: tensor<64x64xf32>) -> tensor<64x64xf32> { "
    "%0 = stablehlo.add %a, %a : tensor<64x64xf32> return %0 : tensor<64x64xf32> } }"
)


class Missing(Exception):
    """A client cannot be had here; the message says why."""


class Failed(Exception):
    """A client is there and does not work; the message is its last line."""


def run(command: list[str], **variables: str) -> str:
    """Run a command; returns its output.

    Raises:
        Failed: It ends with another status than 0, or not in time.
    """
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=RUN_S, env={**os.environ, **variables}
        )
    except subprocess.TimeoutExpired:
        raise Failed(f"{Path(command[0]).name} did not end within {RUN_S} s") from None
    if done.returncode:
        lines = (done.stderr or done.stdout).strip().splitlines() or [f"status {done.returncode}"]
        raise Failed(lines[-1][:160])
    return done.stdout


def installed(folder: Path, *packages: str) -> Path:
    """Install packages into a new environment; returns its folder of programs.

    Raises:
        Missing: PyPI does not give them.
    """
    venv.create(folder, with_pip=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", *packages]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
    except subprocess.TimeoutExpired:
        raise Missing(f"pip install {' '.join(packages)} took over {INSTALL_S} s") from None
    if done.returncode:
        lines = [x for x in done.stderr.splitlines() if x.startswith("ERROR")] or ["pip failed"]
        raise Missing(lines[-1][:160])
    return folder / "bin"


def beside(folder: Path, package: str, requirement: str) -> str:
    """Python that has a package beside opcast; the environment that runs this stays as it is.

    Raises:
        Missing: PyPI does not give it.
    """
    try:
        version_here(package)
        return sys.executable
    except Missing:
        programs = folder / "venv"
        venv.create(programs, with_pip=True, system_site_packages=True)
        here = next(p for p in map(Path, sys.path) if p.name == "site-packages")
        site = next((programs / "lib").glob("python*/site-packages"))
        # As a site of its own: opcast may be installed there by a file of paths, too.
        (site / "beside.pth").write_text(f"import site; site.addsitedir({str(here)!r})\n")
        python = str(programs / "bin" / "python")
        command = [python, "-m", "pip", "install", "--quiet", requirement]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_S)
        if done.returncode:
            raise Missing(f"pip does not give {package}") from None
        return python


def version_in(programs: Path, package: str) -> str:
    """Version of a package in an environment."""
    code = f"import importlib.metadata as m; print(m.version({package!r}))"
    return run([str(programs / "python"), "-c", code]).strip()


def version_here(package: str) -> str:
    """Version of a package beside opcast.

    Raises:
        Missing: It is not installed.
    """
    try:
        return version(package)
    except PackageNotFoundError:
        raise Missing(f"{package} is not installed") from None


def tests(*selection: str) -> None:
    """Run tests of the suite that use a client."""
    said = run([sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", *selection])
    if " passed" not in said:
        skipped = re.findall(r"^SKIPPED.*?: (.*)$", said, re.MULTILINE) or ["no test ran"]
        raise Missing(skipped[0])


def mlflow(folder: Path) -> str:
    """``mlflow.pyfunc.load_model`` on a registered model."""
    there = version_here("mlflow")
    tests(str(TESTS / "models" / "tracking" / "test_mlflow_store.py"), "-k", "registered or pyfunc")
    return there


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str]:
    """A server's address."""
    log = folder / "server.log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "opcast", "serve", "--port", "0"], stderr=errors
        )
        try:
            for _ in range(10 * START_S):
                time.sleep(0.1)
                found = re.search(r"(http://\S+)/docs", log.read_text())
                if process.poll() is not None:
                    raise Failed(log.read_text().strip().splitlines()[-1])
                if found:
                    with contextlib.suppress(OSError):
                        urllib.request.urlopen(f"{found[1]}/health", timeout=10).read()
                        break
            else:
                raise Failed(f"the server did not start within {START_S} s")
            yield found[1]
        finally:
            process.terminate()
            process.wait(60)


#: Sends a program, operators and a plan with nothing but generated code.
GENERATED = """
import importlib, json, pkgutil, sys
client_package, url, program = sys.argv[1:]
package = importlib.import_module(client_package)
client = package.Client(base_url=url, raise_on_unexpected_status=True)
endpoints = {}
api = importlib.import_module(client_package + ".api")
for module in pkgutil.walk_packages(api.__path__, api.__name__ + "."):
    loaded = importlib.import_module(module.name)
    if hasattr(loaded, "sync_detailed"):
        endpoints[module.name.rsplit(".", 1)[1]] = loaded
models = importlib.import_module(client_package + ".models")
print(",".join(sorted(endpoints)), file=sys.stderr)

def send(name, model, data):
    body = getattr(models, model).from_dict(data)
    answer = endpoints[name].sync_detailed(client=client, body=body)
    assert answer.status_code == 200, (name, answer.status_code, answer.content[:300])
    return json.loads(answer.content)

query = {"device": "tpu-v4", "lowering": "op", "program": program}
said = send("predict_program", "ProgramQuery", query)
assert said["latency_us"] > 0, said
op = "linear m=64 n=4096 k=4096 dtype=bf16"
said = send("predict_kernels", "OpsQuery", {"device": "h100-sxm", "ops": [op]})
assert said["latency_us"][0] > 0, said
said = send("simulate", "SimulateQuery", {"workload": "llama", "cluster": "dgx-h100-x16",
    "plan": "tp=8,dp=2", "settings": {"layers": 4, "batch": 16}})
assert said["step_us"] > 0, said
assert endpoints["health"].sync_detailed(client=client).status_code == 200
"""


def openapi(folder: Path) -> str:
    """A client generated from the server's OpenAPI document sends JSON programs."""
    programs = installed(folder / "venv", "openapi-python-client")
    with server(folder) as url:
        document = folder / "openapi.json"
        document.write_bytes(urllib.request.urlopen(f"{url}/openapi.json", timeout=60).read())
        out = folder / "generated"
        run([str(programs / "openapi-python-client"), "generate", "--path", str(document),
             "--meta", "none", "--output-path", str(out / "opcast_client"), "--overwrite"],
            PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")  # fmt: skip
        script = folder / "send.py"
        script.write_text(GENERATED)
        run([str(programs / "python"), str(script), "opcast_client", url, PROGRAM],
            PYTHONPATH=str(out))  # fmt: skip
    return version_in(programs, "openapi-python-client")


def perfetto(folder: Path) -> str:
    """Perfetto's trace processor reads a Chrome trace with its tracks' names."""
    programs = installed(folder / "venv", "perfetto")
    program, trace = folder / "step.mlir", folder / "trace.json"
    program.write_text(PROGRAM)
    run([sys.executable, "-m", "opcast", "predict", str(program), "--device", "h100-sxm",
         "--lowering", "op", "--timeline", str(trace)])  # fmt: skip
    events = [e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]
    query = (
        "import sys\nfrom perfetto.trace_processor import TraceProcessor\n"
        "tp = TraceProcessor(trace=sys.argv[1])\n"
        "rows = [r.n for r in tp.query('select count(*) as n from slice')]\n"
        "names = [r.name for r in tp.query('select name from thread')]\n"
        "print(rows[0], sum(map(bool, names)))\n"
    )
    try:
        said = run([str(programs / "python"), "-c", query, str(trace)])
    except Failed as error:
        # The package downloads its program from elsewhere than PyPI.
        if re.search(r"curl|urlopen|URLError|HTTP|resolve|timed out", str(error)):
            raise Missing("its trace processor is no part of the package on PyPI") from None
        raise
    slices, named = map(int, said.split()[-2:])
    if slices != len(events) or not named:
        raise Failed(f"{slices} slices of {len(events)}, {named} named tracks")
    return version_in(programs, "perfetto")


def hespas(folder: Path) -> str:
    """HESPAS runs with opcast's estimators; it is not on PyPI."""
    try:
        there = version_here("hespas")
    except Missing:
        tests(str(TESTS / "predict" / "export" / "test_hespas.py"))
        raise Missing("not on PyPI; the tests pass against a stand-in") from None
    tests(str(TESTS / "predict" / "export" / "test_hespas.py"))
    return there


def astra_sim(folder: Path) -> str:
    """ASTRA-sim's analytical back end runs the Chakra traces of a program and of a step."""
    binary = os.environ.get("ASTRA_SIM") or shutil.which("AstraSim_Analytical_Congestion_Unaware")
    if not binary:
        tests(str(TESTS / "predict" / "export" / "test_step_traces.py"))
        raise Missing("built from source only (ASTRA_SIM names it); by its rules the tests pass")
    program, out = folder / "step.mlir", folder / "traces"
    run([sys.executable, "-m", "opcast", "zoo", "export", "llama", "--set", "layers=1",
         "--set", "mode=train", "--mesh", "fsdp=4", "--out", str(program)])  # fmt: skip
    run([sys.executable, "-m", "opcast", "export", "chakra", str(program), "--cluster",
         "h100-sxm-x4", "--lowering", "fused", "--out", str(out)])  # fmt: skip
    _finished(binary, out)
    for number, (model, plan) in enumerate(STEPS):
        out = folder / f"step{number}"
        said = run([sys.executable, "-m", "opcast", "export", "chakra", "--workload", model,
                    "--set", "layers=4,batch=64", "--cluster", "dgx-h100-x16", "--plan", plan,
                    "--out", str(out), "--json"])  # fmt: skip
        ours, theirs = json.loads(said)["step_us"], _finished(binary, out) / 1000
        if abs(theirs / ours - 1) > 0.1:
            raise Failed(f"{model} {plan}: {theirs:.0f} for our {ours:.0f} us")
    return Path(binary).name


#: Steps whose traces ASTRA-sim runs.
STEPS = (("llama", "dp=16"), ("llama", "tp=8,pp=2"), ("moe", "dp=16,ep=8"))


def _finished(binary: str, out: Path) -> int:
    """Run ASTRA-sim on a folder; returns the cycles, nanoseconds, of its last rank."""
    said = run([binary, f"--workload-configuration={out}/trace",
                f"--comm-group-configuration={out}/comm_group.json",
                f"--network-configuration={out}/network.yml",
                f"--system-configuration={out}/system.json",
                f"--remote-memory-configuration={out}/remote_memory.json"])  # fmt: skip
    cycles = [int(n) for n in re.findall(r"finished, (\d+) cycles", said)]
    if len(cycles) < len(list(out.glob("trace.*.et"))):
        raise Failed(f"{len(cycles)} ranks finished")
    return max(cycles)


def vidur(folder: Path) -> str:
    """Vidur's tables by the columns that it reads; the simulator itself is not on PyPI."""
    tests(str(TESTS / "predict" / "export" / "test_tables.py"), "-k", "vidur")
    return "columns"


def simulators(folder: Path) -> str:
    """LLMServingSim, SimAI and Calculon by the definitions of their files."""
    tests(str(TESTS / "predict" / "export" / "test_simulators.py"))
    return "formats"


def xla(folder: Path) -> str:
    """XLA's GPU compiler schedules by the exported tables."""
    tests(str(TESTS / "predict" / "export" / "test_xla_perf_table.py"), "-k", "compiler_reads")
    return version_here("jaxlib")


def plugin(folder: Path) -> str:
    """The pytest plug-in in a suite of its own."""
    (folder / "conftest.py").write_text('pytest_plugins = ["opcast.predict.pytest_plugin"]\n')
    (folder / "test_speed.py").write_text(
        "import jax.numpy as jnp\nimport jax, opcast\n\n"
        "def test_speed():\n"
        "    x = jax.ShapeDtypeStruct((256, 256), jnp.float32)\n"
        "    assert opcast.predict(lambda a: a @ a, x, device='h100-sxm', lowering='op') < 1e-2\n"
    )
    said = run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(folder)])
    if "1 passed" not in said:
        raise Failed(said.strip().splitlines()[-1])
    return version_here("pytest")


def jax_files(folder: Path) -> str:
    """Files of older JAX versions are read."""
    tests(str(TESTS / "features" / "ir" / "test_jax_versions.py"))
    return "0.4.30 to 0.9.2"


def ray(folder: Path) -> str:
    """A Ray cluster of two nodes gives the same results, though a worker and a node die."""
    python = beside(folder, "ray", "ray>=2.40")
    files = ("predict/sweep/test_run.py", "predict/plan/test_plan_workers.py",
             "datagen/profile/test_fleet.py", "common/test_tasks.py")  # fmt: skip
    for file in files:  # each with its own limit of time
        said = run([python, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider",
                    str(TESTS / file), "-k", "ray or fleet"])  # fmt: skip
        if " passed" not in said:
            raise Missing((re.findall(r"SKIPPED.*?: (.*)$", said, re.MULTILINE) or ["no test"])[0])
    return version_in(Path(python).parent, "ray")


def equinox(folder: Path) -> str:
    """Functions jitted by ``equinox.filter_jit``, and its modules, are read."""
    python = beside(folder, "equinox", "equinox")
    file = str(TESTS / "features" / "ir" / "test_jax_function.py")
    said = run([python, "-m", "pytest", "-q", "-p", "no:cacheprovider", file, "-k", "equinox"])
    if " passed" not in said or "skipped" in said:
        raise Missing("its tests are skipped")
    return version_in(Path(python).parent, "equinox")


CLIENTS: dict[str, Callable[[Path], str]] = {
    "MLflow pyfunc": mlflow,
    "OpenAPI client": openapi,
    "Perfetto": perfetto,
    "HESPAS": hespas,
    "ASTRA-sim": astra_sim,
    "Vidur": vidur,
    "LLMServingSim, SimAI, Calculon": simulators,
    "XLA's scheduler": xla,
    "pytest plug-in": plugin,
    "JAX files": jax_files,
    "equinox": equinox,
    "Ray": ray,
}


def main() -> None:
    chosen = {n: c for n, c in CLIENTS.items() if not sys.argv[1:] or c.__name__ in sys.argv[1:]}
    failed = False
    print(f"{'client':32}{'version':18}{'outcome':9}{'seconds':>8}  reason")
    for name, client in chosen.items():
        started, reason, there = time.monotonic(), "", ""
        with tempfile.TemporaryDirectory(prefix="opcast-client-") as folder:
            try:
                there = client(Path(folder))
                outcome = "ok"
            except Missing as error:
                outcome, reason = "skipped", str(error)
            except Failed as error:
                outcome, reason, failed = "failed", str(error), True
        seconds = time.monotonic() - started
        print(f"{name:32}{there:18}{outcome:9}{seconds:8.0f}  {reason}", flush=True)
    sys.exit(int(failed))


if __name__ == "__main__":
    main()
