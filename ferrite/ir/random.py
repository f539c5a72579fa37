"""Counter-based random numbers: number k of a stream is a function of (seed, stream, k) alone.

A seed is a key of 64 bits; with one key, streams share no number. `uniform` and `bits` are what our own operator
(`ferrite.passes.joint.counter_rng`) gives in eager, where every operator has a stream; `curand_uniform` is what kernels
of torch draw on GPUs of NVIDIA, where every thread has one.
"""

from __future__ import annotations

import threading
from typing import Any

import torch

from ferrite.ir.philox import DIGITS, WORD, philox

# Reading where a generator is and moving it are two calls of torch.
_one_reader = threading.Lock()

KINDS = ("uniform", "bits", "curand_uniform")


def random_numbers(
    kind: str, seed: torch.Tensor, counter: torch.Tensor, stream: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`uniform`: floats from 0 to below 1; `bits`: integers of 63 random bits; `curand_uniform`: floats above 0, up to
    and with 1."""
    key = (seed & WORD, seed >> 32 & WORD)
    if kind == "curand_uniform":
        # A word has more digits than the sum holds: one rounding to float, and then none by the product.
        return (word(key, stream, counter).float() * 2.0**-32 + 2.0**-33).to(dtype)
    if kind == "uniform" and dtype is not torch.float64:
        digits = DIGITS[dtype]
        return ((word(key, stream, counter) >> 32 - digits).float() * 2.0**-digits).to(dtype)
    first, second = word(key, stream, 2 * counter), word(key, stream, 2 * counter + 1)
    if kind == "uniform":
        return ((first >> 5 << 26) + (second >> 6)).double() * 2.0**-53
    if kind == "bits":
        return ((first << 31) + (second >> 1)).to(dtype)
    raise ValueError(f"{kind!r} is no kind of random numbers; there are {', '.join(KINDS)}")


def word(key: tuple[torch.Tensor, torch.Tensor], stream: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Word `place` of 32 bits of a stream: blocks of four come from one counter."""
    block, within = place // 4, place % 4
    words = philox((block & WORD, block >> 32, stream & WORD, stream >> 32), key)
    chosen = words[3]
    for number in range(3):
        chosen = torch.where(within == number, words[number], chosen)
    return chosen


def advance_generator(device: int, blocks: int) -> tuple[int, int]:
    """The seed of a GPU's default generator, its 64 bits as a signed number, and the number of the block of four words
    at which every stream of it is; from now on it is so many blocks further."""
    generator = default_generator(device)
    with _one_reader:
        words = generator.get_offset()
        generator.set_offset(words + 4 * blocks)
    seed = generator.initial_seed()
    return seed - (seed >> 63 << 64), words // 4


def default_generator(device: int) -> Any:
    return torch.cuda.default_generators[device]
