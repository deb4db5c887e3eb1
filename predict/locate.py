"""Find the folder of a model by its name."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ..common.errors import DeviceError, ModelError
from ..common.files import file_stamp, parse_json
from ..common.paths import data_home, home
from ..features.devices.device import DeviceSpec
from ..models.core.registry import CPU_MODEL, GPU_MODEL, PRETRAINED, TPU_MODEL, UNTRAINED
from ..models.core.registry import OPERATOR_MODEL as OPERATOR_MODEL
from ..models.core.store import MANIFEST

if TYPE_CHECKING:
    from ..models.operators import OpModel

#: The shipped model of layers, batches and unseen kinds of attention.
BLOCK_MODEL = "blocks"

logger = logging.getLogger(__name__)

#: Models shipped with the package.
SHIPPED = PRETRAINED
DEFAULT = CPU_MODEL
#: Default models for platforms other than that of :data:`DEFAULT`.
PLATFORM_DEFAULTS = {"gpu": GPU_MODEL, "tpu": TPU_MODEL}


def registered() -> Path:
    """Return the folder of models registered with ``opcast train --register NAME``.

    Models that earlier versions registered in the cache folder are moved here, since clearing
    caches would delete them. Models whose name already exists here are left.
    """
    folder, before = data_home() / "models", home() / "models"
    if before != folder and before.is_dir():
        _move(before, folder)
    return folder


def _move(before: Path, folder: Path) -> None:
    """Move models to another folder; report and leave those that cannot be moved."""
    for model in sorted(before.glob("*")):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not (folder / model.name).exists():
                shutil.move(model, folder / model.name)
                logger.warning("moved the registered model %s to %s", model.name, folder)
        except OSError as error:
            logger.warning("the registered model %s is not found: move it to %s yourself (%s)",
                           model, folder, error)  # fmt: skip
    with contextlib.suppress(OSError):
        before.rmdir()


def available() -> dict[str, Path]:
    """Return model folders by name; registered models shadow shipped ones."""
    return {
        folder.name: folder
        # Later entries take precedence: a registered model shadows the shipped one of its name.
        for root in (SHIPPED, registered())
        if root.is_dir()
        for folder in sorted(root.iterdir())
        if (folder / "manifest.json").is_file()
    }


def find_model(model: str | Path, platform: str = "") -> Path:
    """Find the folder of a model given by name or path.

    Args:
        model: Name or folder.
        platform: ``cpu``, ``gpu`` or ``tpu``; selects the model for ``default``.

    Raises:
        ModelError: Neither a model folder nor a known name; the message lists the names.
    """
    for folder in _candidates(model, platform):
        if file_stamp(folder / MANIFEST) is not None:
            return folder
    names = available()
    choices = ", ".join(sorted(names)) or "none yet"
    raise ModelError(
        f"no model {str(model)!r}",
        hint=f"give a model folder or one of: {choices}; without training: "
        f"{', '.join(UNTRAINED)}; train one with: opcast train",
    )


def load_operators(
    model: str | Path = OPERATOR_MODEL, only: Sequence[str] | None = None
) -> OpModel | None:
    """Load a model of library operators; returns ``None`` for ``roofline``.

    Args:
        model: Name or folder; ``default`` is the shipped model.
        only: Families to read, which is faster; all by default.

    Raises:
        ModelError: The model does not exist or is of another kind.
    """
    if str(model) == "roofline":
        return None
    return read_operators(find_model(OPERATOR_MODEL if str(model) == "default" else model), only)


def read_operators(folder: Path, only: Sequence[str] | None = None) -> OpModel:
    """Read a model of library operators; it is read again only if its folder has changed.

    Args:
        folder: Folder of the model.
        only: Families to read, which is faster; all by default.

    Raises:
        ModelError: The folder is damaged or holds a model of another kind.
    """
    folder = folder.absolute()
    # A separate copy, since callers may calibrate it or add devices to it.
    return _read(folder, file_stamp(folder / MANIFEST), only and tuple(only)).own()


@lru_cache(maxsize=32)
def _read(folder: Path, stamp: object, only: tuple[str, ...] | None) -> OpModel:
    from ..models.operators import OpModel

    return OpModel.load(folder, only)


def _candidates(model: str | Path, platform: str = "") -> Iterator[Path]:
    """Yield the folders that a model may be in, in order of precedence.

    Raises:
        ModelError: The model is neither a name nor a path.
    """
    if not isinstance(model, str | Path):
        raise ModelError(
            f"a model is given by {type(model).__name__} {model!r}",
            hint="give its name or folder (opcast models)",
        )
    folder = Path(model)
    # A folder takes precedence over a name, so that a local model cannot be shadowed.
    yield folder
    default = PLATFORM_DEFAULTS.get(platform, DEFAULT)
    name = default if str(model) == "default" else str(model)
    # Listing all models takes longer than a prediction.
    if folder.name == str(model):
        yield registered() / name
        yield SHIPPED / name


def model_stamp(model: str | Path) -> tuple[object, ...]:
    """Return a value that changes when a name means another model; the models are not read.

    Args:
        model: Name or folder; ``default`` means the models of all platforms.

    Returns:
        For each model, its folder and the stamp of its manifest, which is written last. Empty for a
        model without a folder.
    """
    platforms = ("", *PLATFORM_DEFAULTS) if str(model) == "default" else ("",)
    found = []
    for platform in platforms:
        for folder in _candidates(model, platform):
            stamp = file_stamp(folder / MANIFEST)
            if stamp is not None:
                found.append((str(folder), stamp))
                break
    return tuple(found)


def trained_devices() -> dict[str, DeviceSpec]:
    """Collect the devices described by shipped and registered models of programs, by name.

    A model that cannot be read is skipped; loading it reports the error.
    """
    devices: dict[str, DeviceSpec] = {}
    for folder in available().values():
        try:
            stored = parse_json((folder / "manifest.json").read_text(encoding="utf-8"))["devices"]
            known = {n: DeviceSpec.from_dict(d, where=n) for n, d in stored.items() if d}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DeviceError) as error:
            logger.info("no devices of the model %s: %s", folder, error)
            continue
        devices |= known
    return devices


def is_untrained(model: str | Path) -> bool:
    """Return whether a name means an estimator without a model folder rather than a model."""
    from ..models.core.registry import UNTRAINED

    if str(model) not in UNTRAINED:
        return False
    folder = (Path(model) / "manifest.json").is_file()
    return not folder and str(model) not in available()


def model_hash(model: str | Path) -> str:
    """Compute a model's digest: that of its manifest, which contains the digests of its files.

    Args:
        model: Name or folder; ``default`` means the models of all platforms.

    Raises:
        ModelError: The model does not exist.
    """
    from ..models.core.store import folder_digest

    # The default depends on the device's platform, so its digest covers the models of all of them.
    others = PLATFORM_DEFAULTS.values() if str(model) == "default" else ()
    return folder_digest(*(find_model(name) for name in (model, *others)))
