"""`python -m ferrite COMMAND`: doctor, demo, compile, report, diff, bisect, replay, tune, comm-bench, options, ..."""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Sequence

from ferrite import __version__
from ferrite.cli import bisect, cache, comm_bench, demo, diff, doctor, ops, options, replay, report, tune
from ferrite.cli import compile as compile_command
from ferrite.errors import FerriteError


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m ferrite", description="A compiler for PyTorch models.")
    parser.add_argument("--version", action="version", version=f"ferrite {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (
        doctor,
        demo,
        compile_command,
        report,
        diff,
        bisect,
        replay,
        tune,
        comm_bench,
        options,
        ops,
        cache,
    ):
        command.add_parser(commands)
    chosen = parser.parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the name of a file need not be text
            stream.reconfigure(errors="backslashreplace")
    try:
        status: int = chosen.run(chosen)
    except FerriteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2
    return status


if __name__ == "__main__":
    sys.exit(main())
