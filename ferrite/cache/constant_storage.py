"""Objects that compiled code names beside its inputs, as data that another process can follow.

What the captured graph holds is kept by its place there: its contents are part of the key. A small tensor that the
compiler made itself is kept by value. Anything else cannot be kept.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api, torch_state
from ferrite.errors import NotCached
from ferrite.graph import Place, PlaceIndex, Places

MAX_TENSOR_BYTES = 1 << 20  # bytes of a tensor that is kept by value


@dataclass(frozen=True)
class KeptObject:
    """How to find an object again: by its place in the captured graph, or made of bytes that look like that."""

    place: tuple[int, int] | None
    dtype: str = ""
    sizes: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()


def kept_objects(objects: Mapping[str, Any], index: PlaceIndex) -> tuple[dict[str, KeptObject], dict[str, bytes]]:
    """How to find each object again, and the bytes of those kept by value; NotCached where that cannot be."""
    kept: dict[str, KeptObject] = {}
    sections: dict[str, bytes] = {}
    for name, value in objects.items():
        place = index.place_of(value)
        if isinstance(value, torch.nn.Module):
            raise NotCached("a graph inside it is run in eager, and may have been rewritten for that")
        if place is not None:
            kept[name] = KeptObject(place)
            continue
        check_value(value, objects)
        kept[name] = KeptObject(None, str(value.dtype), tuple(value.shape), value.stride())
        sections[section_of(name)] = bytes_of(value)
    return kept, sections


def found_objects(kept: Mapping[str, KeptObject], sections: Mapping[str, bytes], places: Places) -> dict[str, Any]:
    return {
        name: tensor_from(how, sections[section_of(name)]) if how.place is None else held_at(how.place, places)
        for name, how in kept.items()
    }


def held_at(place: Place, places: Places) -> Any:
    found = places.object_at(place)
    if isinstance(found, torch.fx.Node):
        raise ValueError(f"the graph holds nothing at {place}")
    return found


def section_of(name: str) -> str:
    return f"object {name}"


def check_value(value: Any, objects: Mapping[str, Any]) -> None:
    """Raise NotCached of what cannot be written down in full."""
    what = "a constant that compiling made"
    if type(value) is not torch.Tensor or torch_api.is_fake(value) or value.layout is not torch.strided:
        raise NotCached(f"it needs a {type(value).__qualname__} that its graph does not hold")
    if value.device.type != "cpu" or value.requires_grad or value.is_quantized or value.is_conj() or value.is_neg():
        raise NotCached(f"{what} is more than numbers in memory")
    if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
        raise NotCached(f"{what} is larger than {MAX_TENSOR_BYTES >> 20} MiB")
    if not is_dense(value.shape, value.stride()):
        raise NotCached(f"{what} does not lie densely in memory")
    tensors = [each for each in objects.values() if isinstance(each, torch.Tensor) and each.layout is torch.strided]
    if sum(same_memory(value, each) for each in tensors) > 1:
        raise NotCached(f"{what} shares memory with another")


def check_looks(dtype: Any, sizes: Sequence[int], strides: Sequence[int], count: int) -> None:
    """ValueError where no tensor of so many bytes looks like that: before any memory is taken for it."""
    if not isinstance(dtype, torch.dtype) or len(sizes) != len(strides):
        raise ValueError("a constant without looks")
    if any(not 0 <= number <= MAX_TENSOR_BYTES for number in (*sizes, *strides)):
        raise ValueError("a constant of impossible sizes")
    if math.prod(sizes) * dtype.itemsize != count or not is_dense(sizes, strides):
        raise ValueError("a constant of other sizes than its contents")


def is_dense(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """Every element of its memory once."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True)):
        if size != 1 and stride != reach:
            return 0 in sizes
        reach *= size
    return True


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def bytes_of(value: torch.Tensor) -> bytes:
    with torch_state.on_real_tensors():
        flat = value.contiguous().view(-1).view(torch.uint8) if value.numel() else torch.empty(0, dtype=torch.uint8)
        return bytes(flat.tolist())


def tensor_from(how: KeptObject, data: bytes) -> torch.Tensor:
    dtype = getattr(torch, how.dtype.removeprefix("torch."))
    check_looks(dtype, how.sizes, how.strides, len(data))
    with torch_state.on_real_tensors():
        value = torch.empty_strided(how.sizes, how.strides, dtype=dtype)
        if data:
            value.copy_(torch.frombuffer(bytearray(data), dtype=dtype).view(how.sizes))
        return value
