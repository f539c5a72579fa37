"""What a plan is made of: launches of kernels, runs of them, other operations, and what each leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ferrite.errors import Refusal
from ferrite.ir import Symbol
from ferrite.ir.kernel import Kernel
from ferrite.ir.program import LoopOperation, Operation, Program

MAX_NAMES_SHOWN = 6
INTERPRETED = Refusal("the interpreter was asked for")  # why an operation is no kernel, where nothing else is wrong


def device_type(device: str) -> str:
    """What schedulings and targets go by: of "cuda:1" it is "cuda"."""
    return device.partition(":")[0]


@dataclass(frozen=True)
class FusionRefusal:
    """Why an operation was not fused into a group, by the graph nodes that both come from."""

    nodes: tuple[str, ...]
    group: tuple[str, ...]
    refusal: Refusal


@dataclass(frozen=True)
class Launch:
    """A kernel, the storages behind its pointers, the symbols behind its sizes, and its device, as "cuda:1"."""

    kernel: Kernel
    arguments: tuple[str, ...]
    sizes: tuple[Symbol, ...]
    operations: tuple[LoopOperation, ...] = field(compare=False)
    device: str = "cpu"

    @property
    def name(self) -> str:
        """After the operators it computes."""
        nodes = dict.fromkeys(node for operation in self.operations for node in operation.origin.nodes)
        return "_".join(list(nodes)[:MAX_NAMES_SHOWN]) or "kernel"


@dataclass(frozen=True)
class ParallelRegion:
    """Launches of a run, so many from one on, that share a parallel region of so many threads at most: each is run by
    one of them, in any order."""

    first: int
    count: int
    threads: int


@dataclass(frozen=True)
class Run:
    """Launches that follow each other, as one native call. `arena`: bytes; `offsets`: storages that lie in it, and
    where. `borrowed_space`: storages that lie inside a tensor, and where. `parallel_regions`: in
    order, what is not one after the other."""

    launches: tuple[Launch, ...]
    arena: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)
    borrowed_space: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    parallel_regions: tuple[ParallelRegion, ...] = ()

    def is_inside(self, name: str) -> bool:
        """Whether a storage needs no tensor of its own."""
        return name in self.offsets or name in self.borrowed_space


Step = Run | Operation


@dataclass(frozen=True)
class Plan:
    """`last_uses`: for each step, the buffers that nothing after it needs. `not_compiled`: why an operation is not.
    `bodies`: the plans of sub-programs, by the place of the step that runs them. `in_place`: buffers that lie where
    another one lay before; in `program` they are views of it."""

    program: Program
    steps: tuple[Step, ...]
    last_uses: tuple[tuple[str, ...], ...]
    not_compiled: Mapping[int, Refusal]
    not_fused: tuple[FusionRefusal, ...]
    bodies: Mapping[int, tuple[Plan, ...]]
    in_place: Mapping[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> list[Launch]:
        """Every launch, those of sub-programs too."""
        own = [launch for step in self.steps if isinstance(step, Run) for launch in step.launches]
        return own + [launch for plans in self.bodies.values() for plan in plans for launch in plan.launches]

    @property
    def kernels(self) -> tuple[tuple[str, Kernel], ...]:
        """Every kernel once, with its device, in the order of the first launch of each."""
        return tuple(dict.fromkeys((launch.device, launch.kernel) for launch in self.launches))

    def kernel_text(self) -> str:
        """The kernels, each behind a comment that numbers it as the host program does."""
        names: dict[tuple[str, Kernel], list[str]] = {}
        for launch in self.launches:
            names.setdefault((launch.device, launch.kernel), []).append(launch.name)
        texts = [
            f"# kernel {number} on {device}: {', '.join(dict.fromkeys(names[device, kernel]))}\n{kernel}"
            for number, (device, kernel) in enumerate(self.kernels)
        ]
        return "\n\n".join(texts or ["# no kernels\n"])

    @property
    def regions(self) -> list[int | None]:
        """For every launch the number of the parallel region that it shares with others."""
        numbers = itertools.count()
        return list(self._regions(numbers))

    def _regions(self, numbers: Iterator[int]) -> Iterator[int | None]:
        for run in (step for step in self.steps if isinstance(step, Run)):
            region: dict[int, int] = {}
            for each in run.parallel_regions:
                number = next(numbers)
                region.update(dict.fromkeys(range(each.first, each.first + each.count), number))
            yield from map(region.get, range(len(run.launches)))
        for plans in self.bodies.values():
            for plan in plans:
                yield from plan._regions(numbers)
