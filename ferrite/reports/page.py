"""The page around a record: one file of HTML with its styles and scripts inside.

Nothing of the record is ever read as HTML: it stands in the page as JSON in which no `<` is left, and the scripts make
text of it, never markup. A browser is told to run these scripts and no others, and to fetch nothing.
"""

from __future__ import annotations

import base64
import hashlib
import json
from importlib import resources
from typing import Any

STYLES = ("style.css",)
SCRIPTS = ("base.js", "panes.js", "sections.js", "charts.js", "search.js", "main.js")
BEGIN, END = '<script type="application/json" id="record">', "</script>"
ESCAPED = {"<": "\\u003c", ">": "\\u003e", "&": "\\u0026", "\u2028": "\\u2028", "\u2029": "\\u2029"}


def page(record: dict[str, Any]) -> str:
    style = "\n".join(map(part, STYLES))
    script = "\n".join(map(part, SCRIPTS))
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src '{digest(script)}'; img-src data:"
    filled = part("page.html")
    for name, text in (("policy", policy), ("style", style), ("script", script), ("record", escaped(record))):
        filled = filled.replace(f"{{{{{name}}}}}", text, 1)  # the record comes last: it may hold such words itself
    return filled


def part(name: str) -> str:
    return resources.files("ferrite.reports").joinpath("template", name).read_text(encoding="utf-8")


def digest(script: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}"


def escaped(record: dict[str, Any]) -> str:
    """JSON that ends no element and begins none.

    >>> escaped({"name": "</script>"})
    '{"name":"\\\\u003c/script\\\\u003e"}'
    """
    text = json.dumps(record, separators=(",", ":"))
    for character, code in ESCAPED.items():
        text = text.replace(character, code)
    return text
