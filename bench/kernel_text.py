"""The code that ferrite generates, as text, so that two commits can be compared: `diff -r BEFORE AFTER` says the rest.

    python -m bench.kernel_text FOLDER [--only softmax bert] [--models zoo] [--against OTHER_FOLDER]

For each kernel of `bench.kernels` (small sizes) and each model, in float32, in inference and as a training step, a file
`FOLDER/CASE.txt`: the host program of every graph, and the LLVM text of every kernel under it. Models are those of the
tests, two layers of each architecture; with `--models zoo` those of `bench.zoo` (the smaller batch), which takes ten
times as long. `FOLDER/digests.txt` has a digest of each file; two folders with equal digests hold the same code.
Nothing is measured. With `--against`, cases that differ from those of another folder are named, and the exit status is
1.

To compare with a commit that lacks this program, copy this file into a checkout of it.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import ferrite
from bench.backends import OURS, ROOT, empty_caches, given_to, with_own_code
from bench.cases import CASES, Case
from bench.kernels import inputs_of, observed, seeds_of
from bench.report import selected, watched
from bench.steps import observed as observed_model
from bench.zoo import MODELS, Model
from ferrite.codegen.llvm import host_processor, kernel_text
from ferrite.targets import cpu
from tests.models.architectures import ARCHITECTURES, Architecture

DIGESTS = "digests.txt"
Texts = dict[str, str]
Run = Callable[[], Any]


@contextlib.contextmanager
def generated() -> Iterator[Texts]:
    """LLVM text by the name of its kernel, of all kernels that are compiled meanwhile."""
    texts: Texts = {}
    build = cpu.build

    def watched_build(kernels: Sequence[Any], store: Any = None, checked: bool = False) -> Any:
        names, code = build(kernels, store, checked)
        for name, kernel in zip(names, kernels, strict=True):
            texts[name] = kernel_text(kernel, host_processor(), name, checked)
        return names, code

    with mock.patch.object(cpu, "build", watched_build):
        yield texts


def text_of(run: Run) -> str:
    """Host programs in the order in which graphs were compiled, then kernels in the order of their first use."""
    torch.compiler.reset()
    before = ferrite.recent_compiles()
    with generated() as kernels:
        run()
    records = [record for record in ferrite.recent_compiles() if not any(record is old for old in before)]
    graphs = [graph for record in records for graph in record.graphs]
    parts = [f"# {graph.kind}: {graph.failure or 'compiled'}\n{graph.source}" for graph in graphs]
    parts += [f"; --- {name}\n{text}" for name, text in kernels.items()]
    return "\n".join(parts).replace(f"{ROOT}/", "")


def run_of_kernel(case: Case) -> Run:
    def run() -> None:
        options = {"rng": "counter"} if case.random else {}
        with torch.set_grad_enabled(case.backward):
            inputs = inputs_of(case, "small")
            function = given_to(OURS, with_own_code(case.function), **options)
            observed(case, function, inputs, seeds_of(case, inputs_of(case, "small")))

    return run


def run_of_architecture(architecture: Architecture, training: bool) -> Run:
    return lambda: run_model(architecture.model().train(training), architecture.inputs(), training)


def run_of_model(model: Model, training: bool) -> Run:
    def run() -> None:
        inputs = model.inputs(model.smaller, torch.float32, training)
        run_model(model.ready(torch.float32, training), inputs, training)

    return run


def run_model(model: torch.nn.Module, inputs: dict[str, Any], training: bool) -> None:
    with torch.set_grad_enabled(training):
        observed_model(model, given_to(OURS, model), inputs, training)


def runs(models: str) -> Iterator[tuple[str, Run]]:
    """Cases by name. `models`: "tests", "zoo" or "none"."""
    for case in CASES:
        yield case.name, run_of_kernel(case)
    for architecture in ARCHITECTURES.values() if models == "tests" else ():
        yield f"{architecture.name}-inference", run_of_architecture(architecture, False)
        if architecture.trains:
            yield f"{architecture.name}-training", run_of_architecture(architecture, True)
    for model in MODELS.values() if models == "zoo" else ():
        yield f"{model.name}-inference", run_of_model(model, False)
        yield f"{model.name}-training", run_of_model(model, True)


def digests_in(folder: Path) -> dict[str, str]:
    lines = (folder / DIGESTS).read_text().splitlines()
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in lines)}


def differing(folder: Path, other: Path) -> list[str]:
    """Cases of both folders whose code is not the same."""
    here, there = digests_in(folder), digests_in(other)
    return [name for name in here if name in there and here[name] != there[name]]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the texts are written")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN", help="cases with one of these in the name")
    parser.add_argument("--models", choices=["tests", "zoo", "none"], default="tests", help="which models (tests)")
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="name the cases that differ from another run's")
    chosen = parser.parse_args(argv)
    chosen.folder.mkdir(parents=True, exist_ok=True)
    items = selected(runs(chosen.models), lambda item: item[0], chosen.only)
    lines = []
    with empty_caches():
        for name, run in watched(items, lambda item: item[0]):
            text = text_of(run)
            (chosen.folder / f"{name}.txt").write_text(text)
            lines.append(f"{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()} {name}\n")
    (chosen.folder / DIGESTS).write_text("".join(lines))
    if chosen.against is None:
        return 0
    changed = differing(chosen.folder, chosen.against)
    print(f"{len(items) - len(changed)} of {len(items)} cases are the same as in {chosen.against}")
    print("".join(f"differs: {name}\n" for name in changed), end="")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
