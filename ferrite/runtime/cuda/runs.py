"""Runs of kernels on a GPU: what a host program calls with a stream, addresses and sizes.

The first call loads the code and launches kernels one by one. Then the run is a table for one native function
(`ferrite.codegen.llvm.launches`), which launches them, or, where there are many, a CUDA graph with their arguments
renewed: the speed of a graph, with no addresses fixed and nothing copied. Without LLVM every call is as the first.

What only one run needs lies in an arena, one block of memory. Where a GPU has no block as large, each part of it has
memory of its own, from the first kernel that needs it to the last, as in eager; if that is too much, it is torch's
error that says so.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ferrite.codegen import ArenaPart, KernelCall, RunTable
from ferrite.codegen.llvm import IMMEDIATE, LaunchStep, Loaded, TableAddress, bound, launches, pack_launches
from ferrite.codegen.triton import table_words, written_at_once
from ferrite.machines import gpu_machine
from ferrite.runtime.cuda.compile import ALIGNED_BYTES
from ferrite.runtime.cuda.driver import Driver, Function, Graph
from ferrite.runtime.cuda.kernels import CudaKernel

MAX_PROGRAMS = launches.MAX_PROGRAMS
NO_ARENA = 1  # as its address: no multiple of 16, so that the native function leaves the call to Python
WORD_BYTES = 8
MAX_VARIANTS = 4  # of a run, by which pointers are not aligned; then one for all others


@dataclass
class PreparedLaunch:
    """One launch: its kernel, the slots and offsets of its pointers and sizes, and what was loaded for it. `place`: of
    the call of the run that it is, or is part of. `in_table`: addresses that the kernel finds in memory. `is_table`: it
    writes such a table."""

    kernel: CudaKernel
    call: KernelCall
    place: int
    in_table: Sequence[tuple[int, int]] = ()
    is_table: bool = False
    function: Function | None = None
    others: dict[frozenset[int], tuple[CudaKernel, Function]] = field(default_factory=dict)

    @property
    def programs(self) -> tuple[int, int]:
        """The slot and offset of how many programs there are."""
        if self.kernel.programs is not None:
            return IMMEDIATE, self.kernel.programs
        return self.call.arguments[self.kernel.pointers + self.kernel.sizes]

    @property
    def given(self) -> Sequence[tuple[int, int]]:
        return self.call.arguments[: self.kernel.pointers + self.kernel.sizes]

    @property
    def promised(self) -> dict[int, tuple[int, int]]:
        """What the kernel takes for multiples of 16, by places; those in its table come after its arguments."""
        arguments = {place: self.call.arguments[place] for place in self.kernel.promised}
        if self.kernel.request["aligned"]:
            arguments |= dict(enumerate(self.in_table, len(self.given)))
        return arguments

    def stray(self, is_stray: Callable[[tuple[int, int]], bool]) -> frozenset[int]:
        return frozenset(place for place, argument in self.promised.items() if is_stray(argument))


class CudaRun(TableAddress):
    """A run as the address of its table; called, it launches step by step. `strays`: slots of pointers and sizes that
    need not be multiples of 16. `variants`: the same run for other strays, as functions."""

    table: RunTable
    driver: Driver
    launcher: Loaded | None
    device: int
    steps: list[PreparedLaunch]
    memory: ctypes.Array[ctypes.c_char]
    strays: frozenset[int]
    variants: dict[frozenset[int], Callable[..., int]]
    graph: Graph | None = None
    is_filled = False

    def __call__(self, stream: int, *words: int) -> int:  # type: ignore[override]
        slots = words if self.table.arena else (0, *words)
        if slots[0] == NO_ARENA:
            self.run_without_arena(stream, slots)
            return 0
        strays = frozenset(slot for slot in self.promised() if slots[slot] % ALIGNED_BYTES)
        if strays and self.launcher is not None and not self.strays:
            return self.variant(strays)(stream, *words)
        with self.driver.on(self.device):
            for step in self.steps:
                self.launch(step, stream, slots)
        self.fill()
        return 0

    def run_without_arena(self, stream: int, slots: Sequence[int]) -> None:
        here: dict[ArenaPart, Any] = {}
        with self.driver.on(self.device):
            in_order = sorted(self.steps, key=lambda step: step.place)  # each table before its kernel
            for place, steps in itertools.groupby(in_order, lambda step: step.place):
                for part in self.table.arena_parts:
                    if part.first == place:
                        here[part] = self.driver.memory(part.size, self.device)
                for step in steps:
                    arguments = [elsewhere(argument, here) for argument in step.call.arguments]
                    in_table = [elsewhere(argument, here) for argument in step.in_table]
                    call = KernelCall(step.call.kernel, tuple(arguments))
                    self.launch(replace(step, call=call, in_table=in_table), stream, slots)
                here = {part: memory for part, memory in here.items() if part.last > place}

    def launch(self, step: PreparedLaunch, stream: int, slots: Sequence[int]) -> None:
        programs = word(step.programs, slots)
        if programs <= 0:
            return
        if programs > MAX_PROGRAMS:
            raise RuntimeError(f"a kernel would need {programs} programs; a GPU starts {MAX_PROGRAMS} at most")
        kernel, arguments = step.kernel, [word(argument, slots) for argument in step.given]
        strays = step.stray(lambda argument: word(argument, slots) % ALIGNED_BYTES != 0)
        kernel, function = self.without(step, strays) if strays else (kernel, self.loaded(step))
        arguments += [word(each, slots) for each in self.fixed(step, kernel)]
        self.driver.launch(function, programs, kernel.threads, kernel.shared, stream, arguments)

    def fixed(self, step: PreparedLaunch, kernel: CudaKernel) -> list[tuple[int, int]]:
        """Arguments behind those of the source: memory for failures, and for descriptors."""
        failure = [(IMMEDIATE, self.driver.failure(self.device))] if kernel.checks else []
        scratch = [(IMMEDIATE, 0)] * kernel.scratch
        if kernel.memory and scratch:
            scratch[0] = step.call.arguments[kernel.pointers + kernel.sizes]
        return failure + scratch

    def loaded(self, step: PreparedLaunch) -> Function:
        if step.function is None:
            step.function = self.driver.load(step.kernel, self.device)
        return step.function

    def without(self, step: PreparedLaunch, strays: frozenset[int]) -> tuple[CudaKernel, Function]:
        """The kernel of a step where some arguments, by their places, are no multiples of 16."""
        if strays not in step.others:
            kernel = step.kernel.without(strays)
            step.others[strays] = kernel, self.driver.load(kernel, self.device)
        return step.others[strays]

    def variant(self, strays: frozenset[int]) -> Callable[..., int]:
        """The run for memory that begins anywhere, and for other sizes: kernels that have to do with these are others,
        the rest are the same."""
        if strays not in self.variants:
            if len(self.variants) >= MAX_VARIANTS:
                strays = frozenset(self.promised())
            steps = []
            for step in self.steps:
                places = step.stray(lambda argument: argument[0] in strays)
                if places:
                    step = PreparedLaunch(self.without(step, places)[0], step.call, step.place, step.in_table)
                steps.append(step)
            self.variants[strays] = run_of(steps, self.table, self.driver, self.launcher, strays)
        return self.variants[strays]

    # --- the table ----------------------------------------------------------------------------------------------------

    def fill(self) -> None:
        """From now on the native function can do it, where this driver has one to offer."""
        natives = self.driver.native_functions()
        if not natives or self.is_filled:
            return
        self.is_filled = True
        steps = self.launch_steps()
        if len(steps) >= gpu_machine().min_graph_launches:
            self.graph = self.driver.graph(steps, self.device)
            steps = self.launch_steps(self.graph.nodes)
        ready = self.graph.address if self.graph else 0
        packed = pack_launches(steps, self.table.slots, self.promised(), 0, natives, ready)
        ctypes.memmove(self.memory, packed, len(packed))
        # last, and at once: other threads may be calling the native function
        ctypes.c_int64.from_buffer(self.memory).value = self.driver.context(self.device)

    def launch_steps(self, nodes: Sequence[int] = ()) -> list[LaunchStep]:
        return [
            LaunchStep(
                self.loaded(step).address,
                step.programs,
                step.kernel.threads,
                step.kernel.shared,
                [*step.given, *self.fixed(step, step.kernel)],
                nodes[place] if nodes else 0,
                step.is_table,
            )
            for place, step in enumerate(self.steps)
        ]

    def promised(self) -> list[int]:
        """Slots of pointers and sizes that must be multiples of 16."""
        return promised_slots(self.steps)


def word(argument: tuple[int, int], slots: Sequence[int]) -> int:
    slot, offset = argument
    return offset if slot == IMMEDIATE else slots[slot] + offset


def promised_slots(steps: Sequence[PreparedLaunch]) -> list[int]:
    return sorted({slot for step in steps for slot, _offset in step.promised.values() if slot != IMMEDIATE})


def elsewhere(argument: tuple[int, int], parts: Mapping[ArenaPart, Any]) -> tuple[int, int]:
    """An argument, where each part of the arena has memory of its own."""
    slot, at = argument
    if slot != 0:
        return argument
    found = (each for each in parts if each.offset <= at < each.offset + each.size)
    part = next(found)
    return IMMEDIATE, parts[part].data_ptr() + at - part.offset


def cuda_run(
    table: RunTable,
    kernels: Mapping[int, CudaKernel],
    driver: Driver,
    launcher: Loaded | None,
    writers: Mapping[int, CudaKernel] | None = None,
) -> Callable[..., int]:
    """A function of a stream, addresses and sizes. `launcher`: the native function, where there is one. `writers`: the
    kernels that write tables of grouped ones, by how many words."""
    steps: list[PreparedLaunch] = []
    for place, call in enumerate(table.calls):
        kernel = kernels[call.kernel]
        if kernel.rows:
            steps += grouped_steps(kernel, call, place, writers or {})
        else:
            steps.append(PreparedLaunch(kernel, call, place))
    busy = [step for step in steps if step.kernel.programs != 0] or steps  # a graph has no nodes that do nothing
    # Tables come first, at once: nothing else lies where they do.
    return run_of(sorted(busy, key=lambda step: not step.is_table), table, driver, launcher)


def grouped_steps(
    kernel: CudaKernel, call: KernelCall, place: int, writers: Mapping[int, CudaKernel]
) -> Iterator[PreparedLaunch]:
    """The table of a grouped kernel is written, then it runs. Behind its pointers stands the memory for the table."""
    addresses, (slot, offset) = call.arguments[: kernel.addresses], call.arguments[kernel.addresses]
    words = table_words(addresses, [[(IMMEDIATE, number) for number in row] for row in kernel.rows])
    start = 0
    for count in written_at_once(len(words)):
        some = words[start : start + count]
        some += [(IMMEDIATE, 0)] * (count - len(some))
        call_of_writer = KernelCall(call.kernel, ((slot, offset + WORD_BYTES * start), *some))
        yield PreparedLaunch(writers[count], call_of_writer, place, is_table=True)
        start += count
    yield PreparedLaunch(kernel, KernelCall(call.kernel, ((slot, offset),)), place, addresses)


def run_of(
    steps: list[PreparedLaunch],
    table: RunTable,
    driver: Driver,
    launcher: Loaded | None,
    strays: frozenset[int] = frozenset(),
) -> Callable[..., int]:
    blank = [LaunchStep(0, step.programs, 0, 0, [(0, 0)] * arguments(step)) for step in steps]
    packed = pack_launches(blank, table.slots, promised_slots(steps))
    memory = ctypes.create_string_buffer(packed, len(packed))
    run = CudaRun(ctypes.addressof(memory))
    run.table, run.driver, run.launcher, run.steps, run.memory = table, driver, launcher, steps, memory
    run.strays, run.variants = strays, {}
    run.needs = memory, launcher
    run.device = int(table.device.partition(":")[2] or 0)
    if any(offset % ALIGNED_BYTES for step in steps for _slot, offset in step.promised.values()):
        run.launcher = None
        return run  # nothing in a table says which steps are never aligned
    return bound(launcher.address, run) if launcher else run


def arguments(step: PreparedLaunch) -> int:
    return len(step.given) + step.kernel.checks + step.kernel.scratch


class NoArena:
    """Stands for an arena that there is no memory for."""

    def data_ptr(self) -> int:
        return NO_ARENA


def arena_from(empty: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """A function that makes the arena of a run, of a size; where there is no memory for it, what stands for it.
    `empty`: makes a tensor of sizes, strides, a dtype, and whatever else the arena is asked for with."""

    def arena(size: int, *where: int) -> Any:
        try:
            return empty((size,), (1,), torch.uint8, *where)
        except torch.OutOfMemoryError:
            return NoArena()

    return arena
