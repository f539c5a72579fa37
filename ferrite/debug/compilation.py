"""One call of the compiler, watched: its options, its record, its dump, and what happens when a stage fails.

The stages know nothing of this. `backend.py` runs them inside `attempt`, which turns an exception into the promised
behaviour: with `strict` a CompilerBug; otherwise one warning, a kept repro folder, and the graph in eager.
"""

from __future__ import annotations

import logging
import shlex
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import torch

from ferrite.cache import Outcome
from ferrite.capture import CapturedGraph, torch_dynamo
from ferrite.debug import repro
from ferrite.debug.details import GraphDetails
from ferrite.debug.dump import Dump, DumpFolder
from ferrite.debug.graph_record import eager_record
from ferrite.debug.progress import CompilationProgress, log
from ferrite.debug.record import CompileRecord, GraphRecord, forget_record, start_record
from ferrite.errors import CompilerBug, FerriteError, Refusal, layout
from ferrite.graph import ModelLine, first_model_line, model_line
from ferrite.options import Options
from ferrite.pipeline import (
    Fuel,
    PassContext,
    PassRecord,
    Pipeline,
    Times,
    no_times,
    run_pipeline,
    warn_at,
    warn_of_failed_pass,
)
from ferrite.runtime import Boxed, run_in_eager

Result = TypeVar("Result")
TO_STOP = 'torch.compile(..., options={"strict": True})'
PASSING: tuple[type[BaseException], ...] = (FerriteError, *torch_dynamo.CONTROL_FLOW)


class Compilation:
    def __init__(self, gm: torch.fx.GraphModule, example_inputs: Sequence[Any], options: Options) -> None:
        self.gm = gm
        self.inputs = repro.describe_inputs(example_inputs)
        self.grad_enabled = torch.is_grad_enabled()
        self.options = options
        self.record: CompileRecord = start_record(options, first_model_line(gm.graph.nodes), self.inputs.dynamic)
        if options.report is not None:
            self.record.capture = torch_dynamo.about_capture()
        self.watch = CompilationProgress(options, self.record.line)
        self.fuels: dict[str, Fuel] = {}  # where one stage has some
        self.dump_folder = DumpFolder(options.dump_dir)
        self.times: Times = no_times  # of matrix products: what passes may ask for
        self.lock = threading.RLock()  # two threads may need the same backward graph at once
        self.say("graph %d was captured: %s", self.record.number, self.record.line)

    # --- running stages -----------------------------------------------------------------------------------------------

    @property
    def is_wanted(self) -> bool:
        """Whether this graph is to be compiled at all."""
        return self.options.compiles(self.record.number)

    def say(self, message: str, *about: object, level: int = logging.DEBUG) -> None:
        """A line for the log, with this object for handlers that want to know more."""
        if log.isEnabledFor(level):
            log.log(level, message, *about, extra={"compilation": self})

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time a stage, and remember its name on an exception that leaves it."""
        around = self.watch.stage
        with self.record.timing(name):
            self.watch.at(name)
            try:
                if self.options.fail_at == name:
                    raise RuntimeError(f"asked to fail at {name!r} by the option fail_at")
                yield
            except Exception as failure:
                if not hasattr(failure, "ferrite_stage"):
                    failure.ferrite_stage = name  # type: ignore[attr-defined]
                raise
            finally:
                self.watch.back_in(around)
        self.say("graph %d: %s, %.1f ms so far", self.record.number, name, self.record.stages[name] * 1e3)

    def attempt(self, stage: str, work: Callable[[], Result], otherwise: Result) -> Result:
        """Run a stage over the whole captured function; `otherwise` is its eager form."""
        try:
            with self.watch.watching(), self.stage(stage):
                return work()
        except PASSING as signal:
            if isinstance(signal, torch_dynamo.RESTARTS):  # the same graph will come again, as Dynamo then sees it
                forget_record(self.record)
            raise
        except Exception as failure:
            self.failed(failure, None)
            return otherwise

    def attempt_graph(self, graph: CapturedGraph, work: Callable[[], Result], otherwise: Result) -> Result:
        """Run the stages that compile one functional graph; `otherwise` is its eager form."""
        with self.lock:
            try:
                with self.watch.watching():
                    return work()
            except FerriteError:
                raise
            except Exception as failure:
                self.failed(failure, graph)
                return otherwise

    def dump(self, kind: str) -> Dump:
        details = None
        if self.options.report is not None:
            details = GraphDetails(kind)
            self.record.details.append(details)
        dump = Dump(self.dump_folder, kind, details)
        if self.dump_folder.path is not None:
            self.record.dumps.append(str(self.dump_folder.path / dump.name))
        return dump

    # --- passes -------------------------------------------------------------------------------------------------------

    def fuel(self, stage: str) -> Fuel:
        """What a stage may still do: for each graph anew, or for all graphs of the one stage that is asked for."""
        if self.options.fuel_stage is None:
            return Fuel(self.options.fuel if stage != "lower" else None)
        amount = self.options.fuel if self.options.fuel_stage == stage else None
        return self.fuels.setdefault(stage, Fuel(amount))

    def context(self, is_inference: bool, stage: str = "") -> PassContext:
        return PassContext(self.options, is_inference, self.fuel(stage), times=self.times)

    def with_own(self, pipeline: Pipeline) -> Pipeline:
        """A stage with the users' own passes in their places."""
        return pipeline.with_passes([step for step in self.options.passes if step.stage == pipeline.name])

    def run_passes(
        self, pipeline: Pipeline, gm: torch.fx.GraphModule, is_inference: bool, dump: Dump
    ) -> tuple[PassRecord, ...]:
        context = self.context(is_inference, pipeline.name)
        dump.stage = pipeline.name
        context.refused = None if dump.details is None else dump.details.refused
        return tuple(run_pipeline(pipeline, gm, context, self.pass_failed, dump.after_pass))

    def pass_failed(self, name: str, problem: Exception) -> None:
        warn_of_failed_pass(name, problem, failing_line(problem) or self.record.line, TO_STOP)

    def keep(self, graphs: Mapping[str, torch.fx.GraphModule]) -> str | None:
        """Write graphs down that the numeric check found; where."""
        own = None if self.options.dump_dir is not None else self.options.cache_folder()
        root = DumpFolder(self.options.dump_dir or self.options.cache_folder() / "numeric_check", own)
        dump = Dump(root, "check")
        for name, gm in graphs.items():
            dump.graph(name, gm)
        return str(root.path / dump.name) if root.path is not None else None

    # --- results ------------------------------------------------------------------------------------------------------

    def finished(self, function: Boxed, record: GraphRecord, before: tuple[PassRecord, ...], outcome: Outcome) -> Boxed:
        """The function of a graph, once it is in the record. `before`: what was done to the graph earlier."""
        self.record.cache.append(outcome)
        self.record.add(replace(record, passes=(*before, *record.passes)))
        made = f"{len(record.kernels)} kernels, {len(record.eager_calls)} eager calls"
        about = (self.record.number, record.kind, made, outcome.result, record.line)
        self.say("graph %d, %s: %s; cache: %s  (%s)", *about, level=logging.INFO)
        return function

    def left_in_eager(self, graph: CapturedGraph, passes: tuple[PassRecord, ...], refusal: Refusal) -> Boxed:
        """A graph that runs operator by operator, though nothing is wrong with it."""
        self.record.add(replace(eager_record(graph, self.gm, refusal), passes=passes))
        return run_in_eager(graph.gm)

    # --- failures -----------------------------------------------------------------------------------------------------

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
            "to narrow it": f"python -m ferrite bisect {shlex.quote(folder)}" if folder else None,
        }
        if self.options.strict:
            raise CompilerBug(f"stage {stage!r} failed", facts, stage=stage, cause=cause, repro=folder) from cause
        facts["what happens"] = "this graph runs in eager: right, but not compiled"
        facts["to stop on it"] = TO_STOP
        warn_at(line, layout(f"ferrite: stage {stage!r} failed", facts))
        self.record.add(eager_record(graph, self.gm, Refusal(f"stage {stage!r} failed"), because))

    def forget_entries(self) -> None:
        """What passes did to the graphs came from the cache, perhaps, and may be what is wrong: next time they run."""
        for outcome in (self.record.captured, self.record.joint):
            if outcome is not None and outcome.result == "hit" and outcome.store is not None:
                assert outcome.key is not None
                outcome.store.discard(outcome.key)


def failing_line(failure: BaseException | None) -> ModelLine | None:
    """The model line of the node that was being worked on, if the failure or what caused it knows one."""
    while failure is not None:
        node = getattr(failure, "node", None)
        if isinstance(node, torch.fx.Node):
            return model_line(node)
        failure = failure.__cause__
    return None
