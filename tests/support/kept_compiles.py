"""Stands in for the process of an absent device's compiler: what it compiled before, it answers.

Run as ``kept_compiles.py STORE TOKEN COMMAND... FOLDER``. The key of an answer is all that the
compiler is given, so that a change of ours to any of it compiles anew; ``TOKEN`` stands for the
code that gives it. Only jobs of which every program compiled are kept.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

#: Seconds after which an answer that no test asks for is deleted.
UNUSED_S = 30 * 86400
_KEPT = ("result*.json", "hlo*.txt")


def main(store: Path, token: str, command: list[str]) -> int:
    """Answer a job folder from the store, or by the real command; gives the exit status."""
    folder = Path(command[-1])
    place = store / key(folder, token)
    if place.is_dir():
        os.utime(place)
        # Results last: they tell who waits that the text is there.
        for path in sorted(place.iterdir()):
            shutil.copyfile(path, folder / path.name)
        return 0
    code = subprocess.run(command, check=False).returncode
    if code == 0 and succeeded(folder):
        keep(folder, place)
    return code


def key(folder: Path, token: str) -> str:
    """Digest of a job: what is compiled, for what, how, and by which packages."""
    job = json.loads((folder / "job.json").read_text())
    packages = Path(job.pop("folder") or "/nowhere")
    versions = sorted(path.name for path in packages.glob("*.dist-info"))
    found = hashlib.sha256(json.dumps([token, job, versions], sort_keys=True).encode())
    for number in range(len(job["shapes"])):
        found.update(hashlib.sha256((folder / f"program{number}").read_bytes()).digest())
    return found.hexdigest()


def succeeded(folder: Path) -> bool:
    """Whether every program of a job has a result without an error."""
    count = len(json.loads((folder / "job.json").read_text())["shapes"])
    results = [folder / f"result{number}.json" for number in range(count)]
    return all(p.is_file() and "error" not in json.loads(p.read_text()) for p in results)


def keep(folder: Path, place: Path) -> None:
    """Keep a job's results, and delete those that were not used for long."""
    place.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=place.parent, prefix=".new-"))
    for pattern in _KEPT:
        for path in folder.glob(pattern):
            shutil.copyfile(path, scratch / path.name)
    try:
        scratch.rename(place)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
    for path in place.parent.iterdir():
        if path.stat().st_mtime < time.time() - UNUSED_S:
            shutil.rmtree(path, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:]))
