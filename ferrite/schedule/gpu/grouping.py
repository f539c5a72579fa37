"""Launches that are alike and independent become one: the step of an optimizer does the same to every parameter.

    launch add_3(p, g); launch add_4(q, h); ...   ->   launch of a grouped kernel (p, g, q, h, ...)

Kernels are alike where they are equal; pointwise ones also where they differ in how long their loops are, and in how
many lanes they have, alone: lengths that differ become sizes. Each launch becomes a problem of the grouped kernel. All
of them are at one level, so that nothing that one needs is made, on whatever way, by another; or nothing in the run
needs what any of them makes. Other launches keep their order as far as what they need allows.

What comes of a launch and goes into another within the run has to be there for all problems at once: so much memory
must not be more than a little.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

from ferrite.ir import Axis, Index, Number, axis, symbol
from ferrite.ir.kernel import (
    MASK_MULTIPLE,
    Attend,
    Kernel,
    Let,
    Loop,
    Statement,
    Store,
    When,
    checks,
    verify_kernel,
    walk,
)
from ferrite.machines import GpuMachine
from ferrite.pipeline import Fuel
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.loops.axes import Body, replaced
from ferrite.schedule.memory.arena import exact_bytes
from ferrite.schedule.steps import Launch, Run


@dataclass(frozen=True)
class Form:
    """A kernel as a problem of a grouped one: what it shares with those that are alike, the lengths of its loops,
    outermost first, if it is pointwise, and the lanes of its block."""

    shared: object
    lengths: tuple[int, ...]
    lanes: int

    @property
    def is_whole(self) -> bool:
        """Whether vectors are masked as a whole, or not at all."""
        return all(length % MASK_MULTIPLE == 0 for length in self.lengths)


class Grouping:
    """`leaving`: storages that leave the program."""

    def __init__(
        self, buffer_table: BufferTable, machine: GpuMachine, leaving: Collection[str] = (), fuel: Fuel | None = None
    ) -> None:
        self.buffer_table, self.machine, self.leaving = buffer_table, machine, leaving
        self.fuel = fuel or Fuel(None)
        self.forms: dict[int, Form | None] = {}  # by the body, which kernels that repeat have in common
        self.shared: dict[object, object] = {}

    def grouped(self, run: Run) -> Run:
        if len(run.launches) < self.machine.min_grouped_launches:
            return run
        needs, levels = dependencies(run.launches)
        needed = set[int]().union(*needs)
        forms: dict[object, list[int]] = {}
        for place, launch in enumerate(run.launches):
            form = self.form(launch.kernel)
            if form is not None:
                forms.setdefault(form.shared, []).append(place)
        alike: dict[object, list[int]] = {}
        for shared, places in forms.items():
            are_last = needed.isdisjoint(places)  # nothing needs any of them: they are at the last level, all of them
            for place in places:
                alike.setdefault((0 if are_last else levels[place], shared), []).append(place)
        made = written_by(run.launches)
        groups = []
        for places in alike.values():
            masked_alike = self.by_masks(places, run)
            for some in (part for one in masked_alike for part in self.with_little_between(one, run, made)):
                if len(some) >= self.machine.min_grouped_launches and self.fuel.left:
                    self.fuel.spend()
                    groups.append(some)
        if not groups:
            return run
        together = {place: some for some in groups for place in some}
        order = in_order([together.get(place, [place]) for place in range(len(run.launches))], needs)
        return replace(run, launches=tuple(self.launch([run.launches[place] for place in some]) for some in order))

    def by_masks(self, places: Sequence[int], run: Run) -> list[list[int]]:
        """Problems whose vectors are masked in part make loads of all others shorter: they stay apart, unless the
        others are few."""
        whole = [place for place in places if cast(Form, self.form(run.launches[place].kernel)).is_whole]
        if len(whole) < self.machine.min_grouped_launches:
            return [list(places)]
        rest = sorted(set(places).difference(whole))
        return [whole, rest]

    def with_little_between(self, places: Sequence[int], run: Run, made: Collection[str]) -> Iterator[list[int]]:
        """In parts, each with so much at most of what the run has `made` and only the program needs."""
        some: list[int] = []
        held = 0
        for place in places:
            names = dict.fromkeys(run.launches[place].arguments)
            more = sum(self.bytes_between(name) for name in names if name in made)
            if some and held + more > self.machine.max_bytes_between:
                yield some
                some, held = [], 0
            some.append(place)
            held += more
        if some:
            yield some

    def bytes_between(self, name: str) -> int:
        buffer = self.buffer_table.buffers[name]
        if buffer.kind not in ("owned", "donated") or name in self.leaving:
            return 0
        size = exact_bytes(buffer)
        return self.machine.max_bytes_between + 1 if size is None else size

    # --- kernels that are alike ---------------------------------------------------------------------------------------

    def form(self, kernel: Kernel) -> Form | None:
        """None where sizes are not known, or indices are checked."""
        if id(kernel.body) not in self.forms:
            self.forms[id(kernel.body)] = self.new_form(kernel)
        return self.forms[id(kernel.body)]

    def new_form(self, kernel: Kernel) -> Form | None:
        if kernel.sizes or checks(kernel) or any(isinstance(each, Attend) for each in walk(kernel.body)):
            return None
        loops = loops_of(kernel)
        if loops is None:
            return Form(self.shared.setdefault(kernel, kernel), (), 1)
        lengths = tuple(cast(Number, loop.axis.extent).value for loop in loops)
        wide = [loop.lanes for loop in loops if loop.lanes > 1]
        lanes = wide[0] if len(wide) == 1 else 1
        # Blocks of several dimensions, and large ones, are the same in all problems.
        fixed = tuple(wide) if len(wide) > 1 else max(lanes, self.machine.max_grouped_block)
        general = with_lengths(kernel, [(0, None)] * len(lengths), lanes=1 if len(wide) == 1 else None)
        general = replace(general, warps=1) if len(wide) == 1 else general
        shared: object = (general, fixed)
        return Form(self.shared.setdefault(shared, shared), lengths, lanes)

    def launch(self, launches: Sequence[Launch]) -> Launch:
        if len(launches) == 1:
            return launches[0]
        forms = [cast(Form, self.form(launch.kernel)) for launch in launches]
        widest = max(range(len(forms)), key=lambda place: forms[place].lanes)
        bounds = [(min(lengths), max(lengths)) for lengths in zip(*(form.lengths for form in forms), strict=True)]
        differ = [place for place, (low, high) in enumerate(bounds) if low < high]
        kernel = launches[widest].kernel
        made = replace(
            with_lengths(kernel, [bounds[place] if place in differ else None for place in range(len(bounds))]),
            origins=launches[0].kernel.origins,
            problems=tuple(tuple(form.lengths[place] for place in differ) for form in forms),
        )
        return Launch(
            verify_kernel(made),
            tuple(name for launch in launches for name in launch.arguments),
            (),
            tuple(operation for launch in launches for operation in launch.operations),
            launches[0].device,
        )


def loops_of(kernel: Kernel) -> list[Loop] | None:
    """The loops of a pointwise kernel, whose lengths are numbers; None for any other."""
    found = []
    for statement in walk(kernel.body):
        match statement:
            case Loop(kind="parallel" | "vector", axis=Axis(extent=Number())):
                found.append(statement)
            case Let() | When() | Store(atomic=False):
                pass
            case _:
                return None
    return found


def with_lengths(kernel: Kernel, bounds: Sequence[tuple[int, int | None] | None], lanes: int | None = None) -> Kernel:
    """The kernel with sizes for the lengths of its loops, where these have bounds; `lanes`: of its block."""
    if not bounds:
        return kernel
    found = [None if each is None else symbol(f"s{place}", *each) for place, each in enumerate(bounds)]
    left = iter(found)

    def body(statements: Body) -> Body:
        return tuple(map(statement, statements))

    def statement(item: Statement) -> Statement:
        if isinstance(item, When):
            return When(item.condition, body(item.body))
        if not isinstance(item, Loop):
            return item
        longer = axis(item.axis.name, next(left) or item.axis.extent)
        places: dict[Axis, Index] = {item.axis: longer}
        inside = replaced(body(item.body), places)
        return replace(item, axis=longer, body=inside, lanes=lanes if lanes and item.lanes > 1 else item.lanes)

    return replace(kernel, sizes=tuple(size for size in found if size is not None), body=body(kernel.body))


def written_by(launches: Sequence[Launch]) -> set[str]:
    pairs = (pair for launch in launches for pair in zip(launch.kernel.arguments, launch.arguments, strict=True))
    return {name for pointer, name in pairs if pointer.access != "read"}


# --- order ------------------------------------------------------------------------------------------------------------


def dependencies(launches: Sequence[Launch]) -> tuple[list[set[int]], list[int]]:
    """For each launch the places of those that it has to follow, and its level, which is above theirs."""
    written: dict[str, int] = {}
    read: dict[str, list[int]] = {}
    needs: list[set[int]] = []
    levels: list[int] = []
    for place, launch in enumerate(launches):
        before: set[int] = set()
        pairs = list(zip(launch.kernel.arguments, launch.arguments, strict=True))
        for pointer, name in pairs:
            if name in written:
                before.add(written[name])
            if pointer.access != "read":
                before.update(read.get(name, ()))
        for pointer, name in pairs:
            if pointer.access != "read":
                written[name], read[name] = place, []
            else:
                read.setdefault(name, []).append(place)
        before.discard(place)
        needs.append(before)
        levels.append(1 + max((levels[each] for each in before), default=0))
    return needs, levels


def in_order(nodes: Sequence[list[int]], needs: Sequence[set[int]]) -> list[list[int]]:
    """Every list of places once, behind all that the places in it need; else in the order of the first place. `nodes`:
    for each place the list that it is in."""
    order: list[list[int]] = []
    done: set[int] = set()
    for first in nodes:
        waiting = [first]
        while waiting:
            node = waiting[-1]
            missing = [] if node[0] in done else sorted({each for place in node for each in needs[place]} - done)
            if missing:
                waiting += (nodes[place] for place in reversed(missing))
                continue
            waiting.pop()
            if node[0] not in done:
                done.update(node)
                order.append(node)
    return order
