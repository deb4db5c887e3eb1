"""Puts a page together: its data, and the styles and scripts beside this file.

Data stands in the page as JSON that no browser runs; scripts write it as text, never as markup. A
content security policy forbids everything but the page's own styles and scripts, by their digests:
so nothing is fetched, and what a program's names may hold is not run.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

_STATIC = Path(__file__).resolve().parent / "static"
STYLE = "page.css"
#: What every page starts with: formats, colours, the light and the dark mode, canvases.
BASE = ("base.js", "plot.js")
#: A drawing in the tab, so that browsers do not ask a server for one.
_ICON = "data:,"

_SHELL = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<title>{title}</title>
<link rel="icon" href="{icon}">
<style>{style}</style>
</head>
<body>
<noscript><p class="noscript">This page draws its figures with JavaScript, which is off.</p>
</noscript>
<div id="page"></div>
<script type="application/json" id="data">{data}</script>
<script>{script}</script>
</body>
</html>
"""


@dataclass(frozen=True)
class Page:
    """What makes a page.

    Attributes:
        title: Of the tab.
        data: Plain data for the scripts.
        scripts: Files of ``static`` after :data:`BASE`, in order; the last one draws the page.
    """

    title: str
    data: Mapping[str, Any]
    scripts: Sequence[str]


def assemble(page: Page) -> str:
    """The page as text, without anything from elsewhere."""
    style = _static(STYLE)
    parts = "\n".join(_static(name) for name in (*BASE, *page.scripts))
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    return _SHELL.format(
        policy=escape(_policy(style, script)),
        title=escape(page.title),
        icon=_ICON,
        style=style,
        data=json_for_html(page.data),
        script=script,
    )


def json_for_html(data: Any) -> str:
    """JSON that may stand in a script element: no markup can begin or end in it.

    Raises:
        ValueError: A number is neither finite nor ``None``.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def rounded(values: Sequence[float], digits: int = 5) -> list[float | None]:
    """Numbers with few digits, so that pages stay small; ``None`` for those that are not finite."""
    return [short(value, digits) for value in values]


def short(value: float, digits: int = 5) -> float | None:
    """A number with few digits; ``None`` if it is not finite."""
    if not math.isfinite(value):
        return None
    rounded_value = float(f"{value:.{digits}g}")
    whole = rounded_value.is_integer() and abs(rounded_value) < 2**53
    return int(rounded_value) if whole else rounded_value


def _policy(style: str, script: str) -> str:
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


@cache
def _static(name: str) -> str:
    """A file of ``static``, which ends nowhere too early."""
    text = (_STATIC / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text, name
    return text
