"""The GitHub Action and the pre-commit hook, on a repository of two commits, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEP = """import jax, jax.numpy as jnp

def step(x, w):
    return jax.nn.gelu((x @ w).astype(jnp.{dtype})) * 2

S = jax.ShapeDtypeStruct
example_args = (S((4096, 2048), jnp.bfloat16), S((2048, 8192), jnp.bfloat16))
"""
BUDGET = "- {name: step, program: step.py:step, device: h100-sxm, slower: 3%}\n"


def git(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    own = ("-c", "user.name=Test", "-c", "user.email=test@example.com")
    return subprocess.run(["git", *own, *arguments], cwd=folder, capture_output=True, text=True)


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """With a commit of a step in 16 bits and an ``opcast`` on the path that is this one."""
    tools = tmp_path / "tools"
    tools.mkdir()
    (tools / "opcast").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m opcast "$@"\n')
    (tools / "opcast").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(p for p in sys.path if p))
    folder = tmp_path / "repository"
    folder.mkdir()
    assert git(folder, "init", "-q").returncode == 0
    (folder / "step.py").write_text(STEP.format(dtype="bfloat16"))
    (folder / "opcast-budget.yaml").write_text(BUDGET)
    git(folder, "add", "-A")
    assert git(folder, "commit", "-qm", "Add a step").returncode == 0
    return folder


def run_action(folder: Path, base: str) -> tuple[int, str, str]:
    """The comparing step of the action as GitHub runs it: status, summary and outputs."""
    inputs = {name: own["default"] for name, own in ACTION["inputs"].items()}
    inputs |= {"base": base, "lowering": "fused"}
    (step,) = [own for own in ACTION["runs"]["steps"] if own.get("id") == "diff"]
    given = {
        name: inputs[value.removeprefix("${{ inputs.").removesuffix(" }}")]
        for name, value in step["env"].items()
    }
    summary, outputs = folder.parent / "summary.md", folder.parent / "outputs"
    files = {"GITHUB_STEP_SUMMARY": summary, "GITHUB_OUTPUT": outputs}
    for file in files.values():
        file.write_text("")
    own = {"RUNNER_TEMP": str(folder.parent), **{name: str(file) for name, file in files.items()}}
    # As GitHub runs ``shell: bash``.
    done = subprocess.run(
        ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", step["run"]],
        cwd=folder, env={**os.environ, **given, **own}, capture_output=True, text=True,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, summary.read_text(), outputs.read_text()


def test_the_action_fails_a_pull_request_that_is_slower(repository):
    (repository / "step.py").write_text(STEP.format(dtype="float32"))
    git(repository, "commit", "-qam", "Widen")
    status, summary, outputs = run_action(repository, "HEAD~1")
    assert status == 1
    assert summary.startswith("### opcast: 1 of 1 over budget") and "widened to f32" in summary
    assert outputs == f"report={repository.parent / 'opcast-diff.md'}\n"


@pytest.mark.exhaustive
def test_the_action_passes_what_is_the_same(repository):
    status, summary, _ = run_action(repository, "HEAD")
    assert status == 0 and "no kernel differs" in summary


def test_the_action_reports_why_nothing_was_compared(repository):
    status, summary, outputs = run_action(repository, "nope")
    assert status == 1 and outputs
    assert summary.startswith("### opcast: error\n\n    opcast: error: repository ")
    assert "no revision 'nope'" in summary


def test_texts_of_users_are_no_part_of_the_actions_scripts():
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"] and step["shell"] == "bash"


@pytest.mark.exhaustive  # the action runs the same comparison
def test_the_hook_refuses_a_commit_that_is_slower(repository, tmp_path):
    if shutil.which("pre-commit") is None:
        pytest.skip("pre-commit is not installed")
    (hook,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())
    # Python's environments are made over the network: here it is the system's opcast.
    own = {"repo": "local", "hooks": [{**hook, "language": "system"}]}
    (repository / ".pre-commit-config.yaml").write_text(yaml.safe_dump({"repos": [own]}))
    env = {**os.environ, "PRE_COMMIT_HOME": str(tmp_path / "pre-commit")}
    done = subprocess.run(
        ["pre-commit", "install"], cwd=repository, env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (repository / "step.py").write_text(STEP.format(dtype="float32"))
    git(repository, "add", "-A")
    done = git(repository, "commit", "-qm", "Widen")
    assert done.returncode == 1
    assert "over budget: slower by more than 3 %" in done.stdout + done.stderr
    assert git(repository, "log", "--oneline").stdout.count("\n") == 1
    (repository / "step.py").write_text("# The same.\n" + STEP.format(dtype="bfloat16"))
    git(repository, "add", "-A")
    done = git(repository, "commit", "-qm", "Say so")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(git(repository, "worktree", "list").stdout.splitlines()) == 1
