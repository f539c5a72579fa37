"""What changed between two reports, as a page."""

from __future__ import annotations

import html
from collections.abc import Sequence

from ferrite.reports.compare import Change, Data, by_section
from ferrite.reports.page import part


def compare_page(changes: Sequence[Change], before: tuple[str, Data], after: tuple[str, Data]) -> str:
    """`before` and `after`: the name of a file, and the record in it."""
    filled = part("diff.html")
    parts = {
        "style": part("style.css"),
        "before": side(*before),
        "after": side(*after),
        "said": "No difference." if not changes else f"{len(changes)} differences.",
        "changes": "\n".join(section_of(name, members) for name, members in by_section(changes).items()),
    }
    for name, text in parts.items():
        filled = filled.replace(f"{{{{{name}}}}}", text, 1)
    return filled


def side(name: str, record: Data) -> str:
    versions = ", ".join(f"{key} {value}" for key, value in record["versions"].items())
    return f"<b>{html.escape(name)}</b><span>{html.escape(record['made'])} · {html.escape(versions)}</span>"


def section_of(name: str, changes: Sequence[Change]) -> str:
    rows = "".join(
        "<tr>" + "".join(f"<td{kind}>{html.escape(text)}</td>" for kind, text in cells(each)) + "</tr>"
        for each in changes
    )
    head = "<tr><th>what</th><th>where</th><th>before</th><th>after</th></tr>"
    return f'<section class="card"><h2>{html.escape(name)}</h2><table>{head}{rows}</table></section>'


def cells(change: Change) -> list[tuple[str, str]]:
    gone, new = ' class="removed mono"', ' class="added mono"'
    return [
        (' class="mono"', change.what),
        ("", change.where),
        (gone, change.before or "–"),
        (new, change.after or "–"),
    ]
