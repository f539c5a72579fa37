"""How long matrix products take on the GPU of this process: from a record, or measured when a pass first asks.

Measured is torch's call, and every configuration of a kernel of our own that may be the fastest. What was measured in a
process is kept, and added to the file that the option `tuning` names.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import ferrite.passes.shared.own_products  # noqa: F401  # operators of our own
from ferrite.capture import on_real_tensors
from ferrite.errors import Refusal, layout, warn_user
from ferrite.options import Options
from ferrite.schedule import Scheduling
from ferrite.schedule.gpu import candidates
from ferrite.targets.call_trials import measured_call
from ferrite.targets.choose import Targets, reason_against_gpus, triton_is_here
from ferrite.targets.cuda import CudaTarget, triton_version
from ferrite.targets.target import Target
from ferrite.targets.trials import Stopwatch, compiled_trials, farthest, reason_against
from ferrite.targets.tuning_watcher import OutOfTime, watcher
from ferrite.tune import (
    CallProblem,
    Found,
    Measured,
    Problem,
    ProductConfig,
    ProductProblem,
    Record,
    Where,
    add_to,
    configurations,
    read_record,
)

TYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
MAX_EXACT_PRODUCTS = 1 << 38  # that are computed in double precision to compare with; of more, torch's are right
MAX_BYTES = 4 << 30  # of the factors and results of a product that is measured
_lock = threading.Lock()
_measured: dict[Problem, Found | None] = {}  # by this process; None: it could not be


def where() -> Where:
    return Where(torch.cuda.get_device_name(), triton_version(), torch.__version__)


def reason_against_measuring() -> Refusal | None:
    """Why nothing can be measured in this process."""
    if not torch.cuda.is_available():
        return Refusal("torch sees no GPU")
    without_triton = None if triton_is_here() else Refusal("Triton is not installed, cannot be imported, or is too old")
    return reason_against_gpus() or without_triton


class Tuner:
    """`measures`: what the record does not have is measured; `path`: and written there at once, so that nothing is lost
    if somebody stops the process."""

    def __init__(self, record: Record, target: CudaTarget, measures: bool, path: Path | None) -> None:
        self.record, self.target, self.measures, self.path = record, target, measures, path
        self.found: dict[Problem, Found] = {}
        self.asked: dict[Problem, Found] = {}  # what passes were told

    def __call__(self, problem: Problem) -> Any:
        if (answer := self.answer(problem)) is not None:
            self.asked[problem] = answer
        return answer

    def answer(self, problem: Problem) -> Any:
        known = self.known(problem)
        if known is not None or not self.measures or torch.cuda.is_current_stream_capturing():
            return known
        with _lock:
            known = self.known(problem, again=True)
            return self.measured(problem) if known is None else known

    def known(self, problem: Problem, again: bool = False) -> Found | None:
        """`again`: another process may have written to the file meanwhile."""
        if again and self.path is not None:
            record = read_record(self.path)
            if isinstance(record, Record) and record.where == self.record.where:
                self.record = record
        found = self.found.get(problem) or self.record.find(problem)
        if found is not None and self.measures:
            watcher().known(problem, found)
        return found

    def measured(self, problem: Problem) -> Found | None:
        """None where it could not be, or there was no time: then torch's call it is."""
        if problem not in _measured:
            try:
                with on_real_tensors():
                    _measured[problem] = measured(problem, self.target)
            except OutOfTime:
                watcher().left(problem)
                return None
        found = _measured[problem]
        watcher().finished(problem, found)
        if found is not None:
            self.found[problem] = found
            self.save(Record.of(self.record.where, {problem: found}))
        return found

    def save(self, new: Record) -> None:
        if self.path is None:
            return
        saved = add_to(self.path, new)
        if isinstance(saved, Refusal):
            warn_of_record(str(self.path), saved.reason, "ferrite: nothing is added to a tuning record")
        else:
            self.record = saved

    @property
    def configurations(self) -> dict[ProductProblem, ProductConfig]:
        return configurations({**self.record.products, **Record.of(self.record.where, self.found).products})


def tuner_for(options: Options, targets: Targets) -> Tuner | None:
    """What there is to know for these targets; None where that is nothing."""
    target = targets.get("cuda")
    if options.tuning is not None and not isinstance(target, CudaTarget) and not torch.cuda.is_available():
        warn_of_record(str(options.tuning), "no GPU is here whose products it could be about")
    if not isinstance(target, CudaTarget) or options.own_products == "off":
        return None
    if options.tuning is None and not options.max_autotune:
        return None
    here = where()
    record: Record | Refusal = Record(here)
    if options.tuning is not None and (options.tuning.exists() or not options.max_autotune):
        record = read_record(options.tuning)
        if isinstance(record, Record):
            record = record.reason_against(here) or record
    if isinstance(record, Refusal):
        warn_of_record(str(options.tuning), record.reason)
        return Tuner(Record(here), target, options.max_autotune, None)
    return Tuner(record, target, options.max_autotune, options.tuning)


def tuned(target: Target, tuner: Tuner | None) -> Scheduling:
    """A target's scheduling, with what is known to be fastest."""
    if tuner is None or target is not tuner.target:
        return target.scheduling
    return replace(tuner.target.scheduling, tuned=tuner.configurations)


def tuning_identity(options: Options) -> str:
    """What is in the file that the options name."""
    if options.tuning is None:
        return "none"
    try:
        return hashlib.sha256(options.tuning.read_bytes()).hexdigest()
    except OSError:
        return "none"


@functools.lru_cache(64)
def warn_of_record(path: str, reason: str, headline: str = "ferrite: a tuning record is not used") -> None:
    """Says so, once."""
    warn_user(layout(headline, {"file": path, "because": reason}))


# --- measuring --------------------------------------------------------------------------------------------------------


def measured(problem: Problem, target: CudaTarget) -> Found | None:
    """None where nothing gives what it should, or there is no memory."""
    if not watcher().has_time():
        raise OutOfTime
    if isinstance(problem, CallProblem):
        return measured_call(problem)
    size = problem.rows * problem.summed + problem.summed * problem.columns + problem.rows * problem.columns
    if problem.batch * size * 4 > MAX_BYTES:
        return None
    try:
        return fastest(problem, target)
    except torch.OutOfMemoryError:
        return None


def fastest(problem: ProductProblem, target: CudaTarget) -> Measured | None:
    left, right = factors(problem)
    expected = left @ right
    products = problem.batch * problem.rows * problem.columns * problem.summed
    exact = left.double() @ right.double() if products <= MAX_EXACT_PRODUCTS else expected.float()
    allowed = max(farthest(expected, exact), torch.finfo(expected.dtype).eps * exact.abs().max().item())
    configs = candidates(problem, target.scheduling.machine)
    tables = [configurations({problem: Measured(0, 0, config)}) for config in configs]
    watcher().begins(problem, len(configs))
    watch, times = Stopwatch(), dict[ProductConfig, float]()
    for config, trial in zip(configs, compiled_trials(graph_of(left, right), target, tables), strict=True):
        if not isinstance(trial, Refusal) and reason_against(trial(left, right), [exact], [allowed]) is None:
            times[config] = watch.microseconds(trial, left, right)
        watcher().tried()
        if not watcher().has_time():
            raise OutOfTime
    if not times:
        return None
    best = min(times, key=times.__getitem__)
    return Measured(watch.microseconds(torch.matmul, left, right), times[best], best)


def factors(problem: ProductProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Random numbers that lie as the problem says, from no generator of the user's."""
    generator = torch.Generator("cuda").manual_seed(0)

    def made(rows: int, columns: int, turned: bool) -> torch.Tensor:
        sizes = (columns, rows) if turned else (rows, columns)
        batch = (problem.batch,) if problem.batch > 1 else ()
        numbers = torch.randn(*batch, *sizes, device="cuda", generator=generator).to(TYPES[problem.dtype])
        return numbers.transpose(-1, -2) if turned else numbers

    return (
        made(problem.rows, problem.summed, problem.left == "rows"),
        made(problem.summed, problem.columns, problem.right == "summed"),
    )


def graph_of(left: torch.Tensor, right: torch.Tensor) -> torch.fx.GraphModule:
    """A graph of one product of ours."""
    graph = torch.fx.Graph()
    nodes = []
    for name, value in (("left", left), ("right", right)):
        nodes.append(graph.placeholder(name))
        nodes[-1].meta["val"] = value
    product = graph.call_function(torch.ops.ferrite.product.default, tuple(nodes))
    product.meta["val"] = torch.empty(*left.shape[:-1], right.shape[-1], dtype=left.dtype, device=left.device)
    graph.output((product,))
    return torch.fx.GraphModule(torch.nn.Module(), graph)
