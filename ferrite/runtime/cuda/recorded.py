"""One recording: where its inputs and results are, and how results get to whoever called it.

    results                                     are handed out
    that only the backward program gets         where they are, as the same tensors every time: to make hundreds of
                                                them anew takes longer than to replay what computes them
    that leave the program                      as copies, in memory of their own, like those of any function; or,
                                                where that is asked for (gradients), where they are, as new tensors
    that the program itself goes on with        where they are, as new tensors

Whatever is handed out where it is must be back before the next replay: `is_free` asks how many hold its memory, and the
tensors that are always the same.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ferrite.capture import torch_runtime
from ferrite.codegen import RecordedPart
from ferrite.errors import Refused
from ferrite.ir import may_overlap
from ferrite.runtime.cuda.graphs import Replay


class ResultMemory(NamedTuple):
    """Memory of a recording's results. `lent`: the user may have it."""

    bytes: int
    lent: bool


class Pool:
    """Memory of recordings, by the handles of its storages."""

    def __init__(self) -> None:
        self.storages: dict[int, ResultMemory] = {}
        self.lock = threading.RLock()

    def add(self, owner: Any, storages: dict[int, ResultMemory]) -> None:
        self.storages |= storages
        weakref.finalize(owner, self.forget, tuple(storages)).atexit = False

    def forget(self, handles: Sequence[int]) -> None:
        for handle in handles:
            self.storages.pop(handle, None)

    def has(self, tensor: torch.Tensor) -> bool:
        return torch_runtime.storage_handle(tensor) in self.storages

    def keeps(self, handle: int) -> bool:
        """Whether that is memory that no user may have."""
        found = self.storages.get(handle)
        return found is not None and not found.lent

    @property
    def kept(self) -> int:
        return sum(memory.bytes for memory in self.storages.values())


POOL = Pool()


class NotRecorded(Refused):
    """Recording: a part cannot be replayed with what it is given."""


@dataclass(frozen=True)
class Own:
    """A result in the recording's memory, and the places where it is one."""

    tensor: torch.Tensor
    places: list[int]


@dataclass(frozen=True)
class OfInput:
    """A result in the memory of an input: the input itself, or a view of it from so many elements on."""

    place: int
    view: tuple[Sequence[int], Sequence[int], int] | None


class Recorded:
    """`fixed`: addresses of inputs that are taken as they are, by their places. `copied`: memory for the others.
    `lends`: what leaves does so in the recording's memory."""

    def __init__(
        self, part: RecordedPart, fixed: dict[int, int], copied: dict[int, torch.Tensor], lends: bool = False
    ) -> None:
        self.part, self.lends = part, lends
        self.fixed = list(fixed)
        self.addresses = list(fixed.values())
        self.copied = copied
        self.targets = [dense_part(tensor) for tensor in copied.values()]
        self.back = [place for place in part.written if place in copied]
        self.replay: Replay = lambda: None
        # Results, at their places, those that are the same every time; the others are made, first views, then copies
        self.results: list[Any] = []
        self.views: list[tuple[torch.Tensor, Sequence[int], Sequence[int]]] = []
        self.looks: list[tuple[Sequence[int], Sequence[int], torch.dtype]] = []
        self.sources: list[torch.Tensor] = []
        self.groups: list[list[torch.Tensor]] = []  # that share memory, and leave together
        self.made: list[tuple[int, int]] = []  # places of results, and which of those that are made they are
        self.of_inputs: dict[int, OfInput] = {}
        self.leaving_with_inputs: list[int] = []
        # What is handed out: memory, and tensors that are always the same; and how many have it while nobody else does
        self.handles: list[int] = []
        self.users: list[int] = []
        self.saved: list[torch.Tensor] = []
        self.holders: list[int] = []
        self.lent: list[torch.Tensor] = []
        self.lent_addresses: list[int] = []

    def is_free(self) -> bool:
        """Whether nobody holds a result."""
        users = torch_runtime.users_of_storages(self.handles)
        return users == self.users and torch_runtime.holders_of(self.saved) == self.holders

    def is_whole(self) -> bool:
        """Whether the memory of results is still there: who has a gradient may resize its storage."""
        return torch_runtime.addresses_of(self.lent) == self.lent_addresses

    def fits(self, given: Sequence[Any]) -> bool:
        """Whether inputs are where they were."""
        return torch_runtime.addresses_of(map(given.__getitem__, self.fixed)) == self.addresses

    def stray(self, given: Sequence[Any]) -> list[int]:
        """Inputs that are elsewhere than they were."""
        pairs = zip(self.fixed, self.addresses, strict=True)
        return [place for place, address in pairs if given[place].data_ptr() != address]

    def run(self, given: list[Any]) -> list[Any]:
        if self.copied:
            sources = [dense_part(given[place], like) for place, like in zip(self.copied, self.targets, strict=True)]
            torch_runtime.copy_all(self.targets, sources)
        self.replay()
        for place in self.back:
            given[place].copy_(self.copied[place])
        untracked_view = torch_runtime.quick_untracked_view
        results = self.results.copy()
        made = [untracked_view(tensor, sizes, strides, 0) for tensor, sizes, strides in self.views]
        if self.sources:
            empty = torch_runtime.empty_on(self.part.device)
            copies = [empty(sizes, strides, dtype) for sizes, strides, dtype in self.looks]
            torch_runtime.copy_all(copies, self.sources)
            made += copies
        for group in self.groups:
            made += moved_together(group)
        for place, number in self.made:
            results[place] = made[number]
        for place, kept in self.of_inputs.items():
            tensor = given[kept.place]
            results[place] = tensor if kept.view is None else untracked_view(tensor, *kept.view)
        return from_pool(results, self.leaving_with_inputs) if self.leaving_with_inputs else results

    def keep(self, results: Sequence[Any], inputs: Sequence[Any]) -> None:
        """Note what the results of a recording are, and in which of the ways they are handed out."""
        given = {
            torch_runtime.storage_handle(x): place for place, x in enumerate(inputs) if isinstance(x, torch.Tensor)
        }
        device = torch.device(self.part.device)
        known: dict[int, Own] = {}  # one tensor may be several results
        by_memory: dict[int, list[Own]] = {}
        for number, result in enumerate(results):
            if not isinstance(result, torch.Tensor):
                self.results.append(result)
                continue
            self.results.append(None)
            if result.numel():
                check_plain(result, device)
            handle = torch_runtime.storage_handle(result)
            if (place := given.get(handle)) is not None:
                self.of_inputs[number] = OfInput(place, view_in(result, inputs[place]))
            elif id(result) in known:
                known[id(result)].places.append(number)
            else:
                own = known[id(result)] = Own(result, [number])
                by_memory.setdefault(handle, []).append(own)
        self.leaving_with_inputs = [place for place in self.part.leaving if place in self.of_inputs]
        self.keep_own(by_memory)

    def keep_own(self, by_memory: dict[int, list[Own]]) -> None:
        leaving, saved = set(self.part.leaving), set(self.part.saved)
        views, single, together = list[Own](), list[Own](), list[list[Own]]()
        for handle, group in by_memory.items():
            places = {place for own in group for place in own.places}
            if leaving.isdisjoint(places) or (self.lends and places <= leaving):
                self.handles.append(handle)
                for own in group:
                    if saved.issuperset(own.places):
                        self.save(own)
                    else:
                        views.append(own)
                    if not leaving.isdisjoint(places):
                        self.lent.append(own.tensor)
            elif len(group) == 1 and is_dense(group[0].tensor):
                single.append(group[0])
            else:
                together.append(sorted(group, key=lambda own: leaving.isdisjoint(own.places)))
        self.views = [(own.tensor, tuple(own.tensor.shape), own.tensor.stride()) for own in views]
        self.sources = [own.tensor for own in single]
        self.looks = [(tuple(each.shape), each.stride(), each.dtype) for each in self.sources]
        self.groups = [[own.tensor for own in group] for group in together]
        made = (*views, *single, *(own for group in together for own in group))
        self.made = [(place, number) for number, own in enumerate(made) for place in own.places]

    def save(self, own: Own) -> None:
        tensor = torch_runtime.untracked_view(own.tensor, own.tensor.shape, own.tensor.stride())
        self.saved.append(tensor)
        for place in own.places:
            self.results[place] = tensor

    def own(self, pool: Pool) -> None:
        """From now on the memory of the results is the pool's. Nobody else may have it."""
        lent = {torch_runtime.storage_handle(each) for each in self.lent}
        tensors = [*self.saved, *(tensor for tensor, _sizes, _strides in self.views), *self.sources]
        tensors += [tensor for group in self.groups for tensor in group]
        sizes = {torch_runtime.storage_handle(each): each.untyped_storage().nbytes() for each in tensors}
        pool.add(self, {handle: ResultMemory(size, handle in lent) for handle, size in sizes.items()})
        del tensors
        self.users = torch_runtime.users_of_storages(self.handles)
        self.holders = torch_runtime.holders_of(self.saved)
        self.lent_addresses = torch_runtime.addresses_of(self.lent)


# --- results that leave -----------------------------------------------------------------------------------------------


def from_pool(results: list[Any], seen: Sequence[int]) -> list[Any]:
    """Results of a program, of which those at some places go to its user: they leave memory that recordings keep for
    themselves, and with each of them all that shares its memory."""
    tensors = {place: value for place in seen if isinstance(value := results[place], torch.Tensor)}
    leaving = {handle for each in tensors.values() if POOL.keeps(handle := torch_runtime.storage_handle(each))}
    if not leaving:
        return results
    groups: dict[int, dict[int, torch.Tensor]] = {handle: {} for handle in leaving}
    for result in results:
        if isinstance(result, torch.Tensor) and (handle := torch_runtime.storage_handle(result)) in groups:
            groups[handle][id(result)] = result
    new: dict[int, torch.Tensor] = {}
    with torch.no_grad():
        for group in groups.values():
            old = list(group.values())
            if len(old) == 1 and is_dense(old[0]):
                new[id(old[0])] = torch_runtime.empty_as(old[0]).copy_(old[0])
            else:
                new.update(zip(group, moved_together(old), strict=True))
    return [new.get(id(result), result) for result in results]


def moved_together(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Tensors that share memory, in other memory that they share. Where the first has all of it, the others are its
    views: autograd knows then when what it saved was changed."""
    first = tensors[0]
    memory = first.untyped_storage().clone()
    has_all = is_dense(first) and first.numel() * first.element_size() == memory.nbytes()
    new = in_memory(memory, first)
    return [
        new,
        *(
            new.as_strided(old.shape, old.stride(), old.storage_offset())
            if has_all and old.dtype == first.dtype
            else in_memory(memory, old)
            for old in tensors[1:]
        ),
    ]


def in_memory(memory: torch.UntypedStorage, old: torch.Tensor) -> torch.Tensor:
    new = torch.empty(0, dtype=old.dtype, device=old.device)
    return new.set_(memory, old.storage_offset(), old.shape, old.stride())


# --- how tensors lie --------------------------------------------------------------------------------------------------


def check_plain(tensor: torch.Tensor, device: torch.device) -> None:
    if tensor.device != device or tensor.is_conj() or tensor.is_neg() or tensor.layout is not torch.strided:
        raise NotRecorded(f"a tensor on {tensor.device}, or that is not as it is in memory")


def view_in(tensor: torch.Tensor, other: torch.Tensor) -> tuple[Sequence[int], Sequence[int], int] | None:
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


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill the memory from the first to the last."""
    sizes, strides = tuple(tensor.shape), tensor.stride()
    count = math.prod(sizes)
    reach = sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return count == 0 or (reach + 1 == count and not may_overlap(zip(sizes, strides, strict=True)) and 0 not in strides)
