"""Runner of HESPAS with opcast's estimators, which HESPAS does not discover itself."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from ...common.errors import DatasetError, OpcastError
from ...common.files import parse_json, write_text
from ..locate import model_hash

#: Values of ``perf_estimator.method`` that opcast implements.
METHODS = ("opcast", "opcast_op")


def run_hespas(config: Path, arguments: Sequence[str] = ()) -> None:
    """Register opcast's estimators, insert the model's digest into a configuration, run HESPAS.

    Args:
        config: A configuration of HESPAS.
        arguments: Further arguments of ``hespas_chakra_gen``.

    Raises:
        OpcastError: HESPAS is not installed.
        DatasetError: The configuration cannot be read or names another estimator.
        ModelError: The model does not exist.
    """
    data = configured(config)
    try:
        from hespas.chakra_gen.chakra_trace_generator import main
    except ImportError as error:
        raise OpcastError(
            f"HESPAS cannot be imported: {error}", hint="install it from its repository"
        ) from None
    register()
    # HESPAS takes a path; the user's file is not changed.
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / config.name
        write_text(path, json.dumps(data))
        main([str(path), *arguments])


def register() -> None:
    """Add opcast's estimators to those of HESPAS."""
    from hespas.estimator import choice

    from .hespas import OpcastEstimator, OpcastOpEstimator

    for name, cls in zip(METHODS, (OpcastEstimator, OpcastOpEstimator), strict=True):
        if name not in choice.existing_estimators:
            # HESPAS has a fixed list and no entry points; both the list and the choice need it.
            choice.existing_estimators.append(name)
            choice.add_estimator_choice(name, cls)


def configured(config: Path) -> dict[str, object]:
    """Return the configuration with the model's digest inserted.

    Raises:
        DatasetError: The configuration cannot be read, or names another estimator.
    """
    try:
        data = parse_json(config.read_text(encoding="utf-8"))
        estimator = data["perf_estimator"]
        method = str(estimator["method"]).lower()
        hardware = estimator.setdefault("hardware", {})
        if method not in METHODS:
            raise DatasetError(
                f"perf_estimator.method is {method!r}",
                where=str(config),
                hint=f"one of {', '.join(METHODS)}",
            )
        hardware["model_hash"] = model_hash(hardware.get("model", "default"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            f"not a HESPAS configuration: {error!r}",
            where=str(config),
            hint='{"perf_estimator": {"method": "opcast", "hardware": {"device": "h100-sxm"}}, …}',
        ) from None
    return dict(data)
