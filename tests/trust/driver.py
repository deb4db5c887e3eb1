"""A job in a process of its own, with a fault planted in it: ``driver.py JOB FOLDER [FAULT N]``.

Faults: ``kill N`` ends the process as kill -9 does at its N-th operation on files (a file made,
forced to disk, renamed, appended to); ``limit N`` lets no file grow beyond N bytes, as on a full
disk. Prints the number of operations.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def main(job: str, folder: Path, fault: str = "", number: int = 0) -> None:
    """Run a job with a fault."""
    logging.basicConfig(level=logging.WARNING)
    if fault == "limit":
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (number, number))
    counted = Counter(number if fault == "kill" else 0)
    counted.watch()
    print(json.dumps({"result": JOBS[job](folder), "operations": counted.count}))


class Counter:
    """Counts operations on files, and dies at one of them."""

    def __init__(self, last: int) -> None:
        self.count, self.last = 0, last

    def watch(self) -> None:
        """Count these from now on, before and after each."""
        Path.replace = self._counted(Path.replace)  # type: ignore[method-assign]
        Path.rename = self._counted(Path.rename)  # type: ignore[method-assign]
        Path.write_bytes = self._counted(Path.write_bytes)  # type: ignore[method-assign]
        Path.unlink = self._counted(Path.unlink)  # type: ignore[method-assign]
        os.fsync = self._counted(os.fsync)

    def _counted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            self._tick()
            found = work(*arguments, **named)
            self._tick()
            return found

        return run

    def _tick(self) -> None:
        self.count += 1
        if self.count == self.last:
            os.kill(os.getpid(), signal.SIGKILL)


def cache(folder: Path) -> list[str]:
    """Three entries of a cache."""
    from opcast.features.lowering.cache import LoweringCache

    store = LoweringCache(folder)
    keys = [store.key(str(i)) for i in range(3)]
    for i, key in enumerate(keys):
        if store.get(key) is None:
            store.put(key, f"HloModule m{i}\n" * 2000 + os.urandom(20_000).hex(), {"n": i})
    found = [store.get(key) for key in keys]
    return [entry.hlo[:20] if entry else "" for entry in found]


def profile(folder: Path) -> dict[str, Any]:
    """What a profile run writes: shards, failures, its record; rows as a worker gives them."""
    from dataclasses import asdict

    from opcast.datagen.dataset_folder import RunWriter, done_programs, replace_shards
    from opcast.features.dataset import COLUMNS, Dataset
    from opcast.features.devices.catalogue import find_device

    folder.mkdir(exist_ok=True)
    store = RunWriter(folder, "r1")
    done = done_programs(folder)
    store.record["device"] = asdict(find_device("l4"))
    store.save_record()
    store._shards = len(list(folder.glob("samples*.parquet")))
    for i in range(6):
        name = f"program{i}"
        if name in done:
            continue
        if i == 3:
            store.add_failure(name, "does not compile")
        else:
            row = {c: "x" if t == "str" else 1.0 for c, t in COLUMNS.items()}
            row |= {"program": name, "kernel_hash": f"k{i}", "level": "kernel", "repeats": 3}
            store.add_rows([row], "l4")
        store.flush()
    replace_shards(folder, Dataset.load(folder).frame)
    found = Dataset.load(folder)
    return {"programs": sorted(done_programs(folder)), "rows": len(found), "hash": found.hash}


def data_import(folder: Path) -> dict[str, Any]:
    """Published tables (made in ``folder``'s parent) into a dataset."""
    from opcast.datagen.published.importer import import_published
    from opcast.features.dataset import Dataset

    import_published(folder.parent / "published", folder)
    found = Dataset.load(folder)
    return {"rows": len(found), "hash": found.hash}


def sweep(folder: Path) -> list[list[Any]]:
    """A small sweep over plans."""
    from opcast.predict.sweep.job import SweepJob
    from opcast.predict.sweep.run import Sweep, grid
    from opcast.predict.sweep.space import parse_grid
    from opcast.simulate.step.named_workloads import make_workload

    sizes = {"layers": 8, "d_model": 1024, "heads": 8, "kv_heads": 8, "d_ff": 4096, "vocab": 8192,
             "seq": 1024, "batch": 32}  # fmt: skip
    folder.mkdir(exist_ok=True)
    job = Sweep(SweepJob(make_workload("llama", sizes), model="roofline"), folder)
    values = parse_grid("tp=1/2,pp=1/2,recompute=none/full,schedule=1f1b,split=1")
    found = grid(job, ["tpu-v5e-x8"], [32, 64], values)
    return found[["key", "step_us"]].to_numpy().tolist()


def train(folder: Path) -> dict[str, Any]:
    """Save a model where another one is; what is there at the end is one of both, whole."""
    from opcast.models.cost_model import CostModel

    source = Path(__file__).resolve().parents[1] / "models/data/v1/ridge"
    manifest = json.loads((source / "estimator/manifest.json").read_text())
    model = CostModel.load(source, schema=manifest["schema_hash"])
    model.save(folder)
    found = CostModel.load(folder, schema=manifest["schema_hash"])
    return {"estimator": found.name, "devices": sorted(found.devices)}


JOBS: dict[str, Callable[[Path], Any]] = {
    "cache": cache, "profile": profile, "import": data_import, "sweep": sweep, "train": train,
}  # fmt: skip


if __name__ == "__main__":
    job_name, where, *rest = sys.argv[1:]
    main(job_name, Path(where), *(rest[:1] or [""]), *map(int, rest[1:]))
