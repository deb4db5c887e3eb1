"""A lowered program as JSON, the form in which datasets store whole programs.

Kernels are identified by hash; texts of kernels that the dataset does not contain elsewhere are
included. Layout (all lists in schedule order, ``kernel`` and ``scope`` are indices into ``hashes``
and ``scopes``, ``operands`` and ``peer`` are relative to the kernel's own index, backwards)::

    {"schema": 1, "lowering": "xla", "target": "...", "compiler": "...",
     "peak_memory_bytes": 0.0, "memory_source": "compiler", "notes": [],
     "hashes": ["..."], "irs": {"<hash>": "<HLO text>"}, "scopes": [["while.1"]],
     "kernel": [0], "times": [1.0], "scope": [0], "operands": [[1, 2]],
     "role": {"3": "start"}, "peer": {"3": -2}, "endless": [3]}
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace

from ...common.errors import DatasetError, ProgramError
from ...common.types import JsonMapping
from .extract import kernel_from_ir
from .kernel import Kernel, LoweredProgram

#: Version of the JSON layout.
SCHEDULE_VERSION = 1


def schedule_to_json(lowered: LoweredProgram, known: Collection[str] = ()) -> str:
    """Serialise kernels, their order and dependencies, without names and sources.

    Args:
        lowered: The program.
        known: Hashes of kernels whose text the reader will have.
    """
    by_hash: dict[str, Kernel] = {}
    for kernel in lowered.kernels:
        by_hash.setdefault(kernel.hash, kernel)
    hashes = {value: i for i, value in enumerate(by_hash)}
    scopes: dict[tuple[str, ...], int] = {}
    for kernel in lowered.kernels:
        scopes.setdefault(kernel.scope, len(scopes))
    listed = list(enumerate(lowered.kernels))
    data = {
        "schema": SCHEDULE_VERSION,
        "lowering": lowered.lowering,
        "target": lowered.target,
        "compiler": lowered.compiler,
        "peak_memory_bytes": lowered.peak_memory_bytes,
        "memory_source": lowered.memory_source,
        "entry_bytes": lowered.entry_bytes,
        "notes": lowered.notes,
        "hashes": list(hashes),
        # Texts make up nearly all of a program's JSON, so those stored as samples of the dataset
        # are omitted.
        "irs": {value: k.ir for value, k in by_hash.items() if value not in known},
        "scopes": [list(scope) for scope in scopes],
        "kernel": [hashes[k.hash] for k in lowered.kernels],
        "times": [k.multiplicity for k in lowered.kernels],
        "scope": [scopes[k.scope] for k in lowered.kernels],
        # Relative indices repeat from layer to layer, so the text compresses well.
        "operands": [[i - operand for operand in k.operands] for i, k in listed],
        "endless": [i for i, k in listed if k.endless],
        "role": {str(i): k.async_role for i, k in listed if k.async_role},
        # Sparse: few kernels are asynchronous.
        "peer": {str(i): i - k.async_peer for i, k in listed if k.async_peer >= 0},
    }
    return json.dumps(data, separators=(",", ":"))


def schedule_from_json(text: str, ir_by_hash: Mapping[str, str]) -> LoweredProgram:
    """Rebuild a lowered program.

    Args:
        text: From :func:`schedule_to_json`.
        ir_by_hash: Texts of kernels that the JSON does not contain.

    Raises:
        DatasetError: The JSON is damaged or of another version, or a kernel's text is missing.
    """
    try:
        data = json.loads(text)
        if data["schema"] != SCHEDULE_VERSION:
            raise DatasetError(
                f"schedule of version {data['schema']}, expected {SCHEDULE_VERSION}",
                hint="profile again, or use the version of opcast that wrote it",
            )
        return LoweredProgram(
            kernels=_kernels(data, ir_by_hash),
            lowering=data["lowering"],
            target=data["target"],
            compiler=data["compiler"],
            peak_memory_bytes=float(data["peak_memory_bytes"]),
            memory_source=data["memory_source"],
            notes=list(data["notes"]),
            # Schedules of older datasets do not state it.
            entry_bytes=float(data.get("entry_bytes", 0.0)),
        )
    except (ValueError, KeyError, IndexError, TypeError, AttributeError, ProgramError) as error:
        raise DatasetError(
            f"damaged schedule: {type(error).__name__}: {error}", hint="profile the program again"
        ) from error


def _kernels(data: JsonMapping, ir_by_hash: Mapping[str, str]) -> list[Kernel]:
    known = {**ir_by_hash, **data["irs"]} if data["irs"] else ir_by_hash
    missing = [value for value in data["hashes"] if value not in known]
    if missing:
        raise DatasetError(
            f"the texts of {len(missing)} kernels are missing, the first is {missing[0]}",
            hint="load the dataset's folders together",
        )
    # Each distinct kernel is parsed once, then copied for each execution.
    originals = [kernel_from_ir(known[value]) for value in data["hashes"]]
    scopes = [tuple(scope) for scope in data["scopes"]]
    # Schedules of older datasets do not state it.
    endless = set(data.get("endless", ()))
    columns = zip(data["kernel"], data["times"], data["scope"], data["operands"], strict=True)
    kernels = [
        replace(
            originals[kernel],
            multiplicity=float(times),
            scope=scopes[scope],
            endless=i in endless,
            operands=tuple(i - back for back in operands),
            async_role=data["role"].get(str(i), ""),
            async_peer=i - data["peer"][str(i)] if str(i) in data["peer"] else -1,
        )
        for i, (kernel, times, scope, operands) in enumerate(columns)
    ]
    for kernel in kernels:
        # As in extraction, a done has its start's kind.
        if kernel.async_role == "done" and kernel.async_peer >= 0:
            kernel.kind = kernels[kernel.async_peer].kind
    return kernels
