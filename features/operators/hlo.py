"""Operators of published tables as HLO kernels, and back.

Every operator becomes a canonical one-instruction module with its true shapes: products as ``dot``,
convolutions as ``convolution``, passes over memory as loop fusions, and what no HLO op says (fused
attention, experts, products of quantised operands) as a custom call. The root's ``backend_config``
carries the operator's parameters, who ran it and how it was timed under ``published_op``, so that
the row can be read back from the text alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from ...common.errors import DatasetError
from ..cost.formats import TABLE_FORMATS
from .hlo_templates import TEMPLATES, Row
from .schema import FAMILIES, NAMES, OPTIONAL, PARAMETERS

if TYPE_CHECKING:
    import pandas as pd

#: Key of the root's ``backend_config`` under which the operator's parameters are.
CONFIG = "published_op"
# The text of the key as `json.dumps` writes it first in the configuration: a plain search finds it
# without parsing HLO, which matters for millions of rows.
_MARK = f'{{"{CONFIG}":'


def op_ir(row: Row) -> str:
    """Write an operator's kernel as HLO text.

    Args:
        row: ``method`` and the columns of its family's parameters and names.

    Raises:
        DatasetError: The family, the dtype or the op is unknown, or a parameter is missing.
    """
    key = f"{row['method']}/{row['family']}"
    if key not in FAMILIES:
        raise DatasetError(f"no operator family {key!r}", hint="families: " + ", ".join(FAMILIES))
    group = FAMILIES[key]
    dtype = row.get("dtype")
    if dtype not in TABLE_FORMATS:
        raise DatasetError(
            f"no dtype {dtype!r} of operators", hint="dtypes: " + ", ".join(TABLE_FORMATS)
        )
    # Without spaces and in a fixed order: the text is hashed, and `_MARK` is searched in it.
    config = json.dumps({CONFIG: _config(row, group)}, separators=(",", ":"))
    return TEMPLATES[group](row, config)


def op_texts(frame: pd.DataFrame, family: str) -> list[str]:
    """Write the kernels of a table's rows, all of one family, as HLO texts.

    Raises:
        DatasetError: As :func:`op_ir`, with the row's ``id``.
    """
    texts = []
    for place, row in enumerate(_records(frame, family)):
        try:
            texts.append(op_ir(row))
        except DatasetError as error:
            label = frame["id"].iloc[place] if "id" in frame else frame.index[place]
            raise DatasetError(error.what, where=f"row {label}", hint=error.hint) from None
    return texts


def _records(frame: pd.DataFrame, family: str) -> Iterator[dict[str, object]]:
    """Parameters of each row as plain Python values."""
    method, own = family.split("/")
    whole = [c for c in PARAMETERS[FAMILIES[family]] if c in frame]
    text = [c for c in NAMES if c in frame and c != "family"]
    columns: list[object] = [
        frame[c].astype(np.int64).tolist() if frame[c].notna().all() else frame[c].astype(object)
        for c in whole
    ]
    columns += [frame[c].astype(object).fillna("").tolist() for c in text]
    for values in zip(*columns, strict=True):
        record = dict(zip((*whole, *text), values, strict=True))
        yield {"method": method, "family": own, **record}


def read_op(ir: str) -> dict[str, object] | None:
    """Parameters of a kernel that :func:`op_ir` wrote; ``None`` for any other kernel."""
    start = ir.find(_MARK)
    if start < 0:
        return None
    config: dict[str, object] = json.JSONDecoder().raw_decode(ir, start)[0][CONFIG]
    return config


def op_frame(irs: Iterable[str]) -> pd.DataFrame:
    """Make a table of the kernels' operators, one row each; other kernels have no ``method``."""
    import pandas as pd

    rows = [read_op(ir) or {"method": ""} for ir in irs]
    # A fixed order of columns, whatever the first kernel has; unknown ones come last.
    wanted = ["method", *NAMES, *dict.fromkeys(c for g in PARAMETERS.values() for c in g)]
    frame = pd.DataFrame(rows)
    return frame.reindex(columns=[*wanted, *(c for c in frame if c not in wanted)])


def _config(row: Row, group: str) -> dict[str, object]:
    config: dict[str, object] = {"method": row["method"]}
    config |= {c: str(row[c]) for c in NAMES if _present(row.get(c))}
    config |= {c: int(row[c]) for c in PARAMETERS[group] if _present(row.get(c))}
    absent = [c for c in PARAMETERS[group] if c not in config and c not in OPTIONAL]
    if absent:
        family = f"{row['method']}/{row['family']}"
        raise DatasetError(f"{family} needs a whole number in column {absent[0]!r}")
    return config


def _present(value: object) -> bool:
    import pandas as pd

    return value is not None and value is not pd.NA and value == value and value != ""
