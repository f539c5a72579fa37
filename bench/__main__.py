"""A short look at everything: overhead, kernels and models, in a few minutes, and a picture of them.

    python -m bench [--no-inductor] [--write FOLDER]

The programs `bench.overhead`, `bench.kernels`, `bench.models` and `bench.compile_time` measure each at full length;
their `--help` says how.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from pathlib import Path

from bench import kernels, models, overhead
from bench.measure import RESULTS
from bench.picture import picture_of


def main(argv: Sequence[str] | None = None) -> Path:
    parser = argparse.ArgumentParser(
        prog="python -m bench", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--no-inductor", action="store_true", help="compare with eager alone")
    parser.add_argument("--threads", default="2", help="threads of torch (2)")
    default = RESULTS / "short"
    parser.add_argument("--write", type=Path, default=default, metavar="FOLDER", help="where to (bench/results/short)")
    parser.add_argument("--only-kernels", nargs="+", default=[], metavar="PATTERN", help="as --only of bench.kernels")
    parser.add_argument("--only-models", nargs="+", default=[], metavar="PATTERN", help="as --only of bench.models")
    chosen = parser.parse_args(argv)
    common = ["--quick", "--threads", chosen.threads, "--write", str(chosen.write)]
    common += ["--no-inductor"] if chosen.no_inductor else []
    overhead.main(common)
    kernels.main([*common, "--size", "large", *only(chosen.only_kernels)])
    models.main([*common, "--no-cold", "--kinds", "inference", *only(chosen.only_models)])
    written = [chosen.write / f"{name}-{platform.machine()}.json" for name in ("models", "kernels")]
    picture: Path = chosen.write / f"speed-{platform.machine()}.svg"
    picture_of([json.loads(path.read_text()) for path in written], picture)
    print(f"picture: {picture}")
    return picture


def only(patterns: Sequence[str]) -> list[str]:
    return ["--only", *patterns] if patterns else []


if __name__ == "__main__":
    main()
