"""How many bytes a plan holds, step by step, beyond what it is given: known before anything runs.

What operators of torch take for themselves while they run is not in it, nor is what a tensor is copied to because
torch's forecast of its strides was wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from ferrite.errors import NotScheduled
from ferrite.ir import Atom, Index, Number, Symbol, evaluate
from ferrite.ir.program import Buffer, Program
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.memory.liveness import accessed
from ferrite.schedule.steps import Plan, Run, Step

Size = Callable[[Buffer], int]


def peak_of(plan: Plan, hints: Mapping[str, int]) -> int | None:
    """The most bytes held at once. `hints`: likely values of symbols; None where one is missing."""
    try:
        return greatest(plan, lambda buffer: bytes_at(buffer, hints))
    except NotScheduled:
        return None


def greatest(plan: Plan, size: Size) -> int:
    inside = {place: max(greatest(body, size) for body in bodies) for place, bodies in plan.bodies.items() if bodies}
    return max(bytes_by_step(plan.program, plan.steps, plan.last_uses, size, inside), default=0)


def bytes_by_step(
    program: Program,
    steps: Sequence[Step],
    last_uses: Sequence[Sequence[str]],
    size: Size,
    inside: Mapping[int, int] | None = None,
) -> list[int]:
    """Bytes while each step runs, and last when all is done. `inside`: what sub-programs need, by their steps."""
    buffer_table = BufferTable(program)
    alive: dict[str, int] = {}
    total = 0
    found: list[int] = []

    def make(name: str) -> int:
        """Bytes that are new when a buffer is needed."""
        buffer = buffer_table.buffers[buffer_table.buffers[name].storage]
        if buffer.kind != "owned" or buffer.name in alive:
            return 0
        alive[buffer.name] = size(buffer)
        return alive[buffer.name]

    def freed(name: str) -> int:
        """What was given away to the program is freed with what is its own."""
        given_away = buffer_table.buffers[name].kind == "donated"
        return size(buffer_table.buffers[name]) if given_away else alive.pop(name, 0)

    for place, step in enumerate(steps):
        before = total
        if isinstance(step, Run):
            total += sum(make(name) for name in accessed(step) if not step.is_inside(name))
            found.append(total + step.arena)
        else:
            total += sum(make(name) for name in accessed(step))
            found.append(max(total, before + (inside or {}).get(place, 0)))
        total -= sum(freed(name) for name in last_uses[place])
    total += sum(make(item) for item in program.outputs if isinstance(item, str))
    return [*found, total]


def bytes_at(buffer: Buffer, hints: Mapping[str, int]) -> int:
    """Bytes that torch allocates for a buffer."""
    reach = 1
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        count = size_at(size, hints)
        if count == 0:
            return 0
        reach += (count - 1) * size_at(stride, hints)
    return reach * buffer.dtype.itemsize


def size_at(index: Index, hints: Mapping[str, int]) -> int:
    """With these numbers for symbols. NotScheduled where one has none."""

    def value(atom: Atom) -> int:
        if isinstance(atom, Symbol) and atom.name in hints:
            return hints[atom.name]
        raise NotScheduled(str(atom))

    return index.value if isinstance(index, Number) else int(evaluate(index, value))
