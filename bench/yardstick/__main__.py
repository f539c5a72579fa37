"""Test files written for torch.compile, with ferrite in the place of the backend they name.

    python -m bench.yardstick FILE [FILE ...] [--backend ferrite] [--against aot_eager] [--out REPORT.md]

Each file runs once with each backend, as it is. Compilations that would end in eager are failures. A run that was
interrupted goes on where it was; `--again` forgets what is known. See docs/yardstick.md.
"""

from __future__ import annotations

import argparse
import functools
import shlex
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.yardstick.report import LISTED, Comparison, page, table
from bench.yardstick.runs import NoTests, Plan, results_of


def main(argv: Sequence[str] | None = None) -> list[Comparison]:
    chosen = parser().parse_args(argv)
    folder: Path = (chosen.work or chosen.out.with_suffix(".runs")).resolve()  # children run beside the test file
    found = []
    for file in chosen.files:
        try:
            ours = results_of(ready(chosen, file, chosen.backend, folder))
            lost = {each.test for each in ours if each.outcome in LISTED} if chosen.quick else None
            neutral = results_of(ready(chosen, file, chosen.against, folder), lost)
        except NoTests as problem:
            print(f"left out: {problem}", file=sys.stderr)
            continue
        found.append(Comparison(file, ours, neutral))
        command = shlex.join(["python", "-m", "bench.yardstick", *(sys.argv[1:] if argv is None else argv)])
        chosen.out.write_text(page(found, chosen.backend, chosen.against, command), encoding="utf-8")
    print("\n".join(table(found, chosen.backend, chosen.against)))
    print(f"report: {chosen.out}")
    return found


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="python -m bench.yardstick", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("files", nargs="+", type=Path, metavar="FILE", help="files of tests that pytest can run")
    add("--backend", default="ferrite", help="the backend in question (ferrite)")
    add("--against", default="aot_eager", help="the neutral backend (aot_eager)")
    add("--out", type=Path, default=Path("yardstick.md"), metavar="REPORT.md", help="the report (yardstick.md)")
    add("--work", type=Path, metavar="FOLDER", help="where results are kept (beside the report)")
    add("--again", action="store_true", help="run all tests, whatever is known")
    add("--quick", action="store_true", help="run with the neutral backend only what did not pass with the other")
    add("--replace", nargs="+", default=["inductor"], metavar="NAME", help="backends to replace; 'counters' too")
    add("--placeholders", action="store_true", help="the file is for another torch: names may be missing")
    add("--only", nargs="+", default=[], metavar="PART", help="tests with one of these in the name")
    add("--without", nargs="+", default=[], metavar="PART", help="leave out tests with one of these in the name")
    add("--limit", type=float, default=120.0, metavar="SECONDS", help="time limit of a test (120)")
    add("--per-child", type=int, default=400, metavar="N", help="a new process after so many tests (400)")
    add("--no-strict", dest="strict", action="store_false", help="let ferrite run in eager what it cannot compile")
    add("--pytest", type=shlex.split, default=[], metavar="ARGUMENTS", help="further arguments of pytest")
    return found


def ready(chosen: argparse.Namespace, file: Path, backend: str, folder: Path) -> Plan:
    """What to run, with nothing known if that was asked for."""
    plan = plan_of(chosen, file, backend, folder)
    if chosen.again:
        plan.known.unlink(missing_ok=True)
        plan.listed.unlink(missing_ok=True)
    return plan


def plan_of(chosen: argparse.Namespace, file: Path, backend: str, folder: Path) -> Plan:
    return Plan(
        file=file,
        backend=backend,
        folder=folder,
        replaced=tuple(chosen.replace),
        strict=chosen.strict,
        placeholders=chosen.placeholders,
        limit=chosen.limit,
        per_child=chosen.per_child,
        only=tuple(chosen.only),
        without=tuple(chosen.without),
        pytest_arguments=tuple(chosen.pytest),
        show=functools.partial(print, flush=True),
    )


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that the child ends, too
    main()
