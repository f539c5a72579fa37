"""`python -m ferrite bisect CHECK`: from "it is wrong", "it fails" or "it is slow" to one name."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ferrite.cli import specs
from ferrite.cli.compile import find, parse_option
from ferrite.errors import UserError

STOPPED = 130  # what shells give for a program that was stopped from the keyboard


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "bisect",
        help="find the pass, rule, fusion or kernel that is wrong, fails, crashes or is slow",
        description="Find what is to blame by halving. CHECK is one of: MODULE:FUNCTION without arguments, which "
        "compiles something with ferrite and raises (or gives False) where it goes wrong, or gives seconds; "
        "MODULE:CALLABLE with arguments, which is compared with eager; a folder that a failing stage has kept. Every "
        "try is a process of its own: it may crash.",
        epilog=specs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("check", metavar="CHECK", help="package.module:name, path/to/file.py:name, or a repro folder")
    parser.add_argument("arguments", metavar="ARG", nargs="*", help="f32[8,16], i64[4]<100, 3, None, ...")
    parser.add_argument("--slow", action="store_true", help="look for what is slower than eager, not for what is wrong")
    parser.add_argument("--train", action="store_true", help="differentiate, too")
    parser.add_argument("--dynamic", action="store_true", help="treat sizes as symbolic")
    parser.add_argument("-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="any option")
    parser.add_argument("--seconds", type=float, default=600.0, help="that one try may take (default 600)")
    parser.add_argument("--into", type=Path, default=Path("bisected"), help="folder for what is found (./bisected)")
    parser.add_argument("--quiet", action="store_true", help="print the result alone")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    from ferrite.diagnosis.bisect import NothingFound, bisect, summary, warm_up

    check, setup = check_of(chosen)

    def tell(text: str) -> None:
        if not chosen.quiet:
            print(f"  {text}", flush=True)

    warm_up()
    try:
        finding = bisect(check, folder=chosen.into, seconds=chosen.seconds, tell=tell, setup=setup)
    except NothingFound as nothing:
        print(nothing)
        return 0
    except KeyboardInterrupt:
        print("\nstopped: what is known so far stands above; the same command begins anew")
        return STOPPED
    print(f"\n{summary(finding)}\n\n{finding.tries} tries")
    return 1


def check_of(chosen: argparse.Namespace) -> tuple[Callable[[], Any], str]:
    """What is tried, and the module that it needs. Nothing of the user's is loaded here, but in every try."""
    from ferrite.diagnosis.bisect import check_of_folder, compare

    if Path(chosen.check).is_dir():
        return check_of_folder(Path(chosen.check), chosen.slow)
    setup = chosen.check.rpartition(":")[0]
    if not setup:
        raise UserError(
            f"cannot read {chosen.check!r}",
            {"expected": "MODULE:NAME, path/to/file.py:NAME, or a folder with graph.py"},
        )
    if not chosen.arguments:
        return lambda: find(chosen.check)(), setup
    options = dict(parse_option(text) for text in chosen.option)

    def check() -> float | None:
        torch.manual_seed(0)
        inputs = [specs.parse_argument(text, requires_grad=chosen.train) for text in chosen.arguments]
        modes = {"grad": chosen.train, "dynamic": chosen.dynamic or None}
        return compare(find(chosen.check), inputs, **modes, options=options, timed=chosen.slow)

    return check, setup
