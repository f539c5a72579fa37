"""Which matrix products of bytes are kernels of our own: `torch._int_mm`, exact, in 32 bits.

Passes of two stages ask, as they do about other products (`own_products`): `post_grad.byte_products`, and
`freezing.byte_panels`, which stores constant factors as the kernels read them.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.machines import MatrixProduct, thread_counts
from ferrite.passes.shared.facts import beside_torch
from ferrite.rewrite import Site

aten = torch.ops.aten
WORD_BYTES = 4  # bytes that are multiplied at once
# Of a sum: with fewer a tile has more to do at its end than before, with more packed factors take much memory.
MIN_SUMMED, MAX_SUMMED = 16, 1 << 16


def reason_against(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a product of bytes cannot be a kernel of our own."""
    if site.options.own_products == "off":
        return Refusal("the option own_products is off")
    if left.device.type != "cpu" or (left.dtype, right.dtype) != (torch.int8, torch.int8):
        return Refusal("kernels of our own are there for bytes with signs on a cpu")
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return Refusal("an operand is sparse")
    inner, columns = right.shape
    if not all(isinstance(size, int) for size in (inner, columns)):
        return Refusal("its columns, or how long its sums are, are known at run time only")
    if any(isinstance(size, int) and size == 0 for size in (*left.shape, columns)):
        return Refusal("it has no elements, or sums of none")
    return None if MIN_SUMMED <= inner <= MAX_SUMMED else Refusal("its sums are very short, or very long")


def reason_to_leave(site: Site, left: torch.Tensor, right: torch.Tensor, in_panels: bool = False) -> Refusal | None:
    """Why a kernel of our own was not measured to be at least as fast as torch's, where the option leaves it open."""
    if site.options.own_products != "auto":
        return None
    if site.options.executor != "native":
        return Refusal("it pays in kernels alone")
    rows, (inner, columns) = torch_api.size_hint(left.shape[0]), right.shape
    lie_along = all(torch_api.known_equal(step, 1) for step in (left.stride(1), right.stride(0)))
    has_all_cores = thread_counts.works_with_all_of_few_cores()
    return beside_torch().byte_product(MatrixProduct(rows, inner, columns, lie_along, in_panels, has_all_cores))


def in_words(site: Site, matrix: Any, dimension: int, inner: int) -> Any:
    """A matrix with zeros behind what is summed, to a multiple of four."""
    missing = -inner % WORD_BYTES
    if not missing:
        return matrix
    pads = [0, missing] if dimension == 1 else [0, 0, 0, missing]
    return site.call(aten.constant_pad_nd.default, matrix, pads)
