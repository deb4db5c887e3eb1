"""The report on support: what was measured of which device, and the shipped models' errors there.

Everything is read from the shipped models' files, so the report needs no measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from ...common.files import own_data
from ...common.tables_text import markdown_table

if TYPE_CHECKING:
    from rich.console import Console

    from .settings import SupportReportSettings

#: Columns of the table, and what the page says above it.
_SAID = own_data("workflows/reports/reports.yaml")["support"]
#: The mark of a kind of question that a chip's measurements were learned from.
LEARNED = "yes"


def support_table() -> pd.DataFrame:
    """A row for each device of the catalogue, and a cell for each kind of question.

    Cells of operators are the mean error in per cent on unseen shapes of the device (split ``val``,
    by the same settings fitted without them), and in brackets that of models that never saw the
    chip; ``LEARNED`` where a kind learned from the device, empty where nothing was measured.
    """
    from ...features.devices.catalogue import device_names
    from ...models.core.registry import OPERATOR_MODEL, PRETRAINED
    from ...models.core.store import read_manifest
    from ...models.operators.report import metrics_of

    manifest = read_manifest(PRETRAINED / OPERATOR_MODEL)
    seen = pd.DataFrame(metrics_of(manifest)).query("split == 'val' and scope == 'known'")
    unseen = pd.DataFrame(
        {"key": key, "device": device, "n": errors["rows"], "mape": errors["mape"]}
        for key, family in manifest["families"].items()
        for chip, errors in family.get("left_out", {}).items()
        for device in chip.split("+")
    )
    learned = {
        kind: set(_devices(PRETRAINED / f for f in files))
        for kind, files in _SAID["others"].items()
    }
    rows = []
    for device in device_names():
        cells = {
            kind: _errors(seen, unseen, device, tuple(ends))
            for kind, ends in _SAID["operators"].items()
        }
        cells |= {kind: LEARNED * (device in devices) for kind, devices in learned.items()}
        rows.append({"device": device, **cells})
    return pd.DataFrame(rows)


def _devices(files: Iterable[Path]) -> Iterable[str]:
    from ...common.files import read_json

    for file in files:
        data = read_json(file)
        yield from data.get("provenance", data)["devices"]


def _errors(seen: pd.DataFrame, unseen: pd.DataFrame, device: str, ends: tuple[str, ...]) -> str:
    def mean(table: pd.DataFrame) -> float:
        own = table[(table["device"] == device) & table["key"].str.endswith(ends)]
        return float(100 * (own["mape"] * own["n"]).sum() / own["n"].sum()) if len(own) else 0.0

    known, left_out = mean(seen), mean(unseen)
    return (f"{known:.1f}" * (known > 0) + f" ({left_out:.0f})" * (left_out > 0)).strip()


def markdown(table: pd.DataFrame) -> str:
    """The page: a row for each device of which anything was measured, the others in one line."""
    measured = _measured(table)
    device, *others = table.columns
    lines = [
        _SAID["head"],
        *markdown_table([device, *others], measured.itertuples(index=False), others),
    ]
    rest = table["device"][~table.index.isin(measured.index)]
    return "\n".join([*lines, "", f"By their data sheets alone: {', '.join(rest)}.", ""])


def _measured(table: pd.DataFrame) -> pd.DataFrame:
    return table[(table.drop(columns="device") != "").any(axis=1)]


def run_support_report(console: Console, settings: SupportReportSettings) -> None:
    """Print the table, and write the page."""
    from ...common.files import write_text
    from ...common.progress import wrote
    from ...common.tables_text import print_frame

    table = support_table()
    print_frame(console, _measured(table), "mean error in %, in brackets with the chip left out")
    if settings.out is not None:
        write_text(settings.out, markdown(table))
        wrote(settings.out, f"{len(table)} devices")
