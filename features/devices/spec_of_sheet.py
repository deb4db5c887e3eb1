"""Convert a device file to a description, with defaults filled in and all figures in SI units."""

from __future__ import annotations

from pathlib import Path

from ...common.errors import DeviceError
from .device import DeviceSpec, MemoryLevel
from .rules import (
    COMPILER_KEYS,
    EFFICIENT,
    LANES,
    Values,
    capability_of,
    fill,
    generations,
    lanes_tflops,
    maker_of,
    matrix_rates,
    named_architecture,
    rules_of,
    vector_rates,
)
from .rules import SOURCE as CAPABILITY_SOURCE
from .sheet import FIXED, NUMBERS, RATES, TERA, Sheet

#: Relative tolerance between the vector rate and 2 × lanes × cores × clock: vendors round, and
#: quote one of several boost clocks. Engineering estimate.
_RATE_TOLERANCE = 0.1
#: Figures required for a roofline.
_REQUIRED = ("hbm_bandwidth_gbps", "memory_gb")
#: Figures that few devices have, by key of the file, and their keys in ``DeviceSpec.extra``.
_EXTRA = {
    "pair_link_gbps": "pair_link_bandwidth",
    "cores_per_die": "cores_per_die",
    "threads_per_wave": "threads_per_wave",
    **{key: key for key in EFFICIENT[:2]},
    EFFICIENT[2]: "efficient_hz",
}


def device_of_sheet(sheet: Sheet) -> DeviceSpec:
    """Make a description: fill in defaults, check for contradictions, convert to SI.

    Raises:
        DeviceError: Platform, memory or every rate is missing, or the vector rate contradicts the
            lanes' rate.
    """
    _require(sheet)
    texts = sheet.texts
    platform = texts["platform"]
    architecture = named_architecture(texts.get("architecture", ""))
    vendor, rule = maker_of(texts.get("vendor", ""), architecture, platform)
    values, why = fill(sheet.values, rules_of(architecture, platform))
    # After filling: a contradiction between two given figures must not depend on which one is a
    # default.
    _check_lanes(values, sheet)
    _check_dies(values, sheet)
    _check_efficient(values, sheet)
    _fill_capability(texts.get("compiler_target", ""), values, why)
    if rule:
        why["vendor"] = rule
    si = {key: values[key] * scale for key, scale in NUMBERS.items() if key in values}
    provenance = {**sheet.sources, **{key: f"default: {text}" for key, text in why.items()}}
    if platform == "cpu" and {"l2_mb", "shared_kb_per_core"} <= set(provenance):
        provenance["l2_mb"] += "; with the cores' own"
    # Units are converted once, here: a DeviceSpec is all SI.
    matrix, vector = ({d: r * TERA for d, r in rates.items()} for rates in _rates(values))
    extra = {"notes": texts["notes"]} if "notes" in texts else {}
    named = {key: si[own] for own, key in _EXTRA.items() if own in si}
    return DeviceSpec(
        name=sheet.name,
        platform=platform,
        peak_flops=matrix,
        vector_flops=vector,
        levels=_levels(si, platform),
        floor=si["launch_floor_us"],
        launch_gap=si["launch_gap_us"],
        dispatch=si["dispatch_us"],
        core_count=int(si["core_count"]),
        clock_hz=si.get("boost_mhz", 0.0),
        memory_bytes=si["memory_gb"],
        source=f"device file {Path(sheet.where).name}",
        extra={**extra, **named, **_modelled(sheet, values)},
        vendor=vendor,
        architecture=architecture,
        lanes_per_core=int(si.get("lanes_per_core", 0)),
        power_w=si.get("power_w", 0.0),
        link_bandwidth=si.get("link_gbps", 0.0),
        inter_node_bandwidth=si.get("inter_node_gbps", 0.0),
        host_bandwidth=si.get("pcie_gbps", 0.0),
        devices_per_node=int(si["devices_per_node"]),
        shared_bytes_per_core=si.get("shared_kb_per_core", 0.0),
        array_rows=int(si.get("array_rows", 0)),
        array_columns=int(si.get("array_columns", 0)),
        arrays_per_core=int(si.get("arrays_per_core", 0)),
        compiler=_compiler(texts.get("compiler_target", ""), si),
        aliases=sheet.aliases,
        provenance=provenance,
        defaulted=tuple(why),
    )


def _modelled(sheet: Sheet, values: Values) -> Values:
    """Evaluate the file's linear models on its figures, in order."""
    found: Values = {}
    for name, model in sheet.models.items():
        terms = {FIXED: 1.0, **values, **found}
        missing = next((key for key in model if key not in terms), None)
        if missing is not None:
            raise DeviceError(f"{name!r} needs {missing!r}, which is not known", where=sheet.where)
        found[name] = sum(factor * terms[key] for key, factor in model.items())
    return found


def _fill_capability(target: str, values: Values, why: dict[str, str]) -> None:
    """Fill in a core's resources from the compute capability that its compiler targets."""
    rules = generations().nearest.get(target, target)
    table = generations().capabilities.get(capability_of(rules) or 0, {})
    for key, value in table.items():
        if key not in values:
            values[key], why[key] = value, f"of {rules}: {CAPABILITY_SOURCE}"


def _compiler(target: str, si: Values) -> dict[str, float | str]:
    """Return figures that only a compiler needs; empty if the file names no target."""
    if not target:
        return {}
    return {"target": target, **{key: si[key] for key in COMPILER_KEYS if key in si}}


def _rates(values: Values) -> tuple[Values, Values]:
    """Return the rates of matrix and vector unit by HLO type, in units of 1e12 FLOP/s."""
    matrix, vector = (
        {key.split(".")[1]: rate for key, rate in values.items() if key.startswith(f"{table}.")}
        for table in RATES
    )
    return matrix_rates({**matrix, "s32": vector["s32"]}), vector_rates(vector)


def _levels(si: Values, platform: str) -> tuple[MemoryLevel, ...]:
    main = MemoryLevel(si["memory_gb"], si["hbm_bandwidth_gbps"])
    # Without a cache the working set always goes to main memory. This includes TPUs, whose VMEM is
    # filled by the compiler and is not a cache.
    if "l2_mb" not in si:
        return (main,)
    # A CPU's last cache holds what the cores' caches evict, so its lines differ from theirs.
    own = si["core_count"] * si.get("shared_kb_per_core", 0.0) if platform == "cpu" else 0.0
    return (MemoryLevel(si["l2_mb"] + own, si["l2_bandwidth_gbps"]), main)


def _require(sheet: Sheet) -> None:
    if "platform" not in sheet.texts:
        raise DeviceError("key 'platform' is missing", where=sheet.where, hint="or give a base")
    for key in _REQUIRED:
        if key not in sheet.values:
            raise DeviceError(f"key {key!r} is missing", where=sheet.where, hint="or give a base")
    lanes = {"lanes_per_core", "core_count", "boost_mhz"} <= set(sheet.values)
    if not (lanes or {"vector_tflops.f32", "peak_tflops.f32"} & set(sheet.values)):
        raise DeviceError(
            "no rate of f32",
            where=sheet.where,
            hint="give vector_tflops: {f32: …}, or lanes_per_core, core_count and boost_mhz",
        )


def _check_lanes(values: Values, sheet: Sheet) -> None:
    found = lanes_tflops(values)
    if found is None or "core_count" not in sheet.values:
        return
    expected, rule = found
    given = values["vector_tflops.f32"]
    if abs(given / expected - 1) > _RATE_TOLERANCE:
        raise DeviceError(
            f"vector_tflops.f32 is {given:.4g}, but {rule} is {expected:.4g}",
            where=sheet.where,
            hint="leave out vector_tflops, or lanes_per_core, or correct them",
        )


def _check_efficient(values: Values, sheet: Sheet) -> None:
    """Reject efficient cores with missing figures, or more of them than there are cores."""
    given = [key for key in EFFICIENT if key in values]
    missing = [key for key in (*EFFICIENT, *LANES) if key not in values]
    if given and missing:
        raise DeviceError(
            f"{given[0]} is given, but not {missing[0]}",
            where=sheet.where,
            hint="two kinds of cores need the lanes, number and clock of both",
        )
    if given and values["efficient_cores"] > values["core_count"]:
        raise DeviceError(
            f"efficient_cores {values['efficient_cores']:g} is more than core_count "
            f"{values['core_count']:g}, which counts all cores",
            where=sheet.where,
        )


def _check_dies(values: Values, sheet: Sheet) -> None:
    if "cores_per_die" in values and values["core_count"] % values["cores_per_die"]:
        raise DeviceError(
            f"core_count {values['core_count']:g} is not a multiple of cores_per_die "
            f"{values['cores_per_die']:g}",
            where=sheet.where,
            hint="correct one of them; a base may give cores_per_die",
        )
