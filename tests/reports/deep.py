"""A page about graphs of ten thousand nodes: a training step of a deep transformer."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.nn.functional as F

import ferrite
from tests.compare import compile_strict

LAYERS = 124  # so many that the backward graph has ten thousand nodes, as the last pass leaves it
WIDTH, HEADS, TOKENS = 64, 4, 16


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
        self.qkv, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
        self.up, self.down = torch.nn.Linear(WIDTH, 4 * WIDTH), torch.nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(self.before_attention(x)).view(batch, tokens, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, tokens, WIDTH))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


def deep_report(path: Path, layers: int = LAYERS) -> Path:
    model = torch.nn.Sequential(*(Layer() for _ in range(layers)))
    compiled = compile_strict(model, options={"report": path, "cache": False})
    compiled(torch.randn(2, TOKENS, WIDTH)).sum().backward()
    return ferrite.report(path)
