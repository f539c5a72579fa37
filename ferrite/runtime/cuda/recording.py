"""Parts of host programs, recorded once and replayed: all launches of a part, torch's own too, in one call.

A recording has fixed addresses. An input is taken by its address where that does not change from call to call (a
parameter, what another recording left in its memory), else copied into memory of the recording's own. Results stay in
that memory as long as nobody outside sees them: `from_pool` copies what the program returns to its user, and a
recording is not replayed while anybody holds a result of its last time. So there is nothing to announce, and no number
that changes under its owner's hands; whoever keeps results gets a second recording, or the part as it is.

Where `recorded_gradients="lent"` asks for it, gradients are not copied: they are as large as the model, and mostly gone
before the next ones are computed. They are handed out in the memory that the recording has for them anyway. (Results of
a forward program, which the next call often finds still held, would cost a second recording with all that is saved for
backward.) It has to be asked for, since another stream may still read what nobody holds any more: `record_stream` tells
torch's allocator of that, which does not get this memory back.

    1st call of some sizes    the part as it is: libraries get ready, addresses are noted
    2nd                       recorded, then replayed
    from then on              replayed, where addresses are as recorded and results are free

All recordings of a GPU share one pool of memory. They run one after the other, whatever streams they are called on.
"""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from ferrite.capture import torch_api
from ferrite.codegen import RecordedPart
from ferrite.collector import garbage_waits

MAX_RECORDINGS = 16  # of one part: each has a graph of its own, and memory for results
MAX_SIZES = 64  # that are remembered
MAX_KEPT_SHARE = 4  # a quarter of a GPU's memory: beyond that a part is not recorded for further sizes or addresses
MAX_HELD = 3  # of one part at the same sizes, while results of the others are held
Part = Callable[[list[Any]], Sequence[Any]]
Replay = Callable[[], None]


def others_may_draw() -> bool:
    """Whether another thread may draw random numbers: torch's generators refuse to while anything is recorded. Threads
    of autograd, which Python did not start, work while the one that called them waits."""
    current = threading.current_thread()
    calling = {current} if current.ident is not None and not isinstance(current, threading._DummyThread) else set()
    waiting = calling or {current, threading.main_thread()}
    return any(each not in waiting and not each.daemon for each in threading.enumerate())


class Recordable(Protocol):
    """A GPU that records; or what a test has for one."""

    def is_recording(self) -> bool:
        """Whether the user records what is going on: a recording inside another is none."""

    def in_order(self) -> None:
        """What is done from here on comes after all recordings that were replayed before, on any stream."""

    def most_kept(self) -> int:
        """Bytes that recordings may keep, beyond one for each part."""

    def record(self, part: Part, given: list[Any]) -> tuple[Sequence[Any], Replay]:
        """Results of a part, which are not computed yet, and what computes them. Raises where that is impossible."""


class Pool:
    """Memory of recordings: how many bytes, by the handles of its storages. `gradients`: those that are handed out."""

    def __init__(self) -> None:
        self.storages: dict[int, int] = {}
        self.gradients: set[int] = set()
        self.lock = threading.RLock()

    def add(self, owner: Any, sizes: dict[int, int], are_gradients: bool) -> None:
        self.storages |= sizes
        if are_gradients:
            self.gradients |= sizes.keys()
        weakref.finalize(owner, self.forget, tuple(sizes)).atexit = False

    def forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.storages.pop(handle, None)
        self.gradients.difference_update(handles)

    @property
    def kept(self) -> int:
        return sum(self.storages.values())


POOL = Pool()


class Graphs:
    """CUDA graphs of one GPU."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.memory = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream(index)
        self.last: Any = None
        self.anchor: Any = None

    def is_recording(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def in_order(self) -> None:
        current = torch.cuda.current_stream(self.index)
        if self.last is not None and self.last != current:
            current.wait_event(self.last.record_event())
        self.last = current

    def most_kept(self) -> int:
        return int(torch.cuda.get_device_properties(self.index).total_memory) // MAX_KEPT_SHARE

    def record(self, part: Part, given: list[Any]) -> tuple[Sequence[Any], Replay]:
        with torch.cuda.device(self.index), torch.cuda.stream(self.stream), garbage_waits():
            if self.anchor is None:  # torch forgets a pool, and fails to begin in it, once no graph has memory there
                self.anchor, _ = self.captured(self.fill_one_element, [])
            graph, results = self.captured(part, given)
        return results, graph.replay

    def captured(self, part: Part, given: list[Any]) -> tuple[Any, Sequence[Any]]:
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads go on: what they ask of the GPU is not recorded, and does no harm
            graph.capture_begin(pool=self.memory, capture_error_mode="thread_local")
            results = part(given)
        except BaseException:
            self.give_up(graph)
            raise
        graph.capture_end()
        return graph, results

    def fill_one_element(self, _given: list[Any]) -> Sequence[Any]:
        return [torch.empty(1, device=f"cuda:{self.index}").fill_(0)]

    def give_up(self, graph: Any) -> None:
        """End a recording that failed. The generator of random numbers takes itself for recorded until another one has
        ended well; the first try after a failure may still be told of that failure."""
        with contextlib.suppress(RuntimeError):
            graph.capture_end()
        for _try in range(3):
            empty = torch.cuda.CUDAGraph()
            with contextlib.suppress(RuntimeError):
                empty.capture_begin(capture_error_mode="thread_local")
                self.fill_one_element([])
                empty.capture_end()
                return


@functools.cache
def graphs_of(index: int) -> Graphs:
    return Graphs(index)


# --- one recording ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Own:
    """A result in the recording's memory."""

    tensor: torch.Tensor
    sizes: Sequence[int]
    strides: Sequence[int]


@dataclass(frozen=True)
class OfInput:
    """A result in the memory of an input: the input itself, or a window from so many elements on."""

    place: int
    window: tuple[Sequence[int], Sequence[int], int] | None


class Recorded:
    """`fixed`: addresses of inputs that are taken as they are, by their places. `copied`: memory for the others."""

    def __init__(self, fixed: dict[int, int], copied: dict[int, torch.Tensor], written: Sequence[int]) -> None:
        self.fixed = fixed
        self.copied = copied
        self.sources = [(place, dense_part(tensor)) for place, tensor in copied.items()]
        self.back = [place for place in written if place in copied]
        # Results: the place of each among those of the recording's own, or -1 and what it is
        self.own_results: list[Own] = []
        self.places: list[int] = []
        self.others: dict[int, OfInput | Any] = {}
        self.users: dict[int, int] = {}  # of each storage of the results, while nobody else has it
        self.handed_out: list[tuple[torch.Tensor, int]] = []  # gradients, with their addresses
        self.replay: Replay = lambda: None

    def is_free(self) -> bool:
        """Whether nobody holds a result."""
        count = torch_api.users_of_storage
        return all(count(handle) == before for handle, before in self.users.items())

    def is_whole(self) -> bool:
        """Whether the memory of results is still there: who has a gradient may resize its storage."""
        return all(tensor.data_ptr() == address for tensor, address in self.handed_out)

    def stray(self, given: Sequence[Any]) -> list[int]:
        """Inputs that are elsewhere than they were."""
        return [place for place, address in self.fixed.items() if given[place].data_ptr() != address]

    def run(self, given: list[Any]) -> list[Any]:
        if self.sources:
            torch_api.copy_all(
                [target for _place, target in self.sources],
                [dense_part(given[place], like) for place, like in self.sources],
            )
        self.replay()
        for place in self.back:
            given[place].copy_(self.copied[place])
        window_on = torch_api.short_window
        windows = [window_on(kept.tensor, kept.sizes, kept.strides, 0) for kept in self.own_results]
        results = [windows[place] if place >= 0 else None for place in self.places]
        for place, kept in self.others.items():
            if isinstance(kept, OfInput):
                tensor = given[kept.place]
                results[place] = tensor if kept.window is None else window_on(tensor, *kept.window)
            else:
                results[place] = kept
        return results

    def keep(self, results: Sequence[Any], inputs: Sequence[Any], device: torch.device) -> None:
        """Note where the results of a recording are."""
        given = {torch_api.storage_handle(x): place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor)}
        known: dict[int, int] = {}  # one tensor may be several results
        for number, result in enumerate(results):
            self.places.append(-1)
            if not isinstance(result, torch.Tensor):
                self.others[number] = result
                continue
            if result.numel():
                check_plain(result, device)
            if (place := given.get(torch_api.storage_handle(result))) is not None:
                self.others[number] = OfInput(place, window_in(result, inputs[place]))
                continue
            if id(result) not in known:
                known[id(result)] = len(self.own_results)
                self.own_results.append(Own(result, tuple(result.shape), result.stride()))
            self.places[number] = known[id(result)]

    def own(self, pool: Pool, are_gradients: bool) -> None:
        """From now on the memory of the results is the pool's. Nobody else may have it."""
        tensors = [kept.tensor for kept in self.own_results]
        sizes = {torch_api.storage_handle(each): each.untyped_storage().nbytes() for each in tensors}
        self.users = {handle: torch_api.users_of_storage(handle) for handle in sizes}
        self.handed_out = [(each, each.data_ptr()) for each in tensors] if are_gradients else []
        pool.add(self, sizes, are_gradients)


def window_in(tensor: torch.Tensor, other: torch.Tensor) -> tuple[Sequence[int], Sequence[int], int] | None:
    offset = int(tensor.storage_offset() - other.storage_offset())
    if not offset and tensor.shape == other.shape and tensor.stride() == other.stride():
        return None
    return tuple(tensor.shape), tensor.stride(), offset


def dense_part(tensor: torch.Tensor, like: torch.Tensor | None = None) -> torch.Tensor:
    """A tensor without the elements that an axis of stride 0 repeats: what is there to copy. `like`: a part of the same
    sizes, which says whether there is anything to leave out."""
    if like is not None and like.shape == tensor.shape:
        return tensor
    if 0 not in tensor.stride():
        return tensor
    sizes = [1 if stride == 0 else size for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    return tensor.as_strided(sizes, tensor.stride())


def may_overlap(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Whether elements may share memory, beside those of axes of stride 0."""
    pairs = sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if stride and size > 1)
    reach = 0
    for stride, size in pairs:
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


# --- all recordings of a part -----------------------------------------------------------------------------------------


@dataclass
class AtSizes:
    """What is known of a part when it is called with some sizes."""

    addresses: list[int | None]
    threads: set[int]  # that have run it as it is: libraries get ready in each by itself
    recordings: list[Recorded] = field(default_factory=list)


class NotRecorded(Exception):
    """Why a part cannot be recorded."""


def check_plain(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device or tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
        raise NotRecorded(f"a tensor on {tensor.device}, or that is not as it is in memory")


@dataclass
class Recordings:
    """How it went with a part: how often it was recorded and replayed, and why some call was not, each reason once."""

    recordings: int = 0
    replayed: int = 0
    notes: list[str] = field(default_factory=list)

    def note(self, reason: str) -> None:
        if reason not in self.notes:
            self.notes.append(reason)


class Recorder:
    """What a host program calls for a part."""

    def __init__(self, part: RecordedPart, graphs: Callable[[], Recordable]) -> None:
        self.part, self.graphs = part, graphs
        self.device = torch.device(part.device)
        self.known: dict[Hashable, AtSizes] = {}
        self.moving: set[int] = set()  # inputs whose address changes from call to call
        self.counts = Recordings()
        self.is_off = False

    def __call__(self, part: Part, given: list[Any]) -> Sequence[Any]:
        graphs = None if self.is_off else self.graphs()
        if graphs is None or graphs.is_recording():
            return part(given)
        with POOL.lock, torch.no_grad():
            recorded = self.ready(graphs, part, given)
            if recorded is not None:
                graphs.in_order()
                self.counts.replayed += 1
                results = recorded.run(given)
                given.clear()
                return results
        return part(given)

    def ready(self, graphs: Recordable, part: Part, given: list[Any]) -> Recorded | None:
        """A recording that fits what is given; None where the part is to run as it is."""
        key = self.key(given)
        at = self.known.get(key)
        if at is None:
            if len(self.known) >= MAX_SIZES:
                self.counts.note(f"there have been {MAX_SIZES} other sizes")
                return None
            addresses = [x.data_ptr() if isinstance(x, torch.Tensor) else None for x in given]
            self.known[key] = AtSizes(addresses, {threading.get_ident()})
            return None
        held = 0
        at.recordings = [each for each in at.recordings if each.is_whole()]
        for recorded in at.recordings:
            stray = recorded.stray(given)
            if not stray:
                if recorded.is_free():
                    return recorded
                held += 1
            elif not any(self.in_pool(given[place]) for place in stray):
                self.moving.update(stray)
        if held >= MAX_HELD:
            self.counts.note("results of all recordings are held")
            return None
        if self.counts.recordings >= MAX_RECORDINGS:
            self.counts.note(f"there are {MAX_RECORDINGS} recordings, for other sizes or addresses")
            return None
        if self.counts.recordings and POOL.kept >= graphs.most_kept():
            self.counts.note(f"recordings keep {POOL.kept >> 20} MiB already: none for further sizes or addresses")
            return None
        if threading.get_ident() not in at.threads:
            at.threads.add(threading.get_ident())
            return None
        if others_may_draw():
            self.counts.note("another thread may draw random numbers, which torch cannot while it records")
            return None
        return self.record(graphs, part, given, at)

    def key(self, given: list[Any]) -> Hashable:
        """What a recording is for, beside addresses. Guards see to types and, where they are fixed, to sizes."""
        inference = torch.is_inference_mode_enabled()
        if not self.part.sizes_vary:
            return inference
        looks = ((tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x for x in given)
        return (inference, *looks)

    def in_pool(self, tensor: torch.Tensor) -> bool:
        return torch_api.storage_handle(tensor) in POOL.storages

    def record(self, graphs: Recordable, part: Part, given: list[Any], at: AtSizes) -> Recorded | None:
        try:
            recorded, inputs = self.prepared(given, at)
            results, recorded.replay = graphs.record(part, list(inputs))
            recorded.keep(results, inputs, self.device)
        except Exception as problem:
            self.is_off = True
            self.counts.note(
                str(problem) if isinstance(problem, NotRecorded) else f"{type(problem).__name__}: {problem}"
            )
            return None
        del results, inputs
        recorded.own(POOL, self.part.lends_gradients)
        at.recordings.append(recorded)
        self.counts.recordings += 1
        return recorded

    def prepared(self, given: list[Any], at: AtSizes) -> tuple[Recorded, list[Any]]:
        """A recording to be, and what its part is given: inputs where they are, or memory that they are copied to."""
        fixed: dict[int, int] = {}
        copied: dict[int, torch.Tensor] = {}
        inputs = list(given)
        tensors = {place: value for place, value in enumerate(given) if isinstance(value, torch.Tensor)}
        for place, value in tensors.items():
            check_plain(value, self.device)
            is_steady = place not in self.moving and at.addresses[place] == value.data_ptr()
            if is_steady or self.in_pool(value):
                fixed[place] = value.data_ptr()
                inputs[place] = torch_api.window_on(value, value.shape, value.stride())
            else:
                sizes, strides = tuple(value.shape), value.stride()
                if may_overlap(sizes, strides):
                    raise NotRecorded(f"elements of input {place} share memory")
                copied[place] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=self.device)
                inputs[place] = torch_api.window_on(copied[place], sizes, strides)
        written = {torch_api.storage_handle(given[place]) for place in self.part.written}
        for place in copied:
            handle = torch_api.storage_handle(given[place])
            if handle in written and sum(torch_api.storage_handle(value) == handle for value in tensors.values()) > 1:
                raise NotRecorded(f"input {place} shares memory that is written with another one")
        return Recorded(fixed, copied, self.part.written), inputs


# --- results ----------------------------------------------------------------------------------------------------------


def from_pool(results: list[Any], seen: Sequence[int]) -> list[Any]:
    """Results of a program, of which those at some places go to its user: they leave the memory of recordings, and with
    each of them all that shares its memory. Gradients go with the memory that they have."""
    groups: dict[int, list[int]] = {}  # by storages that leave: those at places that are seen first
    rest = set(range(len(results))).difference(seen) if len(seen) < len(results) else ()
    for place in (*seen, *rest):
        if isinstance(result := results[place], torch.Tensor):
            handle = torch_api.storage_handle(result)
            if handle in groups:
                groups[handle].append(place)
            elif place not in rest and handle in POOL.storages and handle not in POOL.gradients:
                groups[handle] = [place]
    if not groups:
        return results
    targets, sources = [], []
    with torch.no_grad():
        for places in groups.values():
            first = results[places[0]]
            if all(results[place] is first for place in places) and is_dense(tuple(first.shape), first.stride()):
                made = torch_api.empty_as(first)
                targets.append(made)
                sources.append(first)
                for place in places:
                    results[place] = made
            else:
                memory = first.untyped_storage().clone()
                for place in places:
                    old = results[place]
                    new = torch.empty(0, dtype=old.dtype, device=old.device)
                    results[place] = new.set_(memory, old.storage_offset(), old.shape, old.stride())
        torch_api.copy_all(targets, sources)
    return results


@functools.lru_cache(1024)  # a model's gradients have a few dozen sizes, and are asked about in every step
def is_dense(sizes: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether elements that lie so fill the memory from the first to the last."""
    count = math.prod(sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return count == 0 or (reach + 1 == count and not may_overlap(sizes, strides) and 0 not in strides)
