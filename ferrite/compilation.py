"""One call of the compiler: its options, its record, and what happens when a stage fails.

The stages know nothing of this. `backend.py` runs them inside `attempt`, which turns an exception into the promised
behaviour: with `strict` a CompilerBug; otherwise one warning, a kept repro folder, and the graph in eager.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from ferrite.capture import CapturedGraph, GraphKind, torch_api, torch_state
from ferrite.capture.aot import Partition
from ferrite.captured import rewritten, rewritten_joint
from ferrite.debug import repro
from ferrite.debug.dump import Dump, DumpFolder
from ferrite.debug.memory import memory_record
from ferrite.debug.partition import partition_record
from ferrite.debug.record import CompileRecord, EagerCall, GraphRecord, Kernel, start_record
from ferrite.errors import CompilerBug, FerriteError, layout
from ferrite.graph import ModelLine, first_model_line, model_line
from ferrite.graph.regions import WRITTEN_AFTER
from ferrite.ir import Constant, HostProgram
from ferrite.ir.program import Program, call_of
from ferrite.options import Options
from ferrite.passes.pre_grad import add_values, reason_to_leave, values_to_examples
from ferrite.passes.pre_grad.numeric_check import numerics_checked
from ferrite.pipeline import Fuel, PassContext, PassRecord, Pipeline, run_pipeline
from ferrite.pipeline.report import warn_at, warn_of_failed_pass
from ferrite.schedule.steps import Launch, Plan, Run

Result = TypeVar("Result")
TO_STOP = 'torch.compile(..., options={"strict": True})'
PASSING: tuple[type[BaseException], ...] = (FerriteError, *torch_api.CONTROL_FLOW)


class Compilation:
    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        self.gm = gm
        self.inputs = repro.describe_inputs(example_inputs)
        self.grad_enabled = torch.is_grad_enabled()
        self.options = options
        self.record: CompileRecord = start_record(options, first_model_line(gm.graph.nodes))
        self.dump_folder = DumpFolder(options.dump_dir)
        self.lock = threading.RLock()  # two threads may need the same backward graph at once

    # --- running stages -----------------------------------------------------------------------------------------------

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and remember its name on an exception that leaves it."""
        with self.record.timing(name):
            try:
                if self.options.fail_at == name:
                    raise RuntimeError(f"asked to fail at {name!r} by the option fail_at")
                yield
            except Exception as failure:
                if not hasattr(failure, "ferrite_stage"):
                    failure.ferrite_stage = name  # type: ignore[attr-defined]
                raise

    def attempt(self, stage: str, work: Callable[[], Result], otherwise: Result) -> Result:
        """Run a stage over the whole captured function; `otherwise` is its eager form."""
        try:
            with self.stage(stage):
                return work()
        except PASSING:
            raise
        except Exception as failure:
            self.failed(failure, None)
            return otherwise

    def attempt_graph(self, graph: CapturedGraph, work: Callable[[], Result], otherwise: Result) -> Result:
        """Run the stages that compile one functional graph; `otherwise` is its eager form."""
        with self.lock:
            try:
                return work()
            except FerriteError:
                raise
            except Exception as failure:
                self.failed(failure, graph)
                return otherwise

    def watch_partition(self, pipeline: Pipeline, partition: Partition) -> Partition:
        """The joint passes, then the partitioner as a stage of its own, with what it saved in the record."""

        def watched(
            joint: torch.fx.GraphModule, *args: Any, **kwargs: Any
        ) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
            with self.stage("joint"):
                mark_inputs_written_after(joint.graph)
                stage = functools.partial(self.run_joint, pipeline, joint)
                self.record.passes["joint"], self.record.joint = rewritten_joint(joint, self.options, stage)
            with self.stage("partition"):
                forward, backward = partition(joint, *args, **kwargs)
            self.record.saved = partition_record(forward, backward, target_text)
            return forward, backward

        return watched

    def run_joint(self, pipeline: Pipeline, joint: torch.fx.GraphModule) -> tuple[PassRecord, ...]:
        dump = Dump(self.dump_folder if self.options.joint else DumpFolder(None), "joint")
        dump.graph("captured", joint)
        steps = self.with_own(pipeline) if self.options.joint else pipeline.only_required()
        return self.run(steps, joint, False, dump)

    # --- results ------------------------------------------------------------------------------------------------------

    def rewrite_captured(self, pipeline: Pipeline, example_inputs: Sequence[Any]) -> None:
        """Run the stage of passes on the graph of torch calls, before autograd has seen it."""
        with self.stage("pre_grad"):
            note = reason_to_leave(self.gm)
            if note:
                self.record.passes["pre_grad"] = (PassRecord("pre_grad", 0.0, {}, 0, 0, note),)
                return
            stage = functools.partial(self.run_captured, pipeline, example_inputs)
            self.record.passes["pre_grad"], self.record.captured = rewritten(self.gm, self.options, stage)

    def run_captured(self, pipeline: Pipeline, example_inputs: Sequence[Any]) -> tuple[PassRecord, ...]:
        dump = Dump(self.dump_folder, "torch")
        add_values(self.gm, example_inputs)
        dump.graph("captured", self.gm)
        steps, context = self.with_own(pipeline), self.context(not self.grad_enabled)
        with numerics_checked(steps, self.gm, example_inputs, context, self.keep):
            done = self.run(steps, self.gm, not self.grad_enabled, dump)
        values_to_examples(self.gm)
        return done

    def keep(self, graphs: Mapping[str, torch.fx.GraphModule]) -> str | None:
        """Write graphs down that the numeric check found; where."""
        own = None if self.options.dump_dir is not None else self.options.cache_folder()
        root = DumpFolder(self.options.dump_dir or self.options.cache_folder() / "numeric_check", own)
        dump = Dump(root, "check")
        for name, gm in graphs.items():
            dump.graph(name, gm)
        return str(root.path / dump.name) if root.path is not None else None

    def context(self, is_inference: bool) -> PassContext:
        return PassContext(self.options, is_inference, Fuel(self.options.fuel))

    def run(
        self, pipeline: Pipeline, gm: torch.fx.GraphModule, is_inference: bool, dump: Dump
    ) -> tuple[PassRecord, ...]:
        context = self.context(is_inference)
        return tuple(run_pipeline(pipeline, gm, context, self.pass_failed, dump.after_pass))

    def with_own(self, pipeline: Pipeline) -> Pipeline:
        """A stage with the users' own passes in their places."""
        return pipeline.with_passes([step for step in self.options.passes if step.stage == pipeline.name])

    def rewrite(self, pipeline: Pipeline, graph: CapturedGraph, dump: Dump) -> tuple[PassRecord, ...]:
        """Run a stage of passes over a graph, with the users' own in their places."""
        return self.run(self.with_own(pipeline), graph.gm, graph.kind is GraphKind.INFERENCE, dump)

    def pass_failed(self, name: str, problem: Exception) -> None:
        warn_of_failed_pass(name, problem, failing_line(problem) or self.record.line, TO_STOP)

    def compiled(self, graph: CapturedGraph, program: HostProgram, source: str, passes: tuple[PassRecord, ...]) -> None:
        calls = tuple(EagerCall(operator_text(call.operator), call.reason, call.line) for call in program.calls)
        self.record.add(
            GraphRecord(
                kind=graph.kind.value,
                line=first_model_line(graph.gm.graph.nodes),
                operators=len(calls),
                inputs=tuple(f"{item.name}: {item.about}" for item in program.inputs),
                source=source,
                kernels=(),
                eager_calls=calls,
                passes=passes,
            )
        )

    def lowered(self, graph: CapturedGraph, program: Program, source: str, passes: tuple[PassRecord, ...]) -> None:
        """Record a graph that became a loop program."""
        calls = [(call, item.origin) for item in program.operations if (call := call_of(item)) is not None]
        kernels = tuple(
            Kernel(type(operation).__name__.lower(), operation.origin.nodes, lines_of(operation.origin.line))
            for operation in program.operations
            if call_of(operation) is None
        )
        self.record.add(
            GraphRecord(
                kind=graph.kind.value,
                line=first_model_line(graph.gm.graph.nodes),
                operators=len(program.operations),
                inputs=tuple(map(str, program.inputs)),
                source=source,
                kernels=kernels,
                eager_calls=tuple(EagerCall(operator_text(call.operator), call.reason, at.line) for call, at in calls),
                passes=passes,
            )
        )

    def native_record(self, graph: CapturedGraph, plan: Plan, text: str, passes: tuple[PassRecord, ...]) -> GraphRecord:
        """The record of a graph that became native code."""
        program = plan.program
        calls = [(call, item.origin) for item in program.operations if (call := call_of(item)) is not None]
        eager = [EagerCall(operator_text(call.operator), call.reason, at.line) for call, at in calls]
        for place, reason in plan.alone.items():
            step = plan.steps[place]
            assert not isinstance(step, Run)
            eager.append(
                EagerCall(", ".join(step.origin.nodes) or type(step).__name__.lower(), reason, step.origin.line)
            )
        kernels = tuple(
            Kernel(launch.name, nodes_of_launch(launch), lines_of_launch(launch), region)
            for launch, region in zip(plan.launches, plan.regions, strict=True)
        )
        return GraphRecord(
            kind=graph.kind.value,
            line=first_model_line(graph.gm.graph.nodes),
            operators=len(program.operations),
            inputs=tuple(map(str, program.inputs)),
            source=text,
            kernels=kernels,
            eager_calls=tuple(eager),
            passes=passes,
            not_fused=plan.refusals,
            memory=memory_record(graph.gm, plan),
        )

    def failed(self, failure: Exception, graph: CapturedGraph | None) -> None:
        """Keep a repro; raise if strict; otherwise warn and record that the graph runs in eager."""
        self.forget_entries()
        stage = getattr(failure, "ferrite_stage", "capture")
        line = failing_line(failure) or self.record.line
        cause = failure.__cause__ or failure
        because = f"{type(cause).__name__}: {cause}"
        bug = repro.Failure(stage, because, graph, failure)
        folder = repro.keep(bug, self.gm, self.inputs, self.grad_enabled, self.options)
        facts = {
            "in your model": str(line) if line is not None else None,
            "because": because,
            "kept": f"{folder}  (please attach this folder to a report)" if folder else None,
        }
        if self.options.strict:
            raise CompilerBug(f"stage {stage!r} failed", facts, stage=stage, cause=cause, repro=folder) from cause
        facts["what happens"] = "this graph runs in eager: right, but not compiled"
        facts["to stop on it"] = TO_STOP
        warn_at(line, layout(f"ferrite: stage {stage!r} failed", facts))
        self.record.add(eager_record(graph, self.gm, stage, because))

    def forget_entries(self) -> None:
        """What passes did to the graphs came from the cache, perhaps, and may be what is wrong: next time they run."""
        for outcome in (self.record.captured, self.record.joint):
            if outcome is not None and outcome.result == "hit" and outcome.store is not None:
                assert outcome.key is not None
                outcome.store.discard(outcome.key)


def nodes_of_launch(launch: Launch) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for operation in launch.operations for node in operation.origin.nodes))


def lines_of_launch(launch: Launch) -> tuple[ModelLine, ...]:
    return tuple(dict.fromkeys(item.origin.line for item in launch.operations if item.origin.line is not None))


def lines_of(line: ModelLine | None) -> tuple[ModelLine, ...]:
    return () if line is None else (line,)


def mark_inputs_written_after(joint: torch.fx.Graph) -> None:
    """Let rewrites know what no node shows: that some inputs will hold other values in the backward part."""
    for node in torch_state.inputs_written_after(joint):
        node.meta[WRITTEN_AFTER] = True


def eager_record(graph: CapturedGraph | None, gm: torch.fx.GraphModule, stage: str, because: str) -> GraphRecord:
    """The record of a graph that runs in eager whole."""
    nodes = (graph.gm if graph is not None else gm).graph.nodes
    reason = f"stage {stage!r} failed"
    calls = tuple(
        EagerCall(target_text(node.target), reason, model_line(node)) for node in nodes if node.op.startswith("call_")
    )
    return GraphRecord(
        kind=graph.kind.value if graph is not None else "captured",
        line=first_model_line(nodes),
        operators=len(calls),
        inputs=tuple(node.name for node in nodes if node.op == "placeholder"),
        source="",
        kernels=(),
        eager_calls=calls,
        failure=f"{reason}: {because}",
    )


def failing_line(failure: BaseException | None) -> ModelLine | None:
    """The model line of the node that was being worked on, if the failure or what caused it knows one."""
    while failure is not None:
        node = getattr(failure, "node", None)
        if isinstance(node, torch.fx.Node):
            return model_line(node)
        failure = failure.__cause__
    return None


def target_text(target: Any) -> str:
    """How a person would write what a node calls: `aten.add.Tensor`, `operator.gt`, `sum`."""
    name = torch_api.operator_name(target) or str(getattr(target, "__name__", target))
    module = str(getattr(target, "__module__", None) or "").lstrip("_")
    return f"operator.{name}" if module == "operator" else name


def operator_text(operator: str | Constant) -> str:
    return operator.name if isinstance(operator, Constant) else operator
