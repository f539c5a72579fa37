"""Parts of host programs, recorded once and replayed: all launches of a part, torch's own too, in one call.

A recording has fixed addresses. An input is taken by its address where that does not change from call to call (a
parameter, what another recording left in its memory), else copied into memory of the recording's own. Results that the
program returns to its user are copied out of that memory; what it keeps for its backward program stays there
(`ferrite.runtime.cuda.recorded`), and a recording is not replayed while anybody holds such a result of its last time.
So there is nothing to announce, and no number that changes under its owner's hands; whoever keeps results gets a second
recording, or the part as it is.

Where `recorded_gradients="lent"` asks for it, gradients are not copied: they are as large as the model, and mostly gone
before the next ones are computed. They are handed out in the memory that the recording has for them anyway; whoever
keeps some gets a second recording, and a third that copies. (Results of a forward program, which the next call often
finds still held, would cost a second recording with all that is saved for backward.) Another stream may still read
what nobody holds any more: `record_stream` tells torch's allocator of that, which does not get this memory back. So a
backward that lends comes after all that any stream was given before; where a driver cannot do that, gradients are
copied. A capture in another thread would be lost by it: where there are other threads, the backward runs as it is.

    1st call of some sizes    the part as it is: libraries get ready, addresses are noted
    2nd                       recorded, then replayed
    from then on              replayed, where addresses are as recorded and results are free

Recordings of a GPU run one after the other, whatever streams they are called on. Those whose results are all copied
out share one pool of memory. One whose results stay has a pool of its own: what a recording frees while it is made goes
back to its pool; results of a later one would be put there, and the first writes there whenever it is replayed.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferrite.capture import torch_runtime
from ferrite.codegen import RecordedPart
from ferrite.errors import Refused
from ferrite.ir import may_overlap
from ferrite.runtime.cuda.graphs import Part, Recordable
from ferrite.runtime.cuda.recorded import POOL, NotRecorded, Recorded, check_plain, from_pool

MAX_RECORDINGS = 16  # of one part: each has a graph of its own, and memory for results
MAX_SIZES = 64  # that are remembered
MAX_HELD = 3  # of one part at the same sizes, while results of the others are held


def others_may_act() -> bool:
    """Whether another thread may use a GPU meanwhile. One that draws random numbers while anything is recorded gets an
    error of torch's generators; one that captures loses what it captured when a stream is told to wait for all others.
    Threads of autograd, which Python did not start, work while the one that called them waits."""
    current = threading.current_thread()
    calling = {current} if current.ident is not None and not isinstance(current, threading._DummyThread) else set()
    waiting = calling or {current, threading.main_thread()}
    return any(each not in waiting and not each.daemon for each in threading.enumerate())


@dataclass
class AtSizes:
    """What is known of a part when it is called with some sizes."""

    addresses: list[int | None]
    threads: set[int]  # that have run it as it is: libraries get ready in each by itself
    recordings: list[Recorded] = field(default_factory=list)


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
            return self.as_it_is(part, given)
        with POOL.lock, torch.no_grad():
            recorded = self.ready(graphs, part, given)
            if recorded is not None and recorded.lent and (others_may_act() or not graphs.after_all()):
                self.counts.note("some stream may be captured, and other streams may still read gradients")
                recorded = None
            if recorded is not None:
                graphs.in_order()
                self.counts.replayed += 1
                results = recorded.run(given)
                given.clear()
                return results
        return self.as_it_is(part, given)

    def as_it_is(self, part: Part, given: list[Any]) -> Sequence[Any]:
        """A result may be in the memory of an input, and that in a recording's."""
        results = part(given)
        return from_pool(list(results), self.part.leaving) if POOL.storages else results

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
            if recorded.fits(given):
                if recorded.is_free():
                    return recorded
                held += 1
                continue
            stray = recorded.stray(given)
            if not any(POOL.has(given[place]) for place in stray):
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
        if others_may_act():
            self.counts.note("another thread may draw random numbers, which torch cannot while it records")
            return None
        # The last one that there may be gives out copies, so that it is not held, whoever keeps gradients.
        lends = self.part.lends_gradients and held < MAX_HELD - 1 and graphs.can_wait_for_all()
        return self.record(graphs, part, given, at, lends)

    def key(self, given: list[Any]) -> Hashable:
        """What a recording is for, beside addresses. Guards see to types and, where they are fixed, to sizes."""
        inference = torch.is_inference_mode_enabled()
        if not self.part.sizes_vary:
            return inference
        looks = ((tuple(x.shape), x.stride()) if isinstance(x, torch.Tensor) else x for x in given)
        return (inference, *looks)

    def record(self, graphs: Recordable, part: Part, given: list[Any], at: AtSizes, lends: bool) -> Recorded | None:
        try:
            recorded, inputs = self.prepared(given, at, lends)
            results, recorded.replay = graphs.record(part, list(inputs), self.part.keeps or lends)
            recorded.keep(results, inputs)
        except Exception as problem:
            self.is_off = True
            self.counts.note(str(problem) if isinstance(problem, Refused) else f"{type(problem).__name__}: {problem}")
            return None
        del results, inputs
        recorded.own(POOL)
        at.recordings.append(recorded)
        self.counts.recordings += 1
        return recorded

    def prepared(self, given: list[Any], at: AtSizes, lends: bool) -> tuple[Recorded, list[Any]]:
        """A recording to be, and what its part is given: inputs where they are, or memory that they are copied to."""
        fixed: dict[int, int] = {}
        copied: dict[int, torch.Tensor] = {}
        inputs = list(given)
        tensors = {place: value for place, value in enumerate(given) if isinstance(value, torch.Tensor)}
        for place, value in tensors.items():
            check_plain(value, self.device)
            is_steady = place not in self.moving and at.addresses[place] == value.data_ptr()
            if is_steady or POOL.has(value):
                fixed[place] = value.data_ptr()
                inputs[place] = torch_runtime.untracked_view(value, value.shape, value.stride())
            else:
                sizes, strides = tuple(value.shape), value.stride()
                if may_overlap(zip(sizes, strides, strict=True)):
                    raise NotRecorded(f"elements of input {place} share memory")
                copied[place] = torch.empty_strided(sizes, strides, dtype=value.dtype, device=self.device)
                inputs[place] = torch_runtime.untracked_view(copied[place], sizes, strides)
        written = {torch_runtime.storage_handle(given[place]) for place in self.part.written}
        for place in copied:
            handle = torch_runtime.storage_handle(given[place])
            if (
                handle in written
                and sum(torch_runtime.storage_handle(value) == handle for value in tensors.values()) > 1
            ):
                raise NotRecorded(f"input {place} shares memory that is written with another one")
        return Recorded(self.part, fixed, copied, lends), inputs
