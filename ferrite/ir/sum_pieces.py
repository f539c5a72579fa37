"""How long sums of products are cut: equal pieces are added up by themselves, and then to the rest.

That decides how a sum is rounded, which must depend on no machine: so these are no fields of one. Passes ask whether a
sum can be cut, as one that cannot would round worse than torch's; the scheduler asks how.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

# Products of a sum: with fewer, a tile has more to do at its end than before; with more, what is packed of a factor is
# no longer small beside the factor (a thread packs some hundred rows of it).
MIN_SUMMED, MAX_SUMMED = 16, 2**14
# Of a piece: where factors are read as they lie, and where they are packed, of a product and of windows.
MAX_UNPACKED, MAX_PACKED, MAX_PACKED_WINDOWS = 1024, 512, 640
MIN_WINDOWS = 128  # with fewer, adding a piece to the rest takes as long


def of_product(length: int, is_packed: bool = True) -> int:
    """The length of a piece of a long sum; all of it where there is no good one."""
    most = MAX_PACKED if is_packed else MAX_UNPACKED
    if length <= most:
        return length
    return next((size for size in range(most, most // 4 - 1, -1) if length % size == 0), length)


def product_can_be_cut(length: int) -> bool:
    """Whether no piece of a sum of so many is longer than pieces are."""
    return of_product(length) <= MAX_PACKED


def of_windows(length: int, others: int) -> int | None:
    """How many along the longest axis of a sum, as a rule of its channels, are a piece together with all others, as a
    rule the taps of a window; None where there is no good number."""
    if length * others <= MAX_PACKED_WINDOWS:
        return length
    most = MAX_PACKED_WINDOWS // others
    return next((size for size in range(most, 0, -1) if length % size == 0 and size * others >= MIN_WINDOWS), None)


def windows_can_be_cut(sizes: Sequence[int]) -> bool:
    """Whether there is one for a sum over axes of these sizes."""
    products, longest = math.prod(sizes), max(sizes)
    return products >= MIN_SUMMED and of_windows(longest, products // longest) is not None
