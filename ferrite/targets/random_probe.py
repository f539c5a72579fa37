"""Whether torch draws random numbers on a GPU as `ferrite.lower.cuda_random` says: asked of torch itself, once."""

from __future__ import annotations

import torch

from ferrite.capture import on_real_tensors, torch_operators
from ferrite.ir import random_numbers
from ferrite.lower import THREAD_GROUP, dropout_numbers

SEED, FIRST_BLOCK, CHANCE = 0x1234_5678_9ABC_DEF0, 5, 0.625  # the chance is the same number in every type
MAX_COMPARED = 5000


def random_threads(device: torch.device) -> int | None:
    """How many threads a kernel of torch that draws has at most; None where it does not draw as we would."""
    if torch.cuda.is_current_stream_capturing():  # nothing can be read back now
        return None
    if device not in _found:
        about = torch.cuda.get_device_properties(device)
        groups = about.multi_processor_count * (about.max_threads_per_multi_processor // THREAD_GROUP)
        _found[device] = groups * THREAD_GROUP if draws_as_expected(device, groups * THREAD_GROUP) else None
    return _found[device]


_found: dict[torch.device, int | None] = {}


def draws_as_expected(device: torch.device, most: int) -> bool:
    """Elements that one thread draws in one turn and in several, in vectors of four and of eight."""
    cases = [(torch.float32, 4, 1000), (torch.float32, 4, 5 * most - 4), (torch.bfloat16, 4, 1004)]
    cases += [(torch.bfloat16, 8, 1 << 12), (torch.float16, 8, 9 * most + 8)]
    try:
        with on_real_tensors():
            return all(draws_so(device, most, *case) for case in cases)
    except (RuntimeError, AttributeError):  # no memory, or no such operator
        return False


def draws_so(device: torch.device, most: int, dtype: torch.dtype, vector: int, elements: int) -> bool:
    generator = torch.Generator(device)
    generator.manual_seed(SEED)
    generator.set_offset(4 * FIRST_BLOCK)
    ones = torch.ones(elements, dtype=dtype, device=device)
    mask = torch_operators.dropout_mask(ones, CHANCE, generator)
    threads = min(-(-elements // THREAD_GROUP), most // THREAD_GROUP) * THREAD_GROUP
    if generator.get_offset() != 4 * (FIRST_BLOCK + (elements - 1) // (threads * 4) + 1):
        return False
    places = torch.arange(0, elements, elements // MAX_COMPARED | 1)  # an odd step: every place in a vector
    places = torch.cat([places, torch.arange(elements - 4 * vector, elements)])
    counter, stream = dropout_numbers(places, FIRST_BLOCK, vector, threads)
    drawn = random_numbers("curand_uniform", torch.tensor(SEED), counter, stream, torch.float32)
    return torch.equal(drawn < CHANCE, mask.cpu()[places])
