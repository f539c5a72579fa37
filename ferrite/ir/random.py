"""Counter-based random numbers: number k of a stream is a function of (seed, k) alone.

A seed is a key of 64 bits. The counter of a number holds the place of its element in the low bits, and above them the
number of the random operator, so that no two operators with one key share a number. The generator is the one that
`torch.ops.ferrite.random` runs in eager: both give the same bits.
"""

from __future__ import annotations

import torch

from ferrite.ir.philox import DIGITS, WORD, philox

PLACE_BITS = 48  # enough for the places of any tensor
MAX_RANDOM_OPERATORS = 1 << 62 - PLACE_BITS
KINDS = ("uniform", "bits")


def random_numbers(kind: str, seed: torch.Tensor, counter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`uniform`: floats from 0 to below 1; `bits`: integers of 63 random bits."""
    key = (seed & WORD, seed >> 32 & WORD)
    operator, place = counter >> PLACE_BITS, counter & (1 << PLACE_BITS) - 1
    if kind == "uniform" and dtype is not torch.float64:
        digits = DIGITS[dtype]
        return ((word(key, operator, place) >> 32 - digits).float() * 2.0**-digits).to(dtype)
    first, second = word(key, operator, 2 * place), word(key, operator, 2 * place + 1)
    if kind == "uniform":
        return ((first >> 5 << 26) + (second >> 6)).double() * 2.0**-53
    if kind == "bits":
        return ((first << 31) + (second >> 1)).to(dtype)
    raise ValueError(f"{kind!r} is no kind of random numbers; there are {', '.join(KINDS)}")


def word(key: tuple[torch.Tensor, torch.Tensor], operator: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
    """Word `place` of 32 bits of an operator's own: blocks of four come from one counter."""
    block, within = place // 4, place % 4
    words = philox((block & WORD, block >> 32, operator & WORD, operator >> 32), key)
    chosen = words[3]
    for number in range(3):
        chosen = torch.where(within == number, words[number], chosen)
    return chosen
