"""The whole compiler, as one short function over its stages.

    ferrite        what torch.compile(..., backend="ferrite") calls, through `ferrite.door`, with each graph of Dynamo's
    compile_graph  one functional graph in, one callable out: (joint,) (freeze,) post_grad, lower, (schedule,) codegen,
                   load
    compile        torch.compile with ferrite's options as keywords
    freeze         the same for inference with parameters that no longer change

A stage that fails costs speed, never an answer: the graph runs in eager, one warning says so, and a repro folder is
kept. With `strict` the failure is raised instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from ferrite import door, native
from ferrite.artifact import Compiled
from ferrite.cached import through_cache
from ferrite.capture import CapturedGraph, GraphKind, capture, torch_api, torch_state
from ferrite.capture.aot import Partition
from ferrite.codegen import print_host
from ferrite.codegen.host_laws import verify_host
from ferrite.collector import garbage_waits
from ferrite.compilation import Compilation
from ferrite.debug.dump import Dump
from ferrite.errors import FerriteError, UserError, layout, warn_user
from ferrite.frozen import compile_frozen
from ferrite.ir.laws import verify_program
from ferrite.lower import UnknownSize, correct_forecasts, lower, lower_graph, strides_of_outputs
from ferrite.options import resolve
from ferrite.passes import JOINT, POST_GRAD, PRE_GRAD, checked_options
from ferrite.pipeline import PassRecord
from ferrite.runtime import load, run_in_eager, run_program
from ferrite.runtime.kernels import KernelCache

# A stage of passes over a graph.
Rewrite = Callable[[CapturedGraph, Compilation, Dump], tuple[PassRecord, ...]]


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
        if torch_state.called_with_fakes(gm):
            return gm.forward  # there is nothing to compute, and no memory that a kernel could write
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
                lambda partition: with_strides_of_eager(compilation.watch_partition(JOINT, partition)),
            )

        return compilation.attempt("capture", stages, otherwise=as_captured)
    except FerriteError as error:
        raise torch_api.through_dynamo(error) from error.__cause__


def with_strides_of_eager(partition: Partition) -> Partition:
    """A partition of a joint graph whose forecasts are eager's: passes rest on them, and so do both halves."""

    def corrected(joint: torch.fx.GraphModule, *args: Any, **kwargs: Any) -> torch_api.Parts:
        correct_forecasts(joint)
        return partition(joint, *args, **kwargs)

    return corrected


def as_in_eager(graph: CapturedGraph) -> CapturedGraph:
    """The graph with forecasts, and strides of its outputs, that are eager's."""
    correct_forecasts(graph.gm)
    return replace(graph, output_strides=strides_of_outputs(graph.gm, graph.output_strides))


def compile_graph(captured: CapturedGraph, compilation: Compilation) -> torch_api.BoxedCallable:
    """The compiler proper. Runs once per direction; the backward graph arrives later, from an autograd thread."""

    def stages() -> torch_api.BoxedCallable:
        graph = as_in_eager(captured)
        dump = Dump(compilation.dump_folder, graph.kind.value)
        dump.graph("captured", graph.gm)
        if graph.parameters:  # what they become is decided before the cache is asked
            return compile_frozen(graph, compilation, dump, joint(graph, compilation, dump), finish)
        return finish(graph, compilation, dump, (), joint)

    with garbage_waits():
        return compilation.attempt_graph(captured, stages, otherwise=run_in_eager(captured.gm))


def joint(graph: CapturedGraph, compilation: Compilation, dump: Dump) -> tuple[PassRecord, ...]:
    """The joint passes on a graph that never was part of a joint graph."""
    if graph.kind is not GraphKind.INFERENCE or not compilation.options.joint:
        return ()
    with compilation.stage("joint"):
        return compilation.rewrite(JOINT, graph, dump)


def finish(
    graph: CapturedGraph,
    compilation: Compilation,
    dump: Dump,
    passes: tuple[PassRecord, ...],
    first: Rewrite | None = None,
) -> torch_api.BoxedCallable:
    """The stages that every graph goes through; `passes` is what was done to it before, `first` what is to be done
    before them."""

    def stages(kernels: KernelCache | None) -> Compiled | torch_api.BoxedCallable:
        done = first(graph, compilation, dump) if first is not None else ()
        if compilation.options.post_grad:
            with compilation.stage("post_grad"):
                done += compilation.rewrite(POST_GRAD, graph, dump)
        if compilation.options.executor == "interpreter":
            return interpreted(graph, compilation, dump, passes + done)
        if compilation.options.executor == "native":
            try:
                found = compile_native(graph, compilation, dump, done, kernels)
            except UnknownSize as unknown:  # a number that Python alone computes: the host does, between calls
                return called(graph, compilation, dump, passes + done, str(unknown))
            if found is not None:
                return found
        return called(graph, compilation, dump, passes + done)

    if compilation.options.executor == "native":
        return through_cache(graph, compilation, passes, "joint" if first is not None else "post_grad", stages)
    function = stages(None)
    assert not isinstance(function, Compiled)
    return function


def called(
    graph: CapturedGraph, compilation: Compilation, dump: Dump, passes: tuple[PassRecord, ...], *reason: str
) -> torch_api.BoxedCallable:
    """The graph as a program of calls."""
    with compilation.stage("lower"):
        lowered = lower(graph, *reason)
    with compilation.stage("codegen"):
        source = print_host(lowered.program)
        dump.write("host.py", source.text)
    with compilation.stage("load"):
        function = load(source, lowered.constants)
    compilation.compiled(graph, lowered.program, source.text, passes)
    return function


def compile_native(
    graph: CapturedGraph,
    compilation: Compilation,
    dump: Dump,
    passes: tuple[PassRecord, ...],
    kernels: KernelCache | None,
) -> Compiled | None:
    """The graph as kernels of native code; None where it is not for this processor."""
    if not llvm_is_here():
        return None
    with compilation.stage("lower"):
        lowered = lower_graph(graph)
        if not native.on_cpu(lowered.program):
            return None
        if compilation.options.strict:
            verify_program(lowered.program)
        dump.write("program.py", lambda: str(lowered.program))
    with compilation.stage("schedule"):
        plan = native.schedule(lowered.program, compilation.options.strict)
    with compilation.stage("codegen"):
        code = native.generate(plan, kernels, compilation.options.check_bounds)
        verify_host(code.source, lowered.objects)
        dump.write("host.py", code.source.commented)
    return Compiled(code, lowered.objects, compilation.native_record(graph, plan, code.source.commented, passes))


@functools.lru_cache
def llvm_is_here() -> bool:
    """Whether kernels can be compiled; where they cannot, that is said once."""
    try:
        import llvmlite.binding  # noqa: F401  # only here: a program of calls does not need it
    except (ImportError, OSError) as problem:
        facts = {
            "because": f"{type(problem).__name__}: {problem}",
            "what happens": "operators run one by one, as in eager",
            "to change that": "pip install llvmlite",
            "to say no more": 'torch.compile(..., options={"executor": "calls"})',
        }
        headline = "ferrite: without llvmlite nothing is compiled to kernels"
        warn_user(layout(headline, facts))
        return False
    return True


def interpreted(
    graph: CapturedGraph, compilation: Compilation, dump: Dump, passes: tuple[PassRecord, ...]
) -> torch_api.BoxedCallable:
    """The graph as a loop program, run by the slow interpreter."""
    with compilation.stage("lower"):
        lowered = lower_graph(graph)
        if compilation.options.strict:
            verify_program(lowered.program)
        text = str(lowered.program)
        dump.write("program.py", text)
    compilation.lowered(graph, lowered.program, text, passes)
    return run_program(lowered.program, lowered.objects)


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
    return torch.compile(model, backend=door.ferrite, fullgraph=fullgraph, dynamic=dynamic, options=settings)


def freeze(
    model: Callable[..., Any],
    *,
    mode: str | None = None,
    fullgraph: bool = False,
    dynamic: bool | None = None,
    **options: Any,
) -> Callable[..., Any]:
    """A function that does what the model does in inference, with its parameters as constants: see docs/freezing.md.

    It runs without gradients. The model itself stays as it is, unless `freeze_discard_parameters=True` says otherwise.
    """
    training = [name or "the module itself" for name, each in modules_of(model) if each.training]
    if training:
        raise UserError(
            "a model in training mode cannot be frozen",
            {"in training mode": ", ".join(training[:3]), "to change that": "model.eval()"},
        )
    compiled = compile(model, mode=mode, fullgraph=fullgraph, dynamic=dynamic, **{**options, "freeze": True})

    @functools.wraps(model, updated=())
    def frozen(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return compiled(*args, **kwargs)

    return frozen


def modules_of(model: Callable[..., Any]) -> list[tuple[str, torch.nn.Module]]:
    return list(model.named_modules()) if isinstance(model, torch.nn.Module) else []


@functools.lru_cache
def warn_of_untested_torch() -> None:
    message = torch_api.check_torch_version()
    if message is not None:
        warn_user(message)
