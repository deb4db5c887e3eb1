"""Assemble a page from its data and the style and scripts in ``static/``.

Data is embedded as JSON, which browsers do not execute, and scripts insert it as text, never as
markup. A content security policy allows only the page's own style and scripts, by digest: nothing
is fetched, and nothing in a program's names is executed.
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

_STATIC = Path(__file__).resolve().parent / "static"
SHELL, STYLE = "shell.html", "page.css"
#: Scripts of every page: formats, colours, light and dark mode, canvases.
BASE = ("base.js", "plot.js")
#: An empty icon, so that browsers do not request one from a server.
_ICON = "data:,"


@dataclass(frozen=True)
class Page:
    """Content of a page.

    Attributes:
        title: Title of the browser's tab.
        data: Plain data for the scripts.
        scripts: Files of ``static`` after :data:`BASE`, in order; the last one draws the page.
        asks: Whether the page may query its own server and embed its pages.
    """

    title: str
    data: Mapping[str, object]
    scripts: Sequence[str]
    asks: bool = False


def assemble(page: Page) -> str:
    """Return the page as HTML that refers to no other resource."""
    style = _static(STYLE)
    parts = "\n".join(_static(name) for name in (*BASE, *page.scripts))
    # A function around all scripts keeps their names out of the global scope.
    script = f'"use strict";\n(() => {{\n{parts}}})();\n'
    return (
        (_STATIC / SHELL)
        .read_text(encoding="utf-8")
        .format(
            policy=escape(_policy(style, script, asks=page.asks)),
            title=escape(page.title),
            icon=_ICON,
            style=style,
            data=json_for_html(page.data),
            script=script,
        )
    )


def json_for_html(data: object) -> str:
    """Encode data as JSON that is safe inside a script element.

    Raises:
        ValueError: A number is neither finite nor ``None``.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    # ``</script`` and ``<!--`` end or change a script element even within a string (HTML Standard,
    # "Restrictions for contents of script elements"); U+2028 and U+2029 end lines in older
    # JavaScript. JSON allows escapes for all of them.
    for letter in "<>&\u2028\u2029":
        text = text.replace(letter, f"\\u{ord(letter):04x}")
    return text


def rounded(values: Sequence[float], digits: int = 5) -> list[float | None]:
    """Round numbers to few digits to keep pages small; ``None`` if not finite."""
    return [short(value, digits) for value in values]


def short(value: float, digits: int = 5) -> float | None:
    """Round a number to few significant digits; ``None`` if it is not finite."""
    if not math.isfinite(value):
        return None
    rounded_value = float(f"{value:.{digits}g}")
    # Integers below 2**53 are exact in JavaScript, and shorter than with ".0".
    whole = rounded_value.is_integer() and abs(rounded_value) < 2**53
    return int(rounded_value) if whole else rounded_value


def _policy(style: str, script: str, *, asks: bool) -> str:
    server = "connect-src 'self'; frame-src 'self'; " if asks else ""
    return (
        f"default-src 'none'; style-src '{_digest(style)}'; script-src '{_digest(script)}'; "
        f"{server}img-src data: blob:; base-uri 'none'; form-action 'none'"
    )


def _digest(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"sha256-{digest}"


@cache
def _static(name: str) -> str:
    """Read a file of ``static``, checking that it cannot close its own element."""
    text = (_STATIC / name).read_text(encoding="utf-8")
    assert "</script" not in text and "</style" not in text, name
    return text
