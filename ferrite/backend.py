"""The whole compiler, from top to bottom.

    ferrite          what torch.compile(..., backend="ferrite") calls, through `ferrite.api`, with each of its graphs
    rewrite_calls    the graph of torch calls: pre_grad; what passes did before is done again from the cache
    split_joint      forward and backward in one graph: joint, partition
    compile_graph    one functional graph in, one callable out: (joint,) (freeze,) post_grad, lower, schedule, codegen,
                     load; or all of that from the cache

A stage that fails costs speed, never an answer: the graph runs in eager, one warning says so, and a repro folder is
kept. With `strict` the failure is raised instead.
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from ferrite import cache
from ferrite.cache import BeforePasses, KernelCaches, KnownSizes, as_entry, edit_as, from_entry
from ferrite.capture import (
    CapturedGraph,
    GraphKind,
    Partition,
    as_python_hands_them_over,
    capture,
    mark_inputs_written_after,
    torch_api,
    torch_dynamo,
    torch_runtime,
    torch_state,
    where_inputs_lay,
)
from ferrite.codegen import Executable, Recording, named_objects, verify_host
from ferrite.collector import garbage_waits
from ferrite.debug import (
    Compilation,
    Dump,
    DumpFolder,
    GraphRecord,
    about_calls,
    about_graph,
    as_data,
    from_data,
    kernel_names,
    partition_record,
    plan_record,
)
from ferrite.errors import FerriteError, NotLowered, Refusal, warn_user
from ferrite.graph import Places, note_autocast, users_in_order
from ferrite.ir.program import Program, verify_program
from ferrite.lower import (
    call_instead,
    call_without_fuel,
    correct_forecasts,
    leave_halves,
    left_to_eager,
    lower_graph,
    no_threads,
    strides_of_outputs,
)
from ferrite.options import Options, resolve
from ferrite.passes import (
    FREEZE,
    JOINT,
    POST_GRAD,
    PRE_GRAD,
    add_values,
    all_agreed,
    captured_communication,
    check_ranks,
    checked_options,
    communication_identity,
    communication_of,
    inlined_with_record,
    numerics_checked,
    reason_to_leave,
    values_to_examples,
)
from ferrite.pipeline import PassRecord, Pipeline, devices_in, no_times
from ferrite.runtime import (
    Boxed,
    CollectiveTimes,
    Freezer,
    Frozen,
    StepTimes,
    bytecode_of,
    call_frozen,
    load_host,
    run_in_eager,
    telling_kernels,
)
from ferrite.schedule import Plan, make_plan
from ferrite.targets import (
    Refusing,
    Targets,
    Tuner,
    UncompiledOperations,
    attention_on,
    buildable,
    executable_of,
    kernel_sources,
    random_threads,
    ranges_of,
    recorders_of,
    recording_for,
    runs_of,
    steps_for_eager,
    targets_for,
    timed_runs_of,
    tuned,
    tuner_for,
    tuning_identity,
)

Passes = tuple[PassRecord, ...]


def ferrite(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
    asked_for_report: Callable[[Path], None] | None = None,
) -> Callable[..., Any]:
    """The backend: a graph of torch calls in, a function of the same arguments out. `asked_for_report`: is told where a
    page about it is to be."""
    try:
        warn_of_untested_torch()
        settings = checked_options(resolve(options, mode))
        if torch_state.called_with_fakes(gm):
            return gm.forward  # there is nothing to compute, and no memory that a kernel could write
        if settings.report is not None and asked_for_report is not None:
            asked_for_report(settings.report)
        compilation = Compilation(gm, example_inputs, settings)
        as_captured = gm.forward  # before any stage edits the graph
        if not compilation.is_wanted:
            return as_captured

        def stages() -> Callable[..., Any]:
            examples = as_python_hands_them_over(gm, example_inputs)
            where_they_lay = where_inputs_lay(gm, as_captured)
            if settings.pre_grad:
                with compilation.stage("pre_grad"), garbage_waits():
                    rewrite_calls(gm, examples, compilation)
            compiled = capture(
                gm,
                examples,
                functools.partial(compile_graph, compilation=compilation),
                settings,
                functools.partial(split_joint, compilation),
            )
            return compiled if where_they_lay is None else where_they_lay(compiled)

        return compilation.attempt("capture", stages, otherwise=as_captured)
    except FerriteError as error:
        raise torch_dynamo.through_dynamo(error) from error.__cause__


# --- the graph of torch calls -----------------------------------------------------------------------------------------


def rewrite_calls(gm: torch.fx.GraphModule, example_inputs: Sequence[Any], compilation: Compilation) -> None:
    """The passes that run before autograd has seen the graph; what they did, from the cache where it is known."""
    record, options = compilation.record, compilation.options
    if (refusal := reason_to_leave(gm)) is not None:
        record.passes["pre_grad"] = (PassRecord("pre_grad", 0.0, {}, 0, 0, refusal.reason),)
        return

    def run() -> Passes:
        dump = compilation.dump("torch")
        add_values(gm, example_inputs)
        dump.graph("captured", gm)
        dump.write("replay.json", lambda: about_calls(options))
        steps, is_inference = compilation.with_own(PRE_GRAD), not compilation.grad_enabled
        with numerics_checked(steps, gm, example_inputs, compilation.context(is_inference), compilation.keep):
            passes = compilation.run_passes(steps, gm, is_inference, dump)
        values_to_examples(gm)
        return passes

    passes, record.captured = run_or_edit(gm, options, cache.captured_key, "captured graph", run)
    record.passes["pre_grad"] = passes
    if record.captured.result == "hit":
        note_autocast(gm)


def run_or_edit(
    gm: torch.fx.GraphModule, options: Options, make_key: Callable[..., cache.Key], what: str, run: Callable[[], Passes]
) -> tuple[Passes, cache.Outcome]:
    """Run a stage of passes over a graph, or edit the graph as they did the last time; what they did, and how the
    question to the cache went."""
    store = cache.open_store(options)

    def key() -> cache.Key:
        return make_key(gm, options, sources=cache.source_digest(store))

    takes = options.report is None
    lookup = cache.look_up(store, key, what, functools.partial(edit_as, gm), options.strict, takes)
    if lookup.found is not None:
        return lookup.found, lookup.outcome
    before = BeforePasses(gm) if lookup.keeps else None
    passes = run()
    if before is not None:
        lookup.publish(functools.partial(before.entry, passes))
    return passes, lookup.outcome


# --- forward and backward in one graph --------------------------------------------------------------------------------


def split_joint(compilation: Compilation, partition: Partition) -> Partition:
    """The joint passes, then the partitioner as a stage of its own, with what it saved in the record."""

    def watched(
        joint: torch.fx.GraphModule, *args: Any, **kwargs: Any
    ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
        with compilation.stage("joint"), garbage_waits():
            refused = left_to_eager(joint) is not None  # and so is one of its halves, which then runs as it is
            correct_forecasts(joint)  # passes rest on them, and so do both halves
            rewrite_joint(joint, compilation, only_required=refused)
        with compilation.stage("partition"):
            forward, backward = partition(joint, *args, **kwargs)
        leave_halves(joint, (forward, backward))
        compilation.record.saved = partition_record(forward, backward)
        return forward, backward

    return watched


def rewrite_joint(joint: torch.fx.GraphModule, compilation: Compilation, only_required: bool) -> None:
    """The joint passes on forward and backward, from the cache where it is known what they do."""
    record, options = compilation.record, compilation.options
    mark_inputs_written_after(joint.graph)

    def run() -> Passes:
        runs = options.joint and not only_required
        dump = compilation.dump("joint") if runs else Dump(DumpFolder(None), "joint")
        dump.graph("captured", joint)
        steps = compilation.with_own(JOINT) if runs else JOINT.only_required()
        return compilation.run_passes(steps, joint, False, dump)

    record.passes["joint"], record.joint = run_or_edit(joint, options, cache.joint_key, "joint graph", run)
    users_in_order(joint.graph)


# --- one functional graph ---------------------------------------------------------------------------------------------


def compile_graph(captured: CapturedGraph, compilation: Compilation) -> torch_api.BoxedCallable:
    """The compiler proper. Runs once per direction; the backward graph arrives later, from an autograd thread."""

    def stages() -> Boxed:
        if (refusal := left_to_eager(captured.gm)) is not None:
            return compilation.left_in_eager(captured, (), refusal)
        graph = as_in_eager(captured)
        dump = compilation.dump(graph.kind.value)
        dump.graph("captured", graph.gm)
        dump.write("replay.json", lambda: about_graph(graph, compilation.options))
        joint = (JOINT,) if graph.kind is GraphKind.INFERENCE and compilation.options.joint else ()
        if graph.parameters:  # what they become is decided before the cache is asked
            return compile_frozen(graph, compilation, dump, rewrite(joint, graph, compilation, dump))
        return compile_passed(graph, compilation, dump, (), joint)

    with garbage_waits():
        return compilation.attempt_graph(captured, stages, otherwise=run_in_eager(captured.gm))


def as_in_eager(graph: CapturedGraph) -> CapturedGraph:
    """The graph with forecasts, and strides of its outputs, that are eager's."""
    correct_forecasts(graph.gm)
    return replace(graph, output_strides=strides_of_outputs(graph.gm, graph.output_strides))


def rewrite(pipelines: Sequence[Pipeline], graph: CapturedGraph, compilation: Compilation, dump: Dump) -> Passes:
    """Run stages of passes over a graph, with the users' own in their places."""
    done: Passes = ()
    for pipeline in pipelines:
        with compilation.stage(pipeline.name):
            steps = compilation.with_own(pipeline)
            done += compilation.run_passes(steps, graph.gm, graph.kind is GraphKind.INFERENCE, dump)
    return done


def compile_passed(
    graph: CapturedGraph, compilation: Compilation, dump: Dump, before: Passes, joint: tuple[Pipeline, ...] = ()
) -> Boxed:
    """From the passes that are left to a function. `before`: what was done to the graph so far; `joint`: the stage that
    comes first, if it is still to come."""
    options = compilation.options
    targets = targets_for(options, devices_in(graph.gm.graph))
    with compilation.stage("cache"):
        store, places = cache.open_store(options), Places(graph.gm)  # as it was captured: stages edit it

    def key() -> cache.Key:
        more = {
            "first stage": "joint" if joint else "post_grad",
            "tuning": tuning_identity(options),
            "communication": communication_identity(graph.gm.graph, options),
        }
        sources, machines = cache.source_digest(store), "; ".join(target.identity() for target in targets.values())
        return cache.graph_key(graph, options, target=machines or "any", sources=sources, more=more)

    def read(artifact: cache.Artifact) -> tuple[Boxed, GraphRecord]:
        executable, objects, data = from_entry(artifact, places)
        record = from_data(data, places, graph.kind.value, executable.source.commented)
        return loaded(executable, objects, targets, graph, record, compilation), record

    with compilation.stage("cache"):
        takes = options.report is None
        lookup = cache.look_up(store, key, f"{graph.kind.value} graph", read, options.strict, takes)
    if lookup.found is not None and agrees_with_others(lookup.found[1], options):
        function, record = lookup.found
        return compilation.finished(function, record, before, lookup.outcome)
    with compilation.stage("cache"):
        known, index = (KnownSizes(graph.gm), places.index()) if lookup.keeps else (None, None)
        kernels = KernelCaches(store)
    here = buildable(targets)
    recording = recording_of(graph, here, options)
    known_threads = random_threads if recording is None else no_threads  # a recording knows torch's kernels alone
    tuner = tuner_for(options, here)
    compilation.times = tuner or no_times
    captured = captured_communication(graph.gm, options)
    passes = rewrite((*joint, POST_GRAD) if options.post_grad else joint, graph, compilation, dump)
    communication = communication_of(graph.gm, options, captured)
    if tuner is not None and options.report is not None:
        compilation.record.tuning |= tuner.asked
    if options.fuel_stage == "lower":
        call_without_fuel(graph.gm.graph, compilation.fuel("lower"))
    while True:
        with compilation.stage("lower"):
            try:
                lowered = lower_graph(graph, here, known_threads, attention_on(here, options))
            except NotLowered as refused:  # a number that Python alone computes, and it does so between operators
                return compilation.left_in_eager(graph, before + passes, refused.refusal)
            if options.strict:
                verify_program(lowered.program)
            dump.lowered(lowered)
        plan, executable = scheduled(lowered.program, here, kernels, compilation, dump, recording, tuner)
        if not call_instead(graph.gm.graph, steps_for_eager(plan, here)):
            break
    with compilation.stage("codegen"):
        source = verify_host(executable.source, lowered.objects)
        sources = functools.partial(kernel_sources, plan, here, options.check_bounds)
        dump.generated(graph, lowered.program, plan, executable, here, sources)
    with compilation.stage("load"):
        objects = named_objects(source, lowered.objects)
        source.bytecode = bytecode_of(source, objects)
        record = plan_record(graph, plan, source, passes, communication)
        function = loaded(executable, objects, here, graph, record, compilation, dump.measured(options.measure))
    if communication is not None:
        check_ranks(communication, record.kind, record.line, options)
    with compilation.stage("cache"):
        if known is not None and index is not None:
            uncompiled = Refusal("it was not compiled to kernels") if here != targets else None
            refusal = uncompiled or known.reason_to_forget(passes)
            note = "; ".join(kernels.problems)
            lookup.publish(lambda: as_entry(executable, objects, as_data(record, index), index, refusal, note))
    return compilation.finished(function, record, before, lookup.outcome)


def loaded(
    executable: Executable,
    objects: Mapping[str, Any],
    targets: Targets,
    graph: CapturedGraph,
    record: GraphRecord,
    compilation: Compilation,
    times: StepTimes | None = None,
) -> Boxed:
    """The function of what was compiled, now or before. `times`: what its kernels and calls are measured by."""
    recorders = recorders_of(executable, targets)
    compilation.record.recordings += [recorder.counts for recorder in recorders]
    runs = runs_of(executable, targets) if times is None else timed_runs_of(executable, targets, times)
    ranges = ranges_of(executable, targets, runs, functools.partial(kernel_names, record.kernels))
    watch = None if times is None else times.call
    collectives = CollectiveTimes()
    if record.communication is not None and torch_runtime.store_of_job() is not None:  # else ranks are imagined
        compilation.record.collective_times.append((record.communication, collectives))
    return load_host(executable.source, runs, objects, recorders, run_in_eager(graph.gm), ranges, watch, collectives)


def agrees_with_others(record: GraphRecord, options: Options) -> bool:
    """Whether a program from the cache sends what the programs of other ranks expect."""
    communication = record.communication
    if communication is None:
        return True
    if not all_agreed(communication.decisions):
        return False
    check_ranks(communication, record.kind, record.line, options)
    return True


def recording_of(graph: CapturedGraph, targets: Targets, options: Options) -> Recording | None:
    """What of a graph may be recorded as CUDA graphs."""
    lends = graph.kind is GraphKind.BACKWARD and options.recorded_gradients == "lent"
    return recording_for(targets, kept_for_backward(graph), lends) if options.cuda_graphs else None


def kept_for_backward(graph: CapturedGraph) -> list[int]:
    """Results of a forward graph that only the backward graph sees."""
    output = graph.gm.graph.output_node()
    places = range(len(graph.output_strides)) if graph.kind is GraphKind.FORWARD else ()
    return [place for place in places if torch_api.is_saved_for_backward(output, place)]


def scheduled(
    program: Program,
    targets: Targets,
    kernels: KernelCaches,
    compilation: Compilation,
    dump: Dump,
    recording: Recording | None = None,
    tuner: Tuner | None = None,
) -> tuple[Plan, Executable]:
    """A plan, and its kernels compiled, arranged as was measured to be fastest. Where a code generator has nothing for
    a kernel, there is another plan, in which its operations are kernels of their own, or else steps."""
    options, failed = compilation.options, defaultdict[frozenset[str], list[Refusal]](list)
    fuel = compilation.fuel("schedule")
    level = fuel.level
    while True:
        with compilation.stage("schedule"):
            fuel.refill(level)
            schedulings = {device: Refusing(tuned(target, tuner), failed) for device, target in targets.items()}
            plan = make_plan(program, schedulings, verify=options.strict, fuel=fuel, observe=dump.schedule)
            dump.write("kernels.py", plan.kernel_text)
        with compilation.stage("codegen"), telling_kernels(compilation.watch.kernels):
            try:
                return plan, executable_of(plan, targets, kernels, options.check_bounds, recording)
            except UncompiledOperations as reason:
                for written, why in reason.reasons.items():
                    failed[written].append(why)


def compile_frozen(graph: CapturedGraph, compilation: Compilation, dump: Dump, before: Passes) -> Boxed:
    """The function over all inputs of a graph, parameters too, with parameters as constants: compiled again for others
    if they change, from the graph as it was captured, without Dynamo and AOTAutograd."""

    def freeze(graph: CapturedGraph, dump: Dump) -> Frozen:
        with compilation.stage("freeze"):
            inlined, made = inlined_with_record(graph)
        done = rewrite((FREEZE,), inlined.graph, compilation, dump)
        function = compile_passed(inlined.graph, compilation, dump, (*before, made, *done))
        return freezer.frozen(function, inlined.kept, inlined.frozen)

    def freeze_again(graph: CapturedGraph, otherwise: Frozen) -> Frozen:
        dump = compilation.dump(graph.kind.value)
        return compilation.attempt_graph(graph, lambda: freeze(graph, dump), otherwise)

    def compile_live(graph: CapturedGraph) -> Boxed:
        """With its parameters as inputs."""
        dump = compilation.dump(graph.kind.value)
        work = functools.partial(compile_passed, graph, compilation, dump, before)
        return compilation.attempt_graph(graph, work, otherwise=run_in_eager(graph.gm))

    discards = compilation.options.freeze_discard_parameters
    freezer = Freezer(graph, freeze_again, compile_live, compilation.record.line, discards)
    return call_frozen(freeze(graph, dump), freezer.freeze_again, freezer.run_live)


@functools.lru_cache
def warn_of_untested_torch() -> None:
    message = torch_api.check_torch_version()
    if message is not None:
        warn_user(message)
