"""Whether torch draws random numbers on a GPU as `ferrite.lower.cuda_random` says: asked of torch itself, once."""

from __future__ import annotations

import torch

from ferrite.capture import on_real_tensors, torch_operators
from ferrite.ir import random_numbers
from ferrite.lower import THREAD_GROUP, DrawingKernel, distribution_numbers, dropout_numbers

SEED, FIRST_BLOCK, CHANCE = 0x1234_5678_9ABC_DEF0, 5, 0.625  # the chance is the same number in every type
MAX_COMPARED = 5000


def random_threads(device: torch.device, kernel: DrawingKernel) -> int | None:
    """How many threads a kernel of torch that draws has at most; None where it does not draw as we would."""
    if torch.cuda.is_current_stream_capturing():  # nothing can be read back now
        return None
    if (device, kernel) not in _found:
        about = torch.cuda.get_device_properties(device)
        most = about.multi_processor_count * (about.max_threads_per_multi_processor // THREAD_GROUP) * THREAD_GROUP
        _found[device, kernel] = most if draws_as_expected(device, kernel, most) else None
    return _found[device, kernel]


_found: dict[tuple[torch.device, DrawingKernel], int | None] = {}


def draws_as_expected(device: torch.device, kernel: DrawingKernel, most: int) -> bool:
    try:
        with on_real_tensors():
            draws = dropout_draws_so if kernel == "dropout" else distributions_draw_so
            return draws(device, most)
    except (RuntimeError, AttributeError):  # no memory, or no such operator
        return False


def dropout_draws_so(device: torch.device, most: int) -> bool:
    """Elements that one thread draws in one turn and in several, in vectors of four and of eight."""
    cases = [(torch.float32, 4, 1000), (torch.float32, 4, 5 * most - 4), (torch.bfloat16, 4, 1004)]
    cases += [(torch.bfloat16, 8, 1 << 12), (torch.float16, 8, 9 * most + 8)]
    return all(mask_is_expected(device, most, *case) for case in cases)


def mask_is_expected(device: torch.device, most: int, dtype: torch.dtype, vector: int, elements: int) -> bool:
    generator = started(device)
    ones = torch.ones(elements, dtype=dtype, device=device)
    mask = torch_operators.dropout_mask(ones, CHANCE, generator)
    if generator.get_offset() != offset_after(elements, most):
        return False
    places = compared_places(elements, 4 * vector)
    drawn = expected(*dropout_numbers(places, FIRST_BLOCK, vector, threads_of(elements, most)))
    return torch.equal(drawn < CHANCE, mask.cpu()[places])


def distributions_draw_so(device: torch.device, most: int) -> bool:
    """Elements that one thread draws in one turn and in several; bounds that are rounded to, and chances."""
    for elements in (1000, most, 9 * most + 3):
        generator, places = started(device), compared_places(elements, 32)
        drawn = expected(*distribution_numbers(places, FIRST_BLOCK, threads_of(elements, most)))
        given = torch.rand(elements, device=device, generator=generator)
        if generator.get_offset() != offset_after(elements, most):
            return False
        if not torch.equal(torch.where(drawn == 1, 0.0, drawn), given.cpu()[places]):
            return False
        hits = torch.empty(elements, dtype=torch.bool, device=device).bernoulli_(CHANCE, generator=started(device))
        narrow = torch.rand(elements, device=device, dtype=torch.bfloat16, generator=started(device))
        rounded = drawn.bfloat16()
        if not torch.equal(drawn < CHANCE, hits.cpu()[places]):
            return False
        if not torch.equal(torch.where(rounded == 1, 0.0, rounded), narrow.cpu()[places]):
            return False
    return True


def started(device: torch.device) -> torch.Generator:
    generator = torch.Generator(device)
    generator.manual_seed(SEED)
    generator.set_offset(4 * FIRST_BLOCK)
    return generator


def threads_of(elements: int, most: int) -> int:
    return min(-(-elements // THREAD_GROUP), most // THREAD_GROUP) * THREAD_GROUP


def offset_after(elements: int, most: int) -> int:
    """Where a generator is that began at the first block, after a draw for so many elements."""
    return 4 * (FIRST_BLOCK + (elements - 1) // (threads_of(elements, most) * 4) + 1)


def compared_places(elements: int, last: int) -> torch.Tensor:
    """Every few elements, in steps that are odd, so that every place in a vector is among them; and the last ones."""
    return torch.cat([torch.arange(0, elements, elements // MAX_COMPARED | 1), torch.arange(elements - last, elements)])


def expected(counter: torch.Tensor, stream: torch.Tensor) -> torch.Tensor:
    return random_numbers("curand_uniform", torch.tensor(SEED), counter, stream, torch.float32)
