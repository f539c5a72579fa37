"""Where a run of kernels keeps what only it needs: inside tensors that have room meanwhile, or in a block of its own.

A tensor that the run makes has room until it is first written; one that dies in the run has room after its last use.
What is left lies in the arena, at places that are free while it is needed. What is of a size that is not known yet lies
in a tensor of the same size, or is one itself, in which others lie before and after.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ferrite.ir import ZERO, Index, Number
from ferrite.ir.program import Buffer, Program
from ferrite.schedule.fusion.accesses import BufferTable
from ferrite.schedule.memory.in_place import reach
from ferrite.schedule.memory.liveness import accessed
from ferrite.schedule.steps import Run, Step, device_type
from ferrite.schedule.target import RunMemory, Schedulings

ALWAYS = float("inf")
Span = tuple[float, float]


@dataclass
class Host:
    """A tensor, when it is needed itself, and what lies in it besides: its bytes from and to, and when."""

    name: str
    span: Span
    guests: list[tuple[int, int, Span]] = field(default_factory=list)

    def room(self, size: int, span: Span, whole: int) -> int | None:
        """The first place where something fits that is needed at a time."""
        if meet(span, self.span):
            return None
        place = first_place(size, [(low, high) for low, high, when in self.guests if meet(span, when)])
        return place if place + size <= whole else None


class Arenas:
    """`seen_elsewhere`: storages that others may look at though nothing in the program needs them any more."""

    def __init__(
        self,
        program: Program,
        buffer_table: BufferTable,
        schedulings: Schedulings,
        seen_elsewhere: Collection[str] = (),
    ) -> None:
        self.buffer_table, self.schedulings, self.seen_elsewhere = buffer_table, schedulings, set(seen_elsewhere)
        self.leaving = {buffer_table.buffers[item].storage for item in program.outputs if isinstance(item, str)}

    def planned(self, steps: Sequence[Step]) -> list[Step]:
        """The steps, with places for what only a run needs."""
        users: dict[str, set[int]] = {}
        for place, step in enumerate(steps):
            for name in accessed(step):
                users.setdefault(self.buffer_table.buffers[name].storage, set()).add(place)
        return [self.run(place, step, users) if isinstance(step, Run) else step for place, step in enumerate(steps)]

    def run(self, position: int, run: Run, users: Mapping[str, set[int]]) -> Run:
        spans = spans_of(run)
        mine = [name for name in spans if self.buffer_table.buffers[name].kind == "owned"]
        own = {name for name in mine if len(users[name]) == 1 and name not in self.leaving}
        hosts = []
        for name in mine:
            first, last = spans[name]
            if name in own:
                continue
            if min(users[name]) == position:
                hosts.append(Host(name, (first, ALWAYS)))
            elif max(users[name]) == position and name not in self.leaving | self.seen_elsewhere:
                hosts.append(Host(name, (-ALWAYS, last)))
        return with_places(run, own, hosts, self.buffer_table, self.memory_of(run).alignment)

    def memory_of(self, run: Run) -> RunMemory:
        return self.schedulings[device_type(run.launches[0].device)].run_memory


def with_places(
    run: Run, own: Collection[str], hosts: Sequence[Host], buffer_table: BufferTable, alignment: int
) -> Run:
    spans = spans_of(run)
    sizes = {name: bytes_of(name, buffer_table, alignment) for name in own}
    # the latest first: those before it then find room in it, and not the other way round
    latest_first = sorted(own, key=lambda name: (-(sizes[name] or 0), -spans[name][1], -spans[name][0], name))
    borrowed_space = dict(
        borrowed_by_amount([name for name in latest_first if sizes[name] is None], spans, hosts, buffer_table)
    )
    fixed_sizes = {name: size for name, size in sizes.items() if size is not None}
    borrowed_space |= borrowed_by_size(
        [name for name in latest_first if name in fixed_sizes], fixed_sizes, spans, hosts, buffer_table
    )
    left = {name: size for name, size in fixed_sizes.items() if name not in borrowed_space}
    return replace(with_arena(run, left, spans), borrowed_space=borrowed_space)


def borrowed_by_size(
    names: Sequence[str],
    sizes: Mapping[str, int],
    spans: Mapping[str, Span],
    hosts: Sequence[Host],
    buffer_table: BufferTable,
) -> Iterator[tuple[str, tuple[str, int]]]:
    rooms = [(host, size) for host in hosts if (size := exact_bytes(buffer_table.buffers[host.name])) is not None]
    for name in names:
        for host, whole in rooms:
            place = host.room(sizes[name], spans[name], whole)
            if place is not None:
                host.guests.append((place, place + sizes[name], spans[name]))
                yield name, (host.name, place)
                break


def borrowed_by_amount(
    names: Sequence[str], spans: Mapping[str, Span], hosts: Sequence[Host], buffer_table: BufferTable
) -> Iterator[tuple[str, tuple[str, int]]]:
    """For sizes that are not known: in what is as large, whatever they are."""
    rooms: dict[Index, list[Host]] = {}
    for host in hosts:
        rooms.setdefault(amount(buffer_table.buffers[host.name]), []).append(host)
    for name in names:
        alike = rooms.setdefault(amount(buffer_table.buffers[name]), [])
        found = next((host for host in alike if host.room(1, spans[name], 1) == 0), None)
        if found is None:
            alike.append(Host(name, spans[name]))
        else:
            found.guests.append((0, 1, spans[name]))
            yield name, (found.name, 0)


def with_arena(run: Run, sizes: Mapping[str, int], spans: Mapping[str, Span]) -> Run:
    """The run, with a block of memory for these storages."""

    def area(name: str) -> float:
        return sizes[name] * (spans[name][1] - spans[name][0] + 1)

    # neither order is always the better one
    orders = [sorted(sizes, key=lambda name: (-weight(name), name)) for weight in (area, sizes.__getitem__)]
    return min((laid(run, order, sizes, spans) for order in orders), key=lambda found: found.arena)


def laid(run: Run, order: Sequence[str], sizes: Mapping[str, int], spans: Mapping[str, Span]) -> Run:
    """Each in turn at the first place where it fits."""
    offsets: dict[str, int] = {}
    total = 0
    for name in order:
        busy = [(offsets[other], offsets[other] + sizes[other]) for other in offsets if meet(spans[other], spans[name])]
        offsets[name] = first_place(sizes[name], busy)
        total = max(total, offsets[name] + sizes[name])
    return Run(run.launches, total, offsets)


def first_place(size: int, busy: Sequence[tuple[int, int]]) -> int:
    place = 0
    for low, high in sorted(busy):
        if place + size <= low:
            break
        place = max(place, high)
    return place


def meet(first: Span, second: Span) -> bool:
    return first[0] <= second[1] and second[0] <= first[1]


def spans_of(run: Run) -> dict[str, Span]:
    """For each storage, the first and the last launch that need it."""
    spans: dict[str, Span] = {}
    for place, launch in enumerate(run.launches):
        for name in launch.arguments:
            spans[name] = (spans.get(name, (place, place))[0], place)
    return spans


# --- sizes ------------------------------------------------------------------------------------------------------------


def bytes_of(name: str, buffer_table: BufferTable, alignment: int) -> int | None:
    """Bytes that a buffer needs, a multiple of the alignment; None where that is not known before it runs."""
    exact = exact_bytes(buffer_table.buffers[name])
    return None if exact is None else -(-max(exact, 1) // alignment) * alignment


def exact_bytes(buffer: Buffer) -> int | None:
    found = amount(buffer)
    return found.value if isinstance(found, Number) else None


def amount(buffer: Buffer) -> Index:
    """Bytes that a buffer needs."""
    if any(isinstance(size, Number) and size.value == 0 for size in buffer.sizes):
        return ZERO
    return reach(buffer) * buffer.dtype.itemsize
