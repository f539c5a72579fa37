"""Flex attention that a CPU and a GPU are both tried with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

CAUSAL = lambda b, h, m, n: m >= n  # noqa: E731


def blocks(mask: Callable[..., Any], rows: int, keys: int, heads: int | None = None, side: int = 32) -> Any:
    return create_block_mask(mask, None, heads, rows, keys, device="cpu", BLOCK_SIZE=side)


def attention_within_documents(x: torch.Tensor, documents: torch.Tensor) -> torch.Tensor:
    """A graph makes the views and the blocks, of two heads of 16 and 40 rows."""
    q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in x.chunk(3, -1))
    same = lambda b, h, m, n: documents[b, m] == documents[b, n]  # noqa: E731
    mask = create_block_mask(same, 2, None, 40, 40, device="cpu", BLOCK_SIZE=16)
    return flex_attention(q, k, v, block_mask=mask).transpose(1, 2).flatten(2)


def two_samples_of_three_documents() -> list[torch.Tensor]:
    documents = torch.tensor([0] * 11 + [1] * 17 + [2] * 12)
    return [torch.randn(2, 40, 96), documents.expand(2, -1).contiguous()]
