"""Philox-4x32-10: random words as a pure function of a counter and a key."""

from __future__ import annotations

import torch

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# Bits that a number between 0 and 1 has, so that each is held exactly and none becomes 1.
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}

Words = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def philox(counter: Words, key: tuple[torch.Tensor, torch.Tensor]) -> Words:
    """Ten rounds on words of 32 bits, each held in an int64."""
    first, second, third, fourth = counter
    left, right = key
    for _ in range(ROUNDS):
        # the upper half of a product may set the sign: shifting fills with it, the mask takes it away
        low_product, high_product = first * MULTIPLIERS[0], third * MULTIPLIERS[1]
        first, second, third, fourth = (
            (high_product >> 32 & WORD) ^ second ^ left,
            high_product & WORD,
            (low_product >> 32 & WORD) ^ fourth ^ right,
            low_product & WORD,
        )
        left, right = left + KEY_STEPS[0] & WORD, right + KEY_STEPS[1] & WORD
    return first, second, third, fourth
