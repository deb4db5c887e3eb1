"""Device files: YAML with a unit in every key and a source for every figure; see docs/devices.md.

A file is read into a :class:`Sheet` in the file's units; ``spec_of_sheet.py`` converts it to a
:class:`DeviceSpec`. Rates are decimal (``gbps`` is 1e9 bytes/s, ``tflops`` 1e12 FLOP/s), capacities
are binary as vendors print them (1 MB is 2^20 bytes, 1 GB is 2^30).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

from ...common.errors import DeviceError, meant
from ...common.files import check_yaml, yaml_loader
from ...common.types import JsonObject
from .rules import IDLE_W, MATRIX_TYPES, VECTOR_TYPES

#: SI units by the part of a key that names them. Rates are decimal and capacities binary, as in
#: data sheets: an "80 GB" H100 has 80 · 2^30 bytes, and 3.35 TB/s are 3.35e12 bytes/s.
_UNITS = {
    "mhz": 1e6, "gbps": 1e9, "kb": 2.0**10, "mb": 2.0**20, "gb": 2.0**30, "us": 1e-6, "w": 1.0
}  # fmt: skip
#: Upper limits by the unit in the key, at least ten times those of a whole wafer (Cerebras WSE-3,
#: data sheet 2024: 9e5 cores, 21 PB/s, 125 PFLOP/s, 23 kW): above them, a unit was mistaken.
_MOST = {
    "mhz": 1e5, "gbps": 1e9, "kb": 1e9, "mb": 1e9, "gb": 1e7, "us": 1e6, "w": 1e6, "tflops": 1e8
}  # fmt: skip
_MOST_COUNT = 1e8
#: Lowest clock: below it, GHz was given. Other figures have no lower limit that no device reaches;
#: those of a design are compared with its base's.
_LEAST_MHZ = 10.0
#: Largest factor by which a rate of a design may be below its base's. Units differ by a thousand
#: (TB/s for GB/s), and no design is that slow; there is no upper limit, for idealised designs.
_SLIP = 300.0
_FIGURES = """
    core_count cores_per_die lanes_per_core boost_mhz shared_kb_per_core l2_mb l2_bandwidth_gbps
    hbm_bandwidth_gbps memory_gb power_w link_gbps pair_link_gbps inter_node_gbps pcie_gbps
    devices_per_node launch_floor_us launch_gap_us dispatch_us threads_per_core threads_per_wave
    threads_per_block shared_kb_per_block shared_kb_per_block_optin registers_per_core
    registers_per_block array_rows array_columns arrays_per_core efficient_cores
    efficient_lanes_per_core efficient_mhz
"""
#: Figures that are counts: those without a unit.
_WHOLE = {key for key in _FIGURES.split() if not _UNITS.keys() & key.split("_")}


def _by_unit(key: str, values: dict[str, float], count: float) -> float:
    """Return the value of the unit in a key, or ``count`` if it has none."""
    return next((values[word] for word in key.split("_") if word in values), count)


#: Figures by key, each with its unit in SI.
NUMBERS: dict[str, float] = {key: _by_unit(key, _UNITS, 1.0) for key in _FIGURES.split()}
#: Figures by dtype: the types that may be listed.
RATES: dict[str, tuple[str, ...]] = {"peak_tflops": MATRIX_TYPES, "vector_tflops": VECTOR_TYPES}
#: Rates of a design that are compared with its base's, excluding links, which it may not have.
_COMPARED = {*RATES, "hbm_bandwidth_gbps", "l2_bandwidth_gbps", "power_w"}
#: Keys to whose product the rate of all cores is proportional.
_SCALE = ("core_count", "boost_mhz")
#: FLOP/s in one unit of a rate.
TERA = 1e12
TEXTS = ("name", "base", "platform", "vendor", "architecture", "compiler_target", "notes")
PLATFORMS = ("cpu", "gpu", "tpu")
#: May be zero: a device need not lose time between kernels.
_MAY_BE_ZERO = {"launch_gap_us", "dispatch_us"}
#: Quantities that a file may define by a linear model of its figures, and the constant term.
MODELLED = ("area_mm2", "price")
FIXED = "fixed"
_KEYS = (*TEXTS, "aliases", *NUMBERS, *RATES, "models", "sources")

#: Most designs per file: a slip in ``steps`` must not exhaust memory (engineering choice).
MOST_DESIGNS = 10_000

_Lines = dict[tuple[str, ...], int]
_Wrong = Callable[..., DeviceError]


@dataclass(frozen=True)
class Sheet:
    """A device file as written.

    Attributes:
        where: Path of the file.
        texts: Its texts by key: ``name``, ``platform``, ``base`` …
        aliases: Other names of the device.
        values: Figures in the file's units, rates by dotted key (``peak_tflops.bf16``).
        sources: Source of each figure, by the keys of ``values``.
        unsourced: Figures for which the file names no source.
        models: Coefficients by figure for each of :data:`MODELLED` in the file.
    """

    where: str
    texts: dict[str, str]
    aliases: tuple[str, ...] = ()
    values: dict[str, float] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    unsourced: tuple[str, ...] = ()
    models: dict[str, dict[str, float]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Canonical name of the device."""
        return self.texts["name"]


def read_sheet(path: Path) -> Sheet:
    """Read a device file.

    Raises:
        DeviceError: There is no such file, it is not YAML, a key is unknown or repeated, a value
            has the wrong type, or a source refers to a key without a figure.
    """
    data, lines = _load(path)
    return _sheet(data, lines, path)


def sheet_of(data: Mapping[str, object], path: Path) -> Sheet:
    """Make a sheet from the content of a device file.

    Args:
        data: Content of the file.
        path: Its path, for messages.

    Raises:
        DeviceError: As :func:`read_sheet`.
    """
    return _sheet(dict(data), {}, path)


def read_designs(path: Path) -> list[tuple[dict[str, float], Sheet]]:
    """Read a device file in which figures may be ranges: one sheet per combination.

    A range is a list of numbers, or ``{from: 2000, to: 5000, steps: 4}`` with both ends included
    and equal steps; with ``scale: log`` equal ratios. Counts are rounded.

    Returns:
        Values of the ranges by key (dotted for rates) and the sheet; just one without ranges.

    Raises:
        DeviceError: As :func:`read_sheet`, or a range is malformed.
    """
    data, lines = _load(path)
    ranges: dict[tuple[str, ...], list[float]] = {}
    for key, value in data.items():
        if key in NUMBERS and isinstance(value, list | dict):
            ranges[key,] = _range(value, (key,), lines, path)
        for inner, own in value.items() if key in RATES and isinstance(value, dict) else ():
            if isinstance(own, list | dict):
                ranges[key, inner] = _range(own, (key, inner), lines, path)
    count = math.prod(map(len, ranges.values()))
    if count > MOST_DESIGNS:
        what = f"the ranges make {count} designs, more than {MOST_DESIGNS}"
        raise DeviceError(what, where=str(path), hint="take fewer steps")
    designs = []
    for values in product(*ranges.values()):
        own_data: JsonObject = dict(data)
        for keys, figure in zip(ranges, values, strict=True):
            if len(keys) == 1:
                own_data[keys[0]] = figure
            else:
                own_data[keys[0]] = {**own_data[keys[0]], keys[1]: figure}
        settings = {".".join(k): v for k, v in zip(ranges, values, strict=True)}
        if settings:
            listed = ",".join(f"{key}={value:g}" for key, value in settings.items())
            own_data["name"] = f"{own_data.get('name')}({listed})"
        designs.append((settings, _sheet(own_data, lines, path)))
    return designs


def _range(value: Any, keys: tuple[str, ...], lines: _Lines, path: Path) -> list[float]:
    name = ".".join(keys)

    def wrong(what: str, *_: str, hint: str = "") -> DeviceError:
        return DeviceError(
            what, where=f"{path}:{lines.get(keys, lines.get(keys[:1], 1))}", hint=hint
        )

    if isinstance(value, list):
        found = [_number(v, keys, wrong) for v in value]
    else:
        unknown = set(value) - {"from", "to", "steps", "scale"}
        steps = value.get("steps")
        scale = value.get("scale", "linear")
        whole = isinstance(steps, int) and not isinstance(steps, bool) and steps > 1
        if unknown or not whole or steps > MOST_DESIGNS or scale not in ("linear", "log"):
            raise wrong(
                f"{name!r} is not a range",
                hint="write {from: 2000, to: 5000, steps: 4}, with scale: log for equal ratios; or "
                "a list of numbers",
            )
        low, high = (_number(value.get(end), keys, wrong) for end in ("from", "to"))
        shares = [i / (steps - 1) for i in range(steps)]
        if scale == "log":
            found = [low * (high / low) ** share for share in shares]
        else:
            found = [low + (high - low) * share for share in shares]
        if name in _WHOLE:
            found = [float(round(v)) for v in found]
    if not found or len(set(found)) < len(found):
        raise wrong(f"the range of {name!r} is empty or has a value twice")
    return found


def _sheet(data: dict[str, object], lines: _Lines, path: Path) -> Sheet:

    def wrong(what: str, *keys: str, hint: str = "") -> DeviceError:
        line = next((lines[k] for k in (keys, keys[:1]) if k in lines), None)
        return DeviceError(what, where=f"{path}:{line}" if line else str(path), hint=hint)

    # Unknown keys are rejected: a misspelt figure would silently become a default.
    for key in data:
        if key not in _KEYS:
            raise wrong(f"unknown key {key!r}", str(key), hint=meant(str(key), _KEYS))
    # In the order of TEXTS, so that errors come in a fixed order.
    texts = {key: _text(data[key], key, wrong) for key in TEXTS if key in data}
    if "name" not in texts:
        raise wrong("key 'name' is missing")
    if texts.get("platform", "gpu") not in PLATFORMS:
        raise wrong(f"platform must be one of {', '.join(PLATFORMS)}", "platform")
    values = {key: _number(data[key], (key,), wrong) for key in NUMBERS if key in data}
    for table in RATES:
        values |= dict(_rates(data[table], table, wrong) if table in data else ())
    aliases = tuple(_texts(data.get("aliases", []), "aliases", wrong))
    sources = _sources(data.get("sources", {}), values, wrong)
    unsourced = tuple(key for key in values if key not in sources)
    sources |= dict.fromkeys(unsourced, path.name)
    models = dict(_models(data.get("models", {}), wrong))
    return Sheet(str(path), texts, aliases, values, sources, unsourced, models)


def _models(value: object, wrong: _Wrong) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield the linear models in a file, each of which may use those before it."""
    if not isinstance(value, dict):
        raise wrong("'models' must map area_mm2 or price to coefficients", "models")
    terms = [FIXED, *NUMBERS, *(f"{table}.{d}" for table, dtypes in RATES.items() for d in dtypes)]
    for name in MODELLED:
        if name in value:
            own = value[name]
            if not isinstance(own, dict) or not own:
                raise wrong(f"{name!r} must map figures to coefficients", "models", name)
            for key in own:
                if key not in terms:
                    hint = meant(str(key), terms)
                    raise wrong(f"unknown figure {key!r} in {name!r}", "models", name, hint=hint)
            yield name, {k: _number(v, ("models", name, k), wrong) for k, v in own.items()}
        terms.append(name)
    for name in value:
        if name not in MODELLED:
            raise wrong(f"unknown model {name!r}", "models", hint=meant(str(name), MODELLED))


def overlay(base: Sheet, own: Sheet) -> Sheet:
    """Complete a sheet from its base; aliases are not inherited.

    If it changes cores, clock or lanes, rates that it does not list are the base's, scaled
    accordingly: matrix FLOP/s by cores × clock, vector FLOP/s by lanes × cores × clock. If it gives
    no power, the base's power scales with the f32 rate, or with the rate of 16-bit products if that
    grows more, since the base's own limit would not apply.

    Raises:
        DeviceError: A rate is so far below the base's that its unit must be wrong.
    """
    for key, value in own.values.items():
        known = base.values.get(key, 0.0)
        # Inference chips have almost no f64 rate.
        compared = key.partition(".")[0] in _COMPARED and not key.endswith(".f64")
        if compared and value * _SLIP < known:
            what = (
                f"{key!r} is {value:g}, {known / value:,.0f} times below {known:g} of {base.name}"
            )
            raise DeviceError(what, where=own.where, hint="see its unit")
    values, sources = dict(base.values), {k: f"{s} ({base.name})" for k, s in base.sources.items()}
    for table in RATES:
        # The matrix unit's rate does not depend on the vector lanes.
        keys = (*_SCALE, "lanes_per_core") if table == "vector_tflops" else _SCALE
        changed = [k for k in keys if k in own.values and k in base.values]
        factor = math.prod(own.values[k] / base.values[k] for k in changed)
        for key in values:
            if key.startswith(table) and factor != 1.0:
                values[key] *= factor
                sources[key] = f"estimate: {factor:.3g} × {base.name}, as {' × '.join(changed)}"
    values |= own.values
    sources |= own.sources
    # A bigger chip with its base's power limit would be power-bound at once (`power_rate` in
    # operators/machine.py); idle power does not scale with the arithmetic.
    if "power_w" in values and "power_w" not in own.values:
        vector, matrix = (rate(values) / rate(base.values) for rate in (_f32_rate, _product_rate))
        factor, named = max((vector, "f32"), (matrix, "16-bit products"))
        busy = values["power_w"] - IDLE_W
        if factor != 1.0 and busy > 0:
            values["power_w"] = IDLE_W + factor * busy
            sources["power_w"] = (
                f"estimate: {factor:.3g} × {base.name} above {IDLE_W:g} W, as the rate of {named}"
            )
    return replace(own, texts={**base.texts, **own.texts}, values=values, sources=sources)


def _f32_rate(values: dict[str, float]) -> float:
    """Return the FP32 rate by the first available figure; units differ, so for ratios only."""
    lanes = math.prod(values.get(key, 1.0) for key in (*_SCALE, "lanes_per_core"))
    return values.get("peak_tflops.f32", values.get("vector_tflops.f32", lanes))


def _product_rate(values: dict[str, float]) -> float:
    """Return the rate of products of 16 bits, or else the FP32 rate; for ratios only."""
    return values.get("peak_tflops.bf16", values.get("peak_tflops.f16", _f32_rate(values)))


def _load(path: Path) -> tuple[dict[str, object], _Lines]:
    """Load a YAML file's data and the line of every key."""
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        check_yaml(text)
        loader = yaml_loader()(text)
        node = loader.get_single_node()
        lines = dict(_key_lines(node, path))
        data = loader.construct_document(node) if node else None
    except OSError as error:
        what = "no such device file" if isinstance(error, FileNotFoundError) else str(error)
        raise DeviceError(what, where=str(path)) from None
    except (yaml.YAMLError, ValueError) as error:
        what = str(error) if isinstance(error, ValueError) else f"not YAML: {error}"
        raise DeviceError(what, where=str(path)) from None
    if not isinstance(data, dict):
        raise DeviceError("a device file is a mapping of keys to figures", where=str(path))
    return data, lines


def _key_lines(
    node: Any, path: Path, above: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield the keys of a YAML tree with their line numbers, rejecting repeated keys."""
    # PyYAML silently keeps the last of repeated keys; the node tree has both, with lines.
    if getattr(node, "id", "") != "mapping" or len(above) > 1:
        return  # keys are nested at most two levels deep
    seen: set[str] = set()
    for key, value in node.value:
        name, line = str(key.value), key.start_mark.line + 1
        if name in seen:
            raise DeviceError(f"key {name!r} is repeated", where=f"{path}:{line}")
        seen.add(name)
        yield (*above, name), line
        yield from _key_lines(value, path, (*above, name))


def _text(value: object, key: str, wrong: _Wrong) -> str:
    if not isinstance(value, str) or not value.strip():
        raise wrong(f"{key!r} must be a text, not {value!r}", key)
    return value.strip()


def _texts(value: object, key: str, wrong: _Wrong) -> list[str]:
    if not isinstance(value, list):
        raise wrong(f"{key!r} must be a list of texts, not {value!r}", key)
    return [_text(item, key, wrong) for item in value]


def _number(value: object, keys: tuple[str, ...], wrong: _Wrong) -> float:
    name = ".".join(keys)
    if isinstance(value, list | dict):
        raise wrong(
            f"{name!r} is a range of designs, where one device is needed",
            *keys,
            hint="opcast predict and export table take such a file; or give one number",
        )
    if isinstance(value, str):
        # YAML 1.1 reads 5e3, which has neither point nor sign, as a string.
        with contextlib.suppress(ValueError):
            value = float(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise wrong(f"{name!r} must be a number, not {value!r}", *keys)
    if not math.isfinite(value) or value < 0 or (value == 0 and name not in _MAY_BE_ZERO):
        raise wrong(f"{name!r} must be above zero, not {value!r}", *keys)
    if value > (most := _by_unit(keys[0], _MOST, _MOST_COUNT)):
        raise wrong(f"{name!r} must be at most {most:g}, not {value!r}", *keys, hint="see its unit")
    if name in NUMBERS and name.endswith("mhz") and value < _LEAST_MHZ:
        what = f"{name!r} must be at least {_LEAST_MHZ:g}, not {value!r}"
        raise wrong(what, *keys, hint="see its unit")
    if name in _WHOLE and value != int(value):
        raise wrong(f"{name!r} must be a whole number, not {value!r}", *keys)
    return float(value)


def _rates(value: object, table: str, wrong: _Wrong) -> Iterator[tuple[str, float]]:
    if not isinstance(value, dict):
        raise wrong(f"{table!r} must map dtypes to numbers, not {value!r}", table)
    for dtype, rate in value.items():
        if dtype not in RATES[table]:
            what = f"unknown dtype {dtype!r} in {table!r}"
            raise wrong(what, table, str(dtype), hint=meant(str(dtype), RATES[table]))
        yield f"{table}.{dtype}", _number(rate, (table, dtype), wrong)


def _sources(value: object, values: dict[str, float], wrong: _Wrong) -> dict[str, str]:
    """Return the source of each figure; a dotted key overrides its whole table."""
    if not isinstance(value, dict):
        raise wrong("'sources' must map a source to the keys that it gives", "sources")
    tables: dict[str, str] = {}
    # One source may give a whole table (`peak_tflops`), another a single entry.
    own: dict[str, str] = {}
    for source, keys in value.items():
        for key in _texts(keys, "sources", wrong):
            if key not in values and key not in RATES:
                raise wrong(f"source of {key!r}, which has no figure", "sources", str(source))
            target = tables if key in RATES else own
            if key in target:
                raise wrong(f"{key!r} has two sources", "sources", str(source))
            target[key] = str(source)
    whole = {k: tables[k.split(".")[0]] for k in values if k.split(".")[0] in tables}
    return whole | own
