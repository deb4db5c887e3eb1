"""Errors that a user can cause. Each states what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
import traceback
from collections.abc import Sequence
from pathlib import Path

from .paths import PACKAGE

#: Prefix of an important note: the answer may be far off. Outputs print these first.
WARNING = "warning: "


class OpcastError(Exception):
    """Base of every error that opcast raises for bad input or a bad environment.

    Args:
        what: What is wrong, in one sentence.
        where: File, line, op or column concerned.
        hint: What the user can do next.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        # args holds the message alone, so that pickling and logging show it.
        super().__init__(what)

    def __str__(self) -> str:
        """Format as one line: ``where: what. hint``."""
        head = f"{self.where}: {self.what}" if self.where else self.what
        return f"{head} ({self.hint})" if self.hint else head


class ProgramError(OpcastError):
    """A program cannot be read: not StableHLO or HLO, truncated, or malformed."""


class AbsentError(ProgramError):
    """A program does not exist: no such file, or no such function in a file."""


class SeveralDevicesError(ProgramError):
    """A program for several devices was given a single one."""


class InternalError(OpcastError):
    """Code of opcast fails on valid input: a fault of opcast, not of the user.

    The original error is the cause (``__cause__``).
    """


class DynamicShapeError(ProgramError):
    """The size of an op's dimension is only known when the program runs."""


class LoweringError(OpcastError):
    """A program cannot be lowered to kernels for the target."""


class CompilerError(LoweringError):
    """A target compiler is not installed, does not start, crashes, or exceeds its limits."""


class CompilerStartError(CompilerError):
    """A target compiler does not start, whatever the program."""


class DeviceError(OpcastError):
    """A device is unknown, not present, or described incompletely."""


class PlanError(OpcastError):
    """A parallel plan or workload is malformed, or does not fit the model or the cluster."""


class DatasetError(OpcastError):
    """A dataset is missing, has another schema, or has bad rows."""


class ProfileError(OpcastError):
    """A measurement could not be made."""


class ModelError(OpcastError):
    """A saved model is missing, damaged, or of another schema."""


class WorseModelError(ModelError):
    """An adapted model has a larger error than before on held-out data."""


class StrictError(OpcastError):
    """Under ``strict``, a kernel has no learned estimate."""


class UnknownCallError(OpcastError):
    """A kernel runs an unknown custom call, so that it has no time."""


class FileError(OpcastError, OSError):
    """A file cannot be written: the disk is full, or the location is read-only."""


def fault(error: Exception) -> InternalError:
    """Convert an unexpected exception to a one-line error with its class, message and location.

    Args:
        error: Any exception other than :class:`OpcastError`.
    """
    frames = traceback.extract_tb(error.__traceback__)
    # The innermost line of this package: more informative than a line of a library below it.
    own = [f for f in frames if Path(f.filename).is_relative_to(PACKAGE)] or frames
    place = f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""
    return InternalError(
        f"a fault of opcast: {type(error).__name__}: {error}{place}",
        hint="please report it; OPCAST_TRACEBACK=1 prints where it comes from",
    )


def meant(typed: str, known: Sequence[str]) -> str:
    """A hint with the closest match of a misspelt key, or all valid ones."""
    close = difflib.get_close_matches(typed.lower(), known, n=1)
    listed = f"one of {', '.join(known)}"
    return f"did you mean {close[0]}? Else {listed}" if close else listed
