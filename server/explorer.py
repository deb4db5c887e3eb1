"""The page at ``/``: forms that send requests to this server and show its answers."""

from __future__ import annotations

from .. import __version__
from ..common.types import JsonObject
from ..datagen.zoo import all_families
from ..datagen.zoo.registry import COMMON_CHOICES
from ..features.devices.catalogue import find_device, in_catalogue
from ..predict.page.assemble import Page, assemble, short
from ..simulate.clusters.catalogue import cluster_names
from ..simulate.serving.policies import frameworks
from ..simulate.step.presets import find_preset, preset_names
from . import schemas
from .service import Service

_SCRIPTS = (
    "breakdown.js",
    "ask.js",
    "charts.js",
    "plans.js",
    "answers.js",
    "change.js",
    "explore.js",
)
#: Zoo workloads of the named models, with the settings that the models' sizes do not determine.
_OF_MODELS = {
    "llama": {"batch": 1, "dtype": "bf16", "scan_layers": "true"},
    "moe": {"batch": 1, "dtype": "bf16"},
}
_DENSE = {"layers", "d_model", "heads", "kv_heads", "d_ff", "vocab", "seq"}
_SIZES = {"llama": _DENSE, "moe": _DENSE | {"experts", "top_k"}}
_TITLE = "opcast: how long will it take?"


def explorer_page(service: Service) -> str:
    """Make the page with the server's devices, models and workloads.

    Args:
        service: State of the server.
    """
    data = {
        "version": __version__,
        "devices": [_device(entry) for entry in service.devices()],
        "zoo": {name: family.defaults for name, family in all_families().items()},
        "dtypes": list(COMMON_CHOICES["dtype"]),
        "presets": _presets(),
        "models": list(service.predictors),
        "workloads": preset_names(),
        "clusters": cluster_names(),
        "frameworks": sorted(frameworks()),
        "compiles": service.settings.allow_compile,
        "secured": bool(service.settings.token),
        "example": schemas.PROGRAM,
    }
    return assemble(Page(_TITLE, data, _SCRIPTS, asks=True))


def _device(entry: JsonObject) -> dict[str, object]:
    """A device with the figures that the page can change, by the keys of a device file."""
    # Only devices in the catalogue can be the base of a modified device.
    spec = find_device(entry["name"]) if in_catalogue(entry["name"]) else None
    figures = {
        "hbm_bandwidth_gbps": spec.bandwidth / 1e9 if spec else 0.0,
        "boost_mhz": spec.clock_hz / 1e6 if spec else 0.0,
        "power_w": spec.power_w if spec else 0.0,
    }
    return {name: entry[name] for name in ("name", "platform", "learned")} | {
        name: short(value) for name, value in figures.items() if value
    }


def _presets() -> dict[str, dict[str, str]]:
    """Named models that a zoo workload can represent, with the workload and its settings."""
    found = {}
    for name in preset_names():
        preset = find_preset(name)
        sizes = preset.settings if preset else {}
        for family, fixed in _OF_MODELS.items():
            if set(sizes) == _SIZES[family]:
                settings = {**sizes, **fixed}
                text = ",".join(f"{key}={value}" for key, value in settings.items())
                found[name] = {"workload": family, "settings": text}
    return found
