"""State of a running server: models, devices, cache, batches and processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from ..common.errors import DeviceError, ModelError
from ..common.types import JsonObject
from ..features.devices.catalogue import device_names, find_device
from ..features.devices.device import DeviceSpec
from ..models.core.store import predicts_operators, read_manifest
from ..predict.devices import resolve_device
from ..predict.locate import find_model, model_hash
from ..predict.program.predictor import Predictor, load
from .errors import RequestError
from .kernels import KernelService
from .metrics import Metrics
from .sandbox import Sandbox
from .settings import ServerSettings

# Suffixes by which ``resolve_device`` takes a name for a path.
_FILES = (".json", ".yaml", ".yml")
#: Device names whose descriptions are kept. Aliases have any number of spellings, so the memory is
#: bounded. Engineering estimate.
_REMEMBERED = 4096


class Service:
    """State and look-ups behind the endpoints.

    Args:
        settings: Settings of the server.
    """

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        self.metrics = Metrics()
        self.predictors: dict[str, Predictor] = {}
        self.sandbox = Sandbox(settings)
        self.kernels = KernelService(settings, self.predictors, self.sandbox, self.metrics)
        self._devices: dict[tuple[str, str], DeviceSpec] = {}
        self._learned: dict[str, DeviceSpec] = {}
        # Read when /metrics is requested, so that counting costs nothing in between.
        cache, sandbox = self.kernels.cache, self.sandbox
        self.metrics.watch("opcast_cache_entries", "Kernels remembered.", lambda: len(cache))
        count = self.metrics.count
        count("opcast_cache_hits", "Kernels answered from the cache.", lambda: cache.hits)
        count("opcast_cache_misses", "Kernels not in the cache.", lambda: cache.misses)
        programs = sandbox.cache
        count("opcast_program_hits", "Programs and plans kept.", lambda: programs.hits)
        count("opcast_program_misses", "Programs and plans not kept.", lambda: programs.misses)
        count("opcast_crashes", "Programs whose process died.", lambda: sandbox.crashes)
        watch = self.metrics.watch
        watch("opcast_workers", "Programs and plans at a time.", lambda: settings.workers)
        watch("opcast_programs_running", "Programs and plans at work.", lambda: sandbox.running)
        watch("opcast_programs_waiting", "Those that wait.", lambda: sandbox.waiting)

    def load(self) -> None:
        """Load the models.

        Raises:
            ModelError: One is missing or damaged.
        """
        for name in self.settings.models:
            predictor = self.predictors[name] = load(name)
            self._learned |= predictor.operators.devices | predictor.devices

    def close(self) -> None:
        """End processes and threads."""
        self.kernels.close()
        self.sandbox.close()

    def model(self, name: str | None) -> str:
        """Find the model that a request names, or the first one.

        Raises:
            ModelError: The model is not served.
        """
        chosen = name or self.settings.models[0]
        if chosen not in self.predictors:
            served = ", ".join(self.predictors)
            raise ModelError(f"no model {chosen!r} is served", hint=f"served: {served}")
        return chosen

    def kept(self, page: bytes) -> str:
        """Remember a page; returns the digest by which :meth:`report` finds it."""
        digest = hashlib.sha256(page).hexdigest()
        self.sandbox.cache.put(digest, page, len(page))
        return digest

    def report(self, digest: str) -> bytes:
        """Find a page that was made before.

        Raises:
            RequestError: There is none, or it made room for others.
        """
        (page,) = self.sandbox.cache.get_many([digest])
        if not isinstance(page, bytes):
            raise RequestError(
                404, "no such page is kept", where=digest[:64], hint="ask for it again"
            )
        return page

    def device(self, model: str, name: str) -> DeviceSpec:
        """Find a device by name; files and the server's own device are excluded.

        Raises:
            DeviceError: There is no such device.
        """
        known = self._devices.get((model, name))
        if known is not None:
            return known
        # ``local`` is the server's machine, about which a client knows nothing; files would be its
        # paths.
        if name == "local" or name.lower().endswith(_FILES):
            raise DeviceError(f"{name!r} is not the name of a device", hint="see GET /v1/devices")
        predictor = self.predictors[model]
        spec = resolve_device(name, predictor.devices)
        # Rows of operators name their device, so the operator model needs its description.
        predictor.operators.devices[spec.name] = spec
        if len(self._devices) >= _REMEMBERED:
            self._devices.clear()
        self._devices[model, name] = spec
        return spec

    def check_device(self, model: str, name: str) -> str:
        """Return the canonical name of a device; see :meth:`device`."""
        return self.device(model, name).name

    def operator_model(self, name: str | None) -> str:
        """Find the operator model for a simulation: a served model's, or ``roofline`` for none."""
        return "roofline" if name == "roofline" else self.model(name)

    def program_model(self, name: str | None) -> str:
        """Find the model for a program.

        Raises:
            RequestError: The model is one of library operators.
        """
        chosen = self.model(name)
        if self.models[chosen]["predicts"] == "operators":
            raise RequestError(
                422,
                f"model {chosen!r} is one of library operators, which predicts no programs",
                where="model",
                hint="serve another: opcast serve --model default",
            )
        return chosen

    @property
    def models(self) -> Mapping[str, JsonObject]:
        """Entries of ``GET /v1/models`` by name."""
        entries = {}
        for place, (name, predictor) in enumerate(self.predictors.items()):
            operators = predicts_operators(read_manifest(find_model(name)))
            families = predictor.operators.families.values()
            learned = {d for f in families for d in f.devices} if operators else predictor.devices
            entries[name] = {
                "name": name,
                "predicts": "operators" if operators else "programs",
                "default": place == 0,
                "devices": sorted(learned),
                "families": sorted(predictor.operators.families),
                # Lets a client check whether answers that it kept came from the same model.
                "digest": model_hash(name),
            }
        return entries

    def devices(self) -> list[JsonObject]:
        """List the entries of ``GET /v1/devices``: devices of the models and of the catalogue."""
        specs = {name: find_device(name) for name in device_names()}
        return [
            {
                "name": name,
                "platform": spec.platform,
                "vendor": spec.vendor,
                "architecture": spec.architecture,
                "aliases": list(spec.aliases),
                "memory_bytes": spec.memory_bytes,
                "learned": name in self._learned,
            }
            # The catalogue's description wins for display: it has aliases and the vendor.
            for name, spec in sorted((self._learned | specs).items())
        ]
