"""A picture of results for the README: speed relative to eager, one pair of bars per case, as SVG.

    python -m bench.picture RESULTS.json [MORE.json] --to docs/speed.svg
    python -m bench.picture results/gpu-kernels.json results/gpu-models.json --to results/gpu-speed.svg

The axis is logarithmic, so that twice as fast and half as fast are equally long bars, to the right and to the left of
eager.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from bench.backends import EAGER, INDUCTOR, OURS

COLOURS = {OURS: "#c2410c", INDUCTOR: "#94a3b8"}
LABELS, PLOT, BAR, GAP, TOP, BOTTOM = 230, 520, 9, 8, 58, 34
FONT = "font-family='system-ui, sans-serif'"
Speeds = dict[str, dict[str, float]]  # case to backend to times as fast as eager


def speeds_of(results: Mapping[str, Any]) -> Speeds:
    """The cases of one program's results that ferrite or Inductor ran."""
    if results["rows"] and "speed" not in results["rows"][0]:
        return speeds_on_gpu(results["rows"])
    found: Speeds = {}
    for row in results["rows"]:
        speeds = {name: row["speed"][f"{name} to {EAGER}"] for name in COLOURS if f"{name} to {EAGER}" in row["speed"]}
        if speeds:
            found[f"{row['case']}, {row['size']}" if "size" in row else row["case"]] = speeds
    return found


def speeds_on_gpu(rows: Sequence[Mapping[str, Any]]) -> Speeds:
    """Of `bench.gpu`, whose rows are times: of kernels, and of models, with CUDA graphs too."""
    found: Speeds = {}
    for row in rows:
        name = row["case"] if "case" in row else row["model"] + ", training" * row["training"]
        for suffix in ("", ", reduce-overhead"):
            speeds = {each: row[EAGER] / row[each + suffix] for each in COLOURS if row.get(each + suffix)}
            if speeds:
                found[name + suffix.replace("reduce-overhead", "CUDA graphs")] = speeds
    return found


def drawn(speeds: Speeds, subtitle: str) -> str:
    """The whole picture."""
    names = [name for name in COLOURS if any(name in each for each in speeds.values())]
    row_height = BAR * len(names) + GAP
    height, width = TOP + row_height * len(speeds) + BOTTOM, LABELS + PLOT + 60
    reach = max(1.0, *(abs(math.log2(speed)) for each in speeds.values() for speed in each.values()))
    reach = math.ceil(reach)

    def across(speed: float) -> float:
        return LABELS + PLOT * (math.log2(speed) + reach) / (2 * reach)

    parts = [
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {width} {height}' width='{width}' height='{height}'>",
        f"<rect width='{width}' height='{height}' fill='#ffffff'/>",
        f"<text x='12' y='20' {FONT} font-size='14' font-weight='600'>Times as fast as eager</text>",
        f"<text x='12' y='38' {FONT} font-size='11' fill='#64748b'>{escape(subtitle)}</text>",
        *legend(names, width),
        *axis(reach, across, height),
    ]
    for i, (case, each) in enumerate(speeds.items()):
        top = TOP + i * row_height
        middle = top + BAR * len(names) / 2 + 4
        parts.append(
            f"<text x='{LABELS - 8}' y='{middle:.1f}' {FONT} font-size='11' text-anchor='end'>{escape(case)}</text>"
        )
        for j, name in enumerate(names):
            if name in each:
                parts.append(bar(name, each[name], across, top + j * BAR))
    return "\n".join([*parts, "</svg>", ""])


def bar(name: str, speed: float, across: Any, top: float) -> str:
    start, end = sorted((across(1.0), across(speed)))
    rectangle = f"<rect x='{start:.1f}' y='{top:.1f}' width='{max(1.0, end - start):.1f}' height='{BAR - 1}'"
    place = f"x='{end + 4:.1f}' y='{top + BAR - 2:.1f}' {FONT} font-size='9' fill='#334155'"
    return f"{rectangle} fill='{COLOURS[name]}'/><text {place}>{speed:.2f}</text>"


def legend(names: Sequence[str], width: int) -> list[str]:
    parts = []
    for i, name in enumerate(names):
        x = width - 90 * (len(names) - i)
        parts.append(f"<rect x='{x}' y='11' width='10' height='10' fill='{COLOURS[name]}'/>")
        parts.append(f"<text x='{x + 15}' y='20' {FONT} font-size='12'>{name}</text>")
    return parts


def axis(reach: int, across: Any, height: int) -> list[str]:
    parts = []
    for power in range(-reach, reach + 1):
        x = across(2.0**power)
        colour = "#0f172a" if power == 0 else "#e2e8f0"
        label = "eager" if power == 0 else f"{2**power}x" if power > 0 else f"1/{2**-power}"
        parts.append(f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{TOP - 6}' y2='{height - BOTTOM + 4}' stroke='{colour}'/>")
        place = f"x='{x:.1f}' y='{height - BOTTOM + 20}' text-anchor='middle'"
        parts.append(f"<text {place} {FONT} font-size='10' fill='#475569'>{label}</text>")
    return parts


def picture_of(results: Sequence[Mapping[str, Any]], to: Path) -> None:
    """Draw all results into one file."""
    speeds = {case: each for found in results for case, each in speeds_of(found).items()}
    if not speeds:
        raise SystemExit("no case was timed: there is nothing to draw")
    to.parent.mkdir(parents=True, exist_ok=True)
    threads = f", {results[0]['threads']} threads" if "threads" in results[0] else ""
    to.write_text(drawn(speeds, results[0]["machine"] + threads))


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "results", nargs="+", type=Path, help="JSON files that bench.kernels, bench.models or bench.gpu wrote"
    )
    parser.add_argument("--to", type=Path, required=True, help="the file to draw into")
    chosen = parser.parse_args(argv)
    picture_of([json.loads(path.read_text()) for path in chosen.results], chosen.to)


if __name__ == "__main__":
    main()
