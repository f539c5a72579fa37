"""The whole compiler, as one short function over its stages.

    ferrite        what torch.compile(..., backend="ferrite") calls with each graph that Dynamo captured
    compile_graph  one functional graph in, one callable out: (joint,) post_grad, lower, codegen, load
    compile        torch.compile with ferrite's options as keywords

A stage that fails costs speed, never an answer: the graph runs in eager, one warning says so, and a repro folder is
kept. With `strict` the failure is raised instead.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferrite.capture import CapturedGraph, GraphKind, capture, torch_api
from ferrite.codegen import print_host
from ferrite.compilation import Compilation
from ferrite.debug.dump import Dump
from ferrite.errors import FerriteError, FerriteWarning
from ferrite.lower import lower
from ferrite.options import resolve
from ferrite.passes import JOINT, POST_GRAD, PRE_GRAD, checked_options
from ferrite.pipeline import PassRecord
from ferrite.runtime import load, run_in_eager


def ferrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The backend: a graph of torch calls in, a function of the same arguments out."""
    try:
        warn_of_untested_torch()
        settings = checked_options(resolve(options, mode))
        compilation = Compilation(gm, example_inputs, settings)
        as_captured = gm.forward  # before any stage edits the graph

        def stages() -> Callable[..., Any]:
            if settings.pre_grad:
                compilation.rewrite_captured(PRE_GRAD, example_inputs)
            return capture(
                gm,
                example_inputs,
                functools.partial(compile_graph, compilation=compilation),
                settings,
                functools.partial(compilation.watch_partition, JOINT),
            )

        return compilation.attempt("capture", stages, otherwise=as_captured)
    except FerriteError as error:
        raise torch_api.through_dynamo(error) from error.__cause__


def compile_graph(graph: CapturedGraph, compilation: Compilation) -> torch_api.BoxedCallable:
    """The compiler proper. Runs once per direction; the backward graph arrives later, from an autograd thread."""

    def stages() -> torch_api.BoxedCallable:
        dump = Dump(compilation.dump_folder, graph.kind.value)
        dump.graph("captured", graph.gm)
        passes: tuple[PassRecord, ...] = ()
        if graph.kind is GraphKind.INFERENCE and compilation.options.joint:
            with compilation.stage("joint"):
                passes += compilation.rewrite(JOINT, graph, dump)
        if compilation.options.post_grad:
            with compilation.stage("post_grad"):
                passes += compilation.rewrite(POST_GRAD, graph, dump)
        with compilation.stage("lower"):
            lowered = lower(graph)
        with compilation.stage("codegen"):
            source = print_host(lowered.program)
            dump.write("host.py", source.text)
        with compilation.stage("load"):
            function = load(source, lowered.constants)
        compilation.compiled(graph, lowered.program, source.text, passes)
        return function

    return compilation.attempt_graph(graph, stages, otherwise=run_in_eager(graph.gm))


def compile(
    model: Callable[..., Any] | None = None,
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Any:
    """Compile a module or function: `torch.compile(model, backend="ferrite")` with options as keywords.

    Options are checked at once, so that a misspelt one is reported here and not at the first call. Without a model it
    is a decorator: `@ferrite.compile(strict=True)`.
    """
    if model is None:
        return functools.partial(compile, mode=mode, fullgraph=fullgraph, dynamic=dynamic, **options)
    checked_options(resolve(options, mode))
    settings = options if mode is None else {"mode": mode, **options}
    return torch.compile(model, backend=ferrite, fullgraph=fullgraph, dynamic=dynamic, options=settings)


@functools.lru_cache
def warn_of_untested_torch() -> None:
    message = torch_api.check_torch_version()
    if message is not None:
        warnings.warn(message, FerriteWarning, stacklevel=2)
