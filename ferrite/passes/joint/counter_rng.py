"""Random numbers by counting: a pure function of a key, the number of the call and the place of the element.

    key = random_key(0, device=cpu)             one draw from the device's default generator
    random(key, 0, [4, 3], "uniform", ...)      call 0
    random(key, 1, [5], "normal", ...)          call 1

The generator is Philox-4x32-10. Its counter holds the place of a block of four words and the number of the call, so
that no two calls with one key, and no two elements of a call, share a word. Since `random` draws from nowhere it can
be fused, and calculated again in the backward part: the numbers are the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from ferrite.ir import DIGITS, WORD, philox
from ferrite.passes.shared.library import define

KINDS = ("uniform", "normal", "exponential", "integer")


def words(key: torch.Tensor, index: int, count: int) -> torch.Tensor:
    """So many words of 32 bits for one call."""
    block = torch.arange((count + 3) // 4, dtype=torch.int64, device=key.device)
    number = torch.full_like(block, index & WORD)
    counter = (block & WORD, block >> 32, number, torch.full_like(block, index >> 32 & WORD))
    return torch.stack(philox(counter, (key[0], key[1])), 1).flatten()[:count]


def unit(drawn: torch.Tensor) -> torch.Tensor:
    """Pairs of words as doubles of 53 bits from 0 to below 1."""
    pairs = drawn.view(-1, 2)
    return ((pairs[:, 0] >> 5 << 26) + (pairs[:, 1] >> 6)).double() * 2.0**-53


def uniform(key: torch.Tensor, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    digits = DIGITS[dtype]
    if dtype is torch.float64:
        return unit(words(key, index, 2 * count))
    return ((words(key, index, count) >> 32 - digits).float() * 2.0**-digits).to(dtype)


def normal(key: torch.Tensor, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """By the method of Box and Muller, in double precision."""
    pairs = unit(words(key, index, 4 * count)).view(-1, 2)
    radius = torch.sqrt(-2 * torch.log1p(-pairs[:, 0]))  # the logarithm of a number that is never 0
    return (radius * torch.cos(2 * math.pi * pairs[:, 1])).to(dtype)


def exponential(key: torch.Tensor, index: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """With rate 1, in double precision; never 0, by which people divide."""
    found = -torch.log1p(-unit(words(key, index, 2 * count)))
    return found.to(dtype).clamp_min(torch.finfo(dtype).tiny)


def integer(key: torch.Tensor, index: int, count: int, dtype: torch.dtype, low: int, high: int) -> torch.Tensor:
    """The remainder of 63 bits: every number is as likely as any other to within (high - low) / 2**63."""
    pairs = words(key, index, 2 * count).view(-1, 2)
    return (((pairs[:, 0] << 31) + (pairs[:, 1] >> 1)) % (high - low) + low).to(dtype)


def look_of_key(number: int, *, device: torch.device) -> torch.Tensor:
    return torch.empty([2], dtype=torch.int64, device=device)


@define("random_key(int number, *, Device device) -> Tensor", look_of_key, draws=True)
def random_key(number: int, *, device: torch.device) -> torch.Tensor:
    """64 random bits, from the default generator of a device.

    `number` tells the keys of a graph apart: who merges equal calls knows the random ones of torch only.
    """
    return torch.randint(WORD + 1, [2], dtype=torch.int64, device=device)


def look_of_random(
    key: torch.Tensor, index: int, size: Sequence[int], kind: str, dtype: torch.dtype, *limits: int
) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device=key.device)


@define(
    "random(Tensor key, int index, SymInt[] size, str kind, ScalarType dtype, int low=0, int high=1) -> Tensor",
    look_of_random,
)
def random(
    key: torch.Tensor,
    index: int,
    size: Sequence[int],
    kind: str,
    dtype: torch.dtype,
    low: int = 0,
    high: int = 1,
) -> torch.Tensor:
    """The numbers of one call: `uniform` from 0 to below 1, `normal`, `exponential` with rate 1, or `integer` from low
    to below high."""
    count = math.prod(size)
    if kind == "uniform":
        found = uniform(key, index, count, dtype)
    elif kind == "normal":
        found = normal(key, index, count, dtype)
    elif kind == "exponential":
        found = exponential(key, index, count, dtype)
    elif kind == "integer":
        found = integer(key, index, count, dtype, low, high)
    else:
        raise ValueError(f"{kind!r} is no kind of random numbers; there are {', '.join(KINDS)}")
    return found.view(size)


def look_of_hits(key: torch.Tensor, index: int, chances: torch.Tensor) -> torch.Tensor:
    return torch.empty(chances.shape, dtype=torch.bool, device=chances.device)


@define("random_hits(Tensor key, int index, Tensor chances) -> Tensor", look_of_hits)
def random_hits(key: torch.Tensor, index: int, chances: torch.Tensor) -> torch.Tensor:
    """True where an event that has some chance comes true. An impossible chance is an error, as it is in eager; on a
    GPU, where asking would mean waiting, it is not looked for."""
    if chances.device.type == "cpu" and not bool(((chances >= 0) & (chances <= 1)).all()):
        raise RuntimeError("Expected p_in >= 0 && p_in <= 1 to be true, but got false.")
    wide = torch.promote_types(chances.dtype, torch.float32)
    drawn = uniform(key, index, chances.numel(), wide).view(chances.shape)
    return drawn < chances.to(wide)
