"""State of a running server: models, devices, cache, batches and processes."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

from .. import __version__
from ..common.errors import DeviceError, ModelError
from ..common.files import is_description
from ..common.types import JsonObject
from ..features.devices.catalogue import device_names, find_device
from ..features.devices.device import DeviceSpec
from ..models.core.store import predicts_operators, read_manifest
from ..predict.devices import resolve_device
from ..predict.locate import find_model, is_untrained, model_hash
from ..predict.program.predictor import Predictor, load
from .errors import RequestError
from .kernels import KernelService
from .metrics import Metrics
from .sandbox import Sandbox
from .settings import ServerSettings

#: Maximum number of cached device names; aliases have an unlimited number of spellings. Engineering
#: estimate.
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
        # Read only when /metrics is requested.
        cache, sandbox = self.kernels.cache, self.sandbox
        self.metrics.watch("opcast_cache_entries", "Kernels in the cache.", lambda: len(cache))
        count = self.metrics.count
        count("opcast_cache_hits", "Kernels answered from the cache.", lambda: cache.hits)
        count("opcast_cache_misses", "Kernels not in the cache.", lambda: cache.misses)
        programs = sandbox.cache
        count(
            "opcast_program_hits",
            "Programs and plans answered from the cache.",
            lambda: programs.hits,
        )
        count(
            "opcast_program_misses", "Programs and plans not in the cache.", lambda: programs.misses
        )
        count("opcast_crashes", "Programs whose process died.", lambda: sandbox.crashes)
        watch = self.metrics.watch
        watch("opcast_workers", "Programs and plans at a time.", lambda: settings.workers)
        watch("opcast_programs_running", "Programs and plans running.", lambda: sandbox.running)
        watch("opcast_programs_waiting", "Programs and plans waiting.", lambda: sandbox.waiting)

    def load(self) -> None:
        """Load the models.

        Raises:
            ModelError: A model is missing or damaged.
        """
        for name in self.settings.models:
            predictor = self.predictors[name] = load(name)
            self._learned |= predictor.operators.devices | predictor.devices

    def close(self) -> None:
        """Stop processes and threads."""
        self.kernels.close()
        self.sandbox.close()

    def model(self, name: str | None) -> str:
        """Resolve the model of a request; the first one by default.

        Raises:
            ModelError: The model is not served.
        """
        chosen = name or self.settings.models[0]
        if chosen not in self.predictors:
            served = ", ".join(self.predictors)
            raise ModelError(f"no model {chosen!r} is served", hint=f"served: {served}")
        return chosen

    def kept(self, page: bytes) -> str:
        """Cache a page; return the digest by which :meth:`report` finds it."""
        digest = hashlib.sha256(page).hexdigest()
        self.sandbox.cache.put(digest, page, len(page))
        return digest

    def report(self, digest: str) -> bytes:
        """Look up a page in the cache.

        Raises:
            RequestError: The page is not in the cache.
        """
        (page,) = self.sandbox.cache.get_many([digest])
        if not isinstance(page, bytes):
            raise RequestError(
                404, "no such page in the cache", where=digest[:64], hint="request it again"
            )
        return page

    def device(self, model: str, name: str) -> DeviceSpec:
        """Find a device by name, but neither a file nor the server's own device.

        Raises:
            DeviceError: There is no such device.
        """
        known = self._devices.get((model, name))
        if known is not None:
            return known
        # ``local`` would be the server's machine, and a file would be a path on it.
        if name == "local" or is_description(name):
            raise DeviceError(f"{name!r} is not the name of a device", hint="see GET /v1/devices")
        predictor = self.predictors[model]
        spec = resolve_device(name, predictor.devices)
        # The operator model looks up devices by name.
        predictor.operators.devices[spec.name] = spec
        if len(self._devices) >= _REMEMBERED:
            self._devices.clear()
        self._devices[model, name] = spec
        return spec

    def check_device(self, model: str, name: str) -> str:
        """Return the canonical name of a device; see :meth:`device`."""
        return self.device(model, name).name

    def operator_model(self, name: str | None) -> str:
        """Resolve the operator model of a simulation: a served model, or ``roofline``."""
        return "roofline" if name == "roofline" else self.model(name)

    def program_model(self, name: str | None) -> str:
        """Resolve the model of a program.

        Raises:
            RequestError: The model predicts only library operators.
        """
        chosen = self.model(name)
        if self.models[chosen]["predicts"] == "operators":
            raise RequestError(
                422,
                f"model {chosen!r} predicts library operators, not programs",
                where="model",
                hint="serve another: opcast serve --model default",
            )
        return chosen

    @property
    def models(self) -> Mapping[str, JsonObject]:
        """Entries of ``GET /v1/models`` by name."""
        entries = {}
        for place, (name, predictor) in enumerate(self.predictors.items()):
            trained = not is_untrained(name)
            operators = trained and predicts_operators(read_manifest(find_model(name)))
            families = predictor.operators.families.values()
            learned = {d for f in families for d in f.devices} if operators else predictor.devices
            entries[name] = {
                "name": name,
                "predicts": "operators" if operators else "programs",
                "default": place == 0,
                "devices": sorted(learned),
                "families": sorted(predictor.operators.families) if trained else [],
                # Lets clients check whether cached answers are from the same model.
                "digest": model_hash(name) if trained else __version__,
            }
        return entries

    def devices(self) -> list[JsonObject]:
        """List the entries of ``GET /v1/devices``: devices of the models and the catalogue."""
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
            # The catalogue takes precedence because it has aliases and vendors.
            for name, spec in sorted((self._learned | specs).items())
        ]
