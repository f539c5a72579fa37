"""CUDA graphs: what a GPU does, recorded and replayed. Torch makes them; how it wants to be asked is here."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from ferrite.capture import torch_runtime
from ferrite.collector import garbage_waits
from ferrite.runtime.cuda.driver import CudaError, libcuda

MAX_KEPT_SHARE = 4  # a quarter of a GPU's memory: beyond that a part is not recorded for further sizes or addresses
Part = Callable[[list[Any]], Sequence[Any]]
Replay = Callable[[], None]


class Recordable(Protocol):
    """A GPU that records; or what a test has for one."""

    def is_recording(self) -> bool:
        """Whether the user records what is going on: a recording inside another is none."""

    def in_order(self) -> None:
        """What is done from here on comes after all recordings that were replayed before, on any stream."""

    def can_wait_for_all(self) -> bool:
        """Whether it can be had that something comes after all that any stream was given."""

    def after_all(self) -> bool:
        """What is done from here on comes after that; False where it does not, this time."""

    def most_kept(self) -> int:
        """Bytes that recordings may keep, beyond one for each part."""

    def record(self, part: Part, given: list[Any], keeps: bool) -> tuple[Sequence[Any], Replay]:
        """Results of a part, which are not computed yet, and what computes them. Raises where that is impossible.
        `keeps`: results stay where they are while other recordings are replayed, none of which may write there."""


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

    def can_wait_for_all(self) -> bool:
        return libcuda().can_wait_for_all()

    def after_all(self) -> bool:
        try:
            libcuda().wait_for_all(self.index, torch_runtime.current_stream_of(self.index))
        except CudaError:
            return False
        return True

    def most_kept(self) -> int:
        return int(torch.cuda.get_device_properties(self.index).total_memory) // MAX_KEPT_SHARE

    def record(self, part: Part, given: list[Any], keeps: bool) -> tuple[Sequence[Any], Replay]:
        with torch.cuda.device(self.index), torch.cuda.stream(self.stream), garbage_waits():
            if self.anchor is None:  # torch forgets a pool, and fails to begin in it, once no graph has memory there
                self.anchor, _ = self.captured(self.fill_one_element, [], self.memory)
            # What a recording frees goes back to its pool, for results of later ones; it writes there at every replay.
            graph, results = self.captured(part, given, None if keeps else self.memory)
        return results, graph.replay

    def captured(self, part: Part, given: list[Any], pool: Any) -> tuple[Any, Sequence[Any]]:
        """`pool`: where its memory comes from; None for a pool of its own."""
        graph = torch.cuda.CUDAGraph()
        try:
            # other threads go on: what they ask of the GPU is not recorded, and does no harm
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
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
