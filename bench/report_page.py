"""The page of a report about graphs of ten thousand nodes, in a browser: a training step of a deep transformer.

    python -m bench.report_page [--layers N] [--write]

Milliseconds until each graph's sections are there, from opening the file (the most of all sections), until a line that
was chosen has lit up what belongs to it in all panes, and until a search over everything has its results. It needs
Chromium, its driver and Selenium, as `make test-browser` does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.report import in_markdown, parsed, parser_for, save, show
from ferrite.reports import read_record
from tests.reports.browser import Browser, browsers
from tests.reports.deep import LAYERS, deep_report

SECTIONS = ("overview", "code", "passes", "fusion", "memory", "time", "cache", "guards")
CHOICE = """
const start = performance.now();
const middle = Math.floor(listings.graph.source.count / 2);
listings.graph.cursor = middle;
listings.graph.choose();
return performance.now() - start;
"""
SEARCH = """
const start = performance.now();
const wanted = "gelu", found = searchIndex(compileNow()).filter((each) => each.low.includes(wanted)).length;
return [performance.now() - start, found];
"""
COLUMNS = ["graph", "nodes", "steps", "kernels", "sections there, ms", "a line chosen, ms"]


def of_graph(browser: Browser, page: Path, number: int, graph: dict[str, Any]) -> dict[str, Any]:
    ready = []
    for section in SECTIONS:
        browser.open(page, f"g={number}&s={section}")
        ready.append(int(browser.ask("document.documentElement.dataset.ready")))
    browser.open(page, f"g={number}&s=code")
    counts = {name: len(graph[name]) for name in ("nodes", "steps", "kernels")}
    return {"graph": graph["title"], **counts, "ready": max(ready), "chosen": browser.driver.execute_script(CHOICE)}


def run(chosen: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        start = time.perf_counter()
        page = deep_report(Path(folder) / "page.html", chosen.layers)
        seconds, size = time.perf_counter() - start, page.stat().st_size
        graphs = read_record(page)["compiles"][-1]["graphs"]
        for browser in browsers(Path(folder) / "profile"):  # one, which is closed behind the loop
            rows = [of_graph(browser, page, number, graph) for number, graph in enumerate(graphs)]
            search, hits = browser.driver.execute_script(SEARCH)
    table = [
        [row["graph"], *(f"{row[name]:,}" for name in ("nodes", "steps", "kernels", "ready")), f"{row['chosen']:.0f}"]
        for row in rows
    ]
    lines = [
        f"{chosen.layers} layers: compiled and written in {seconds:.0f} s, {size / 1e6:.1f} MB.",
        f"The first search, which makes the index, in {search:.0f} ms: {hits:,} lines.",
    ]
    show("A page of large graphs", COLUMNS, table, lines)
    data = {"rows": rows, "seconds": seconds, "bytes": size, "search": search}
    if chosen.write:
        page_lines = [*(f"{line}  " for line in lines), "", *in_markdown(COLUMNS, table)]
        save(chosen.write, "report_page", chosen, "A page of large graphs", page_lines, data)
    return data


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = parser_for(__doc__, rounds=1, seconds=0)
    parser.add_argument("--layers", type=int, default=LAYERS, help=f"of the transformer ({LAYERS})")
    return run(parsed(parser, argv))


if __name__ == "__main__":
    main()
