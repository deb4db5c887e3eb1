"""Logs runs to MLflow: one local store, one run per training, whole model folders as artifacts.

The store is an SQLite file in ``mlruns/`` with artifacts next to it, since MLflow requires a
database. MLflow is imported only in commands that track.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from ... import __version__
from ...common.errors import ModelError
from ...common.files import locked
from ...common.plugins import extra_hint
from ...common.types import JsonObject

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Name of the MLflow experiment for all runs.
EXPERIMENT = "opcast"
#: Characters that names of metrics must not have (mlflow.utils.validation).
_NOT_IN_NAMES = re.compile(r"[^\w\-. :/]")
#: Seconds that SQLite waits for another process's lock on the store.
WAIT_S = 60
#: Artifact of a run with its predictions, and the tag with their number before sampling.
FILE, ROWS_TAG = "predictions.parquet", "predictions_rows"
#: Columns of the stored predictions.
COLUMNS = (
    "level",
    "kind",
    "device",
    "split",
    "measured_us",
    "predicted_us",
    "lo_us",
    "hi_us",
    "in_domain",
)
#: Most stored predictions of a run; larger tables are sampled with a fixed seed, so that the
#: artifacts of a run stay small.
MOST_ROWS = 20_000


@dataclass
class RunLog:
    """The contents of one logged run.

    Attributes:
        name: Name of the run.
        params: Model, split, hyper-parameters, dataset hash, device.
        metrics: Figures by name, such as ``unseen_family/median_ape``.
        tables: Frames by file name, without suffix.
        figures: Figures by file name, without suffix.
        model_dir: Saved model folder.
        tags: Free labels.
        datasets: Hash by folder of the training data.
        predictions: Rows of :func:`~opcast.models.tracking.mlflow_store.tidy`, for accuracy pages.
    """

    name: str
    params: Mapping[str, object]
    metrics: Mapping[str, float]
    tables: Mapping[str, pd.DataFrame] = field(default_factory=dict)
    figures: Mapping[str, Figure] = field(default_factory=dict)
    model_dir: Path | None = None
    tags: Mapping[str, str] = field(default_factory=dict)
    datasets: Mapping[str, str] = field(default_factory=dict)
    predictions: pd.DataFrame | None = None


def store_dir() -> Path:
    """Folder of the MLflow store: ``$OPCAST_MLRUNS`` or ``mlruns`` in the current directory."""
    return Path(os.environ.get("OPCAST_MLRUNS", "mlruns")).absolute()


def store_uri(root: Path | None = None) -> str:
    """Tracking URI of the store."""
    return f"sqlite:///{root or store_dir()}/mlflow.db?timeout={WAIT_S}"


def log_run(run: RunLog, *, register: str | None = None, root: Path | None = None) -> str:
    """Log one run.

    Args:
        run: Contents of the run.
        register: Name under which to register the model folder, if any.
        root: Folder of the store.

    Returns:
        Id of the run.

    Raises:
        ModelError: MLflow is not installed, the store cannot be written, or ``register`` is given
            without a model folder.
    """
    mlflow = connect(root)
    if register and run.model_dir is None:
        raise ModelError("cannot register a run without a model folder", where=run.name)
    with _explained(root or store_dir()):
        name = _distinct(mlflow, run.name)
        with mlflow.start_run(run_name=name, tags=dict(run.tags)) as active:
            _log(mlflow, run)
            run_id = str(active.info.run_id)
        if register:
            _register(mlflow, run_id, register)
    return run_id


@contextmanager
def parent_run(name: str, root: Path | None = None) -> Iterator[ParentRun]:
    """A run with child runs, such as the trials of a search.

    Args:
        name: Name of the run.
        root: Folder of the store.

    Raises:
        ModelError: MLflow is not installed.
    """
    mlflow = connect(root)
    with mlflow.start_run(run_name=_distinct(mlflow, name)) as active:
        yield ParentRun(mlflow, str(active.info.run_id))


@dataclass(frozen=True)
class ParentRun:
    """An open run.

    Attributes:
        mlflow: The module, connected to the store.
        run_id: Id of the run.
    """

    mlflow: ModuleType
    run_id: str

    def log(self, run: RunLog) -> None:
        """Log to this run."""
        _log(self.mlflow, run)

    def log_child(self, run: RunLog) -> str:
        """Log a child run; returns its id."""
        with self.mlflow.start_run(run_name=run.name, nested=True, tags=dict(run.tags)) as active:
            _log(self.mlflow, run)
            return str(active.info.run_id)


def serve_ui(port: int, tell: Callable[[str], None]) -> int:
    """Run MLflow's server on the store; returns its exit status.

    Its workers end with it, however this process is terminated.

    Args:
        port: Port on localhost.
        tell: Receives a message with the address of the experiment.
    """
    mlflow = connect(None)
    own = mlflow.get_experiment_by_name(EXPERIMENT).experiment_id
    command = [sys.executable, "-m", "mlflow", "ui", "--backend-store-uri", store_uri()]
    command += ["--port", str(port), "--workers", "1"]  # one user; each takes seconds to start
    # A separate session, so that its workers can be ended with it.
    server = subprocess.Popen(command, start_new_session=True)

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = {n: signal.signal(n, end) for n in (signal.SIGTERM, signal.SIGHUP)}
    tell(f"the runs: http://127.0.0.1:{port}/#/experiments/{own}")
    try:
        return server.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        _end_group(server)


def _end_group(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=5)
    # Workers that outlive their server.
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGKILL)


def _log(mlflow: ModuleType, run: RunLog) -> None:
    """Log the contents of a run to the active run."""
    mlflow.set_tag("opcast_version", __version__)
    data = {"data": ",".join(Path(folder).name for folder in run.datasets)} if run.datasets else {}
    params = {**data, **run.params}
    mlflow.log_params({k: v for k, v in params.items() if v is not None})
    mlflow.log_metrics(shown_metrics(run.metrics))
    if run.datasets:
        _log_datasets(mlflow, run.datasets)
    for name, frame in run.tables.items():
        mlflow.log_text(frame.to_csv(index=False), f"tables/{name}.csv")
    for name, figure in run.figures.items():
        mlflow.log_figure(figure, f"figures/{name}.png")
    if run.predictions is not None:
        log_predictions(mlflow, run.predictions)
    if run.model_dir is not None:
        # Imported here: a command that logs a model has already loaded what this needs.
        from .pyfunc import description

        mlflow.log_artifacts(str(run.model_dir), "model")
        mlflow.log_text(description(run.model_dir), "model/MLmodel")


def shown_metrics(metrics: Mapping[str, float]) -> dict[str, float]:
    """Rename metrics so that MLflow, which sorts them, shows overall metrics first.

    Metrics of parts (``kind:gemm/mape``) become ``parts/…``, a separate section below. NaN metrics
    are left out. Characters that MLflow does not allow in names, such as the ``~`` of a measured
    machine, become ``_``.
    """
    plain = {_NOT_IN_NAMES.sub("_", name): value for name, value in metrics.items()}
    return {
        f"parts/{name}" if ":" in name.split("/")[0] else name: float(value)
        for name, value in plain.items()
        if value == value
    }


def _log_datasets(mlflow: ModuleType, datasets: Mapping[str, str]) -> None:
    """Log origin and digest of the data, without a copy."""
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for folder, digest in datasets.items():
        path = Path(folder).absolute()
        # MLflow accepts digests of at most 36 characters.
        source = json.dumps({"uri": str(path)})
        data = Dataset(name=path.name, digest=digest[:36], source_type="local", source=source)
        inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", "training")]))
    mlflow.MlflowClient().log_inputs(mlflow.active_run().info.run_id, inputs)


def _distinct(mlflow: ModuleType, name: str) -> str:
    """An unused run name, with a number appended if necessary."""
    quoted = name.replace("'", "")
    found = mlflow.search_runs(
        experiment_names=[EXPERIMENT],
        filter_string=f"attributes.run_name LIKE '{quoted}%'",
        output_format="list",
    )
    taken = {run.info.run_name for run in found}
    if name not in taken:
        return name
    number = next(n for n in itertools.count(2) if f"{name}-{n}" not in taken)
    return f"{name}-{number}"


def connect(root: Path | None) -> ModuleType:
    """Connect MLflow to the store, which is created if missing.

    Raises:
        ModelError: MLflow is not installed.
    """
    try:
        import mlflow
    except ImportError:
        raise ModelError(
            "MLflow is not installed", hint=f"{extra_hint('track')}, or pass --no-track"
        ) from None
    base = root or store_dir()
    # Silence MLflow's progress bars and the logs of its database migrations.
    os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")
    for noisy in ("mlflow", "alembic"):
        logging.getLogger(noisy).setLevel(logging.ERROR)
    # One process at a time creates the tables and the experiment; MLflow itself does not lock.
    with _explained(base):
        base.mkdir(parents=True, exist_ok=True)
        with locked(base / "opcast.lock"):
            mlflow.set_tracking_uri(store_uri(base))
            if mlflow.get_experiment_by_name(EXPERIMENT) is None:
                place = (base / "artifacts").as_uri()
                mlflow.create_experiment(EXPERIMENT, artifact_location=place)
            mlflow.set_experiment(EXPERIMENT)
    return mlflow


@contextmanager
def _explained(base: Path) -> Iterator[None]:
    """Convert errors of the store and its database into one with a hint.

    Raises:
        ModelError: The store cannot be read or written.
    """
    try:
        yield
    except Exception as error:
        # By module name: SQLAlchemy's classes are not a dependency to import here.
        family = type(error).__module__.split(".")[0]
        known = family in ("mlflow", "sqlalchemy", "sqlite3") or isinstance(error, OSError)
        if isinstance(error, Warning) or not known:
            raise
        lines = [line for line in str(error).splitlines() if line.strip()] or [repr(error)]
        raise ModelError(
            f"the MLflow store cannot be used: {lines[0][:300]}",
            where=str(base),
            hint="is it writable, and not full? set $OPCAST_MLRUNS, or pass --no-track",
        ) from error


def _register(mlflow: ModuleType, run_id: str, name: str) -> None:
    client = mlflow.MlflowClient()
    source = f"{client.get_run(run_id).info.artifact_uri}/model"
    known = {model.name for model in client.search_registered_models()}
    if name not in known:
        client.create_registered_model(name)
    client.create_model_version(name, source=source, run_id=run_id)


def tidy(frame: pd.DataFrame, split: str = "", level: str = "kernel") -> pd.DataFrame:
    """Reduce predictions to the columns of :data:`COLUMNS`.

    Args:
        frame: At least ``kind`` (or ``key``), ``device``, ``measured_us``, ``predicted_us``,
            ``lo_us`` and ``hi_us``.
        split: Name of the split, if the frame has none.
        level: ``kernel``, ``program`` or ``op``.
    """
    given: JsonObject = {
        "level": level,
        "split": split,
        "in_domain": True,
        "kind": frame.get("key", level),
    }
    missing = {name: value for name, value in given.items() if name not in frame}
    return frame.assign(**missing)[list(COLUMNS)].reset_index(drop=True)


def capped(frame: pd.DataFrame) -> pd.DataFrame:
    """At most :data:`MOST_ROWS` rows, drawn with a fixed seed."""
    if len(frame) <= MOST_ROWS:
        return frame
    drawn = np.sort(np.random.default_rng(0).permutation(len(frame))[:MOST_ROWS])
    return frame.iloc[drawn].reset_index(drop=True)


def log_predictions(mlflow: ModuleType, frame: pd.DataFrame) -> None:
    """Log the frame of :func:`tidy` to the active run."""
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / FILE
        # Single precision and categories keep the artifact small; pages show at most three digits.
        small = capped(frame).astype(
            {name: "float32" for name in COLUMNS if name.endswith("_us")}
            | dict.fromkeys(("level", "kind", "device", "split"), "category")
        )
        small.to_parquet(path, index=False)
        mlflow.log_artifact(str(path))
    mlflow.set_tag(ROWS_TAG, len(frame))
