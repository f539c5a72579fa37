"""What a plan is made of: launches of kernels, runs of them, other operations, and what each leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ferrite.ir.index import Symbol
from ferrite.ir.kernel import Kernel
from ferrite.ir.program import Loop, Operation, Program
from ferrite.schedule.order import NotFused

MOST_NAMES = 6


@dataclass(frozen=True)
class Launch:
    """A kernel, the storages behind its pointers and the symbols behind its sizes."""

    kernel: Kernel
    arguments: tuple[str, ...]
    sizes: tuple[Symbol, ...]
    operations: tuple[Loop, ...] = field(compare=False)

    @property
    def name(self) -> str:
        """After the operators it computes."""
        nodes = dict.fromkeys(node for operation in self.operations for node in operation.origin.nodes)
        return "_".join(list(nodes)[:MOST_NAMES]) or "kernel"


@dataclass(frozen=True)
class Run:
    """Launches that follow each other, as one native call. `arena`: bytes; `offsets`: storages that lie in it, and
    where. `lodged`: storages that lie inside a tensor, and where."""

    launches: tuple[Launch, ...]
    arena: int = 0
    offsets: Mapping[str, int] = field(default_factory=dict)
    lodged: Mapping[str, tuple[str, int]] = field(default_factory=dict)

    def is_inside(self, name: str) -> bool:
        """Whether a storage needs no tensor of its own."""
        return name in self.offsets or name in self.lodged


Step = Run | Operation


@dataclass(frozen=True)
class Plan:
    """`dying`: for each step, the buffers that nothing after it needs. `alone`: why an operation is not compiled.
    `bodies`: the plans of sub-programs, by the place of the step that runs them. `taken`: buffers that lie where
    another one lay before; in `program` they are views of it."""

    program: Program
    steps: tuple[Step, ...]
    dying: tuple[tuple[str, ...], ...]
    alone: Mapping[int, str]
    refusals: tuple[NotFused, ...]
    bodies: Mapping[int, tuple[Plan, ...]]
    taken: Mapping[str, str] = field(default_factory=dict)

    @property
    def launches(self) -> list[Launch]:
        """Every launch, those of sub-programs too."""
        own = [launch for step in self.steps if isinstance(step, Run) for launch in step.launches]
        return own + [launch for plans in self.bodies.values() for plan in plans for launch in plan.launches]
