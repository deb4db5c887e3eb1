"""From a model's name to its folder."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

from ..features.device import DeviceSpec
from ..features.errors import DeviceError, ModelError
from ..features.files import parse_json
from ..features.paths import home
from ..models.names import CPU_MODEL, GPU_MODEL, PRETRAINED, TPU_MODEL
from ..models.names import OPERATOR_MODEL as OPERATOR_MODEL
from ..models.registry import UNTRAINED

logger = logging.getLogger(__name__)

#: Models that come with the package.
SHIPPED = PRETRAINED
DEFAULT = CPU_MODEL
#: Models that answer by default for devices of other platforms.
PLATFORM_DEFAULTS = {"gpu": GPU_MODEL, "tpu": TPU_MODEL}


def registered() -> Path:
    """Folder of the models that the user registered with ``opcast train --register NAME``."""
    return home() / "models"


def available() -> dict[str, Path]:
    """Model folders by name; registered ones shadow shipped ones."""
    return {
        folder.name: folder
        for root in (SHIPPED, registered())
        if root.is_dir()
        for folder in sorted(root.iterdir())
        if (folder / "manifest.json").is_file()
    }


def find_model(model: str | Path) -> Path:
    """Folder of a model given by name or path.

    Raises:
        ModelError: Neither a model folder nor a known name; the message lists the names.
    """
    folder = Path(model)
    if (folder / "manifest.json").is_file():
        return folder
    names = available()
    name = DEFAULT if str(model) == "default" else str(model)
    if name in names:
        return names[name]
    choices = ", ".join(sorted(names)) or "none yet"
    raise ModelError(
        f"no model {str(model)!r}",
        hint=f"give a model folder or one of: {choices}; without training: "
        f"{', '.join(UNTRAINED)}; train one with: opcast train",
    )


def trained_devices() -> dict[str, DeviceSpec]:
    """Devices that the shipped and registered models of programs describe, by name.

    A model that cannot be read describes none: who asks for it is told then.
    """
    found: dict[str, DeviceSpec] = {}
    for folder in available().values():
        try:
            stored = parse_json((folder / "manifest.json").read_text(encoding="utf-8"))["devices"]
            known = {n: DeviceSpec.from_dict(d, where=n) for n, d in stored.items() if d}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, DeviceError) as error:
            logger.info("no devices of the model %s: %s", folder, error)
            continue
        found |= known
    return found


def is_untrained(model: str | Path) -> bool:
    """Whether a name stands for an estimator that needs no model folder, and no model has it."""
    from ..models.registry import UNTRAINED

    folder = (Path(model) / "manifest.json").is_file()
    return str(model) in UNTRAINED and not folder and str(model) not in available()


def model_hash(model: str | Path) -> str:
    """Digest of a model: of its manifest, which has the digests of its files.

    Args:
        model: Name or folder; ``default`` stands for the models of all platforms.

    Raises:
        ModelError: There is no such model.
    """
    others = PLATFORM_DEFAULTS.values() if str(model) == "default" else ()
    digest = hashlib.sha256()
    for name in (model, *others):
        digest.update((find_model(name) / "manifest.json").read_bytes())
    return digest.hexdigest()[:16]
