"""Runs of kernels in a host program: tables that say where each argument of each kernel comes from.

A run is one native call. It is given words, its slots: the address of its arena, then addresses of tensors, then sizes.
An argument of a kernel is a slot, and bytes to add to it:

    arena   buf2   arg0   s0              slots 0 to 3
    kernel_4(buf2, arena + 256, s0)       ((1, 0), (0, 256), (3, 0))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ferrite.codegen.host.spelling import HostSpelling
from ferrite.errors import NotScheduled
from ferrite.ir import Index, Number, Symbol, substitute
from ferrite.ir.kernel import Kernel
from ferrite.ir.program import Buffer
from ferrite.schedule import Launch, ParallelRegion, Run, bytes_at

KernelNumbers = Mapping[tuple[str, Kernel], int]  # by their device, and by themselves
Buffers = Mapping[str, Buffer]
MEMORY_ALIGNMENT_BYTES = 128  # bytes: of what a launch needs for itself


@dataclass(frozen=True)
class KernelCall:
    """One kernel of a run: which, and for each argument the slot it comes from and the bytes to add to it.
    `complaints`: of a checked kernel, what to say where it would go outside of its memory."""

    kernel: int
    arguments: tuple[tuple[int, int], ...]
    complaints: tuple[str, ...] = ()


@dataclass(frozen=True)
class ArenaPart:
    """What lies in an arena from an offset on, so many bytes, from one call of its run to another."""

    offset: int
    size: int
    first: int
    last: int


@dataclass(frozen=True)
class RunTable:
    """A native call. Slot 0 is the arena, of so many bytes; then storages, then sizes. `parallel_regions`: calls that
    threads run side by side. `device`: where it runs, as "cuda:1". `arena_parts`: what the arena consists of, for
    devices that can do without one."""

    arena: int
    slots: int
    calls: tuple[KernelCall, ...]
    parallel_regions: tuple[ParallelRegion, ...] = ()
    device: str = "cpu"
    arena_parts: tuple[ArenaPart, ...] = ()


class Slots:
    """What the words of a run are, in order: names of tensors, sizes, and ("end_of", name) for a bound of memory."""

    def __init__(self) -> None:
        self.numbers: dict[object, int] = {}

    def of(self, word: object) -> int:
        """The slot of a word, a new one where it has none; slot 0 is the arena's."""
        return self.numbers.setdefault(word, len(self.numbers) + 1)


def run_table(
    run: Run, buffers: Buffers, kernels: KernelNumbers, spelling: HostSpelling, checked: bool
) -> tuple[RunTable, list[object]]:
    """The table of a run, and what its slots behind the arena are given."""
    slots, calls = Slots(), list[KernelCall]()
    arena = run.arena
    own_memory: list[ArenaPart] = []  # what single launches need in the arena, behind all else
    for place, launch in enumerate(run.launches):
        arguments = list(launch_arguments(run, launch, spelling, slots))
        if size := spelling.launch_memory(launch.kernel):
            arena = -(-arena // MEMORY_ALIGNMENT_BYTES) * MEMORY_ALIGNMENT_BYTES
            arguments.append((0, arena))
            own_memory.append(ArenaPart(arena, size, place, place))
            arena += size
        complaints: tuple[str, ...] = ()
        if checked:
            arguments += bounds(run, launch, buffers, slots)
            complaints = complaints_of(launch)
        calls.append(KernelCall(kernels[launch.device, launch.kernel], tuple(arguments), complaints))
    parallel_regions = () if checked else run.parallel_regions  # what may fail shares no region
    parts = (*arena_parts(run, buffers), *own_memory) if spelling.can_do_without_arena else ()
    table = RunTable(arena, len(slots.numbers) + 1, tuple(calls), parallel_regions, run.launches[0].device, parts)
    return table, list(slots.numbers)


def launch_arguments(run: Run, launch: Launch, spelling: HostSpelling, slots: Slots) -> Iterator[tuple[int, int]]:
    """Pointers, sizes, and what else the device wants to be told."""
    for name in launch.arguments:
        if name in run.offsets:
            yield 0, run.offsets[name]
        else:
            tensor, offset = run.borrowed_space.get(name, (name, 0))
            yield slots.of(tensor), offset
    for symbol in launch.sizes:
        yield slots.of(symbol), 0
    for word in spelling.launch_words(launch.kernel):
        yield slots.of(substitute(word, dict(zip(launch.kernel.sizes, launch.sizes, strict=True)))), 0


def arena_parts(run: Run, buffers: Buffers) -> Iterator[ArenaPart]:
    for name, offset in run.offsets.items():
        places = [place for place, launch in enumerate(run.launches) if name in launch.arguments]
        try:
            size = bytes_at(buffers[name], {})
        except NotScheduled:
            size = run.arena - offset
        if places:
            yield ArenaPart(offset, size, places[0], places[-1])


def bounds(run: Run, launch: Launch, buffers: Buffers, slots: Slots) -> Iterator[tuple[int, int]]:
    """For every pointer of a checked kernel the slots and offsets of its ends: those of the storage behind a tensor, or
    of the bytes that something has inside of an arena or a tensor, or that the program made for it: to ask a result for
    its storage shows, since autograd adds to no gradient in place whose storage was asked for."""
    for name in launch.arguments:
        if not run.is_inside(name):
            buffer = buffers[name]
            is_known = all(isinstance(each, Number) for each in (*buffer.sizes, *buffer.strides))
            if buffer.kind == "owned" and is_known:
                yield slots.of(name), 0
                yield slots.of(name), bytes_at(buffer, {})
                continue
            for end in ("begin_of", "end_of"):
                yield slots.of((end, name)), 0
            continue
        tensor, offset = run.borrowed_space.get(name, ("", run.offsets.get(name, 0)))
        slot = slots.of(tensor) if tensor else 0
        yield slot, offset
        try:
            yield slot, offset + bytes_at(buffers[name], {})
        except NotScheduled:  # how much it has is known when it runs: to the end of what it is in
            yield (slots.of(("end_of", tensor)), 0) if tensor else (0, run.arena)


def slot_text(slot: object, spelling: HostSpelling, buffers: Buffers) -> str:
    """What fills a slot of a run: an address, a size, or an end of the storage behind a tensor."""
    match slot:
        case str():
            buffer = buffers.get(slot)
            if buffer is not None and may_be_empty(buffer):  # torch has no address for one, yet memory may be behind it
                return f"begin_of({slot}) + {slot}.storage_offset() * {buffer.dtype.itemsize}"
            return spelling.address(slot)
        case (end, name):
            return f"{end}({name})"
        case Symbol():
            return slot.name
        case Index():
            return slot.text
    raise TypeError(f"no slot: {slot!r}")


def may_be_empty(buffer: Buffer) -> bool:
    """Whether a tensor that came from outside may have no elements, while others are views of its memory."""
    if buffer.kind not in ("input", "donated", "constant"):
        return False
    return any(size.low is None or size.low < 1 for size in buffer.sizes)


def complaints_of(launch: Launch) -> tuple[str, ...]:
    """What a checked kernel says of each of its pointers, and of its tiles, where it would read or write outside."""
    lines = (operation.origin.line for operation in launch.operations)
    where = next((f", for {line}" for line in lines if line is not None), "").replace("{", "{{").replace("}", "}}")
    return tuple(
        f"RuntimeError: kernel {launch.name} {does} element {{index}} of {name}, which has {{size}}{where}"
        for name in (*launch.arguments, "a tile")
        for does in ("reads", "writes")
    )
