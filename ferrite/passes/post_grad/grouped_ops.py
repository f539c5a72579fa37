"""The operator that several linear layers on one input become.

    ferrite::grouped_linear(x, [w0, w1, ...], [b0, None, ...]) -> [x @ w0.T + b0, x @ w1.T, ...]

One call names the whole group, so that a kernel may read x once for all of it. The eager kernel below runs the layers
one after the other through the operator they came from, so that results are the same to the bit. No two results share
memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

LIBRARY = torch.library.Library("ferrite", "FRAGMENT")
LIBRARY.define("grouped_linear(Tensor x, Tensor[] weights, Tensor?[] biases) -> Tensor[]")

# Not in every build of torch. The overload without a second operand is the plain layer.
_packet = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
PACKED_LINEAR = None if _packet is None else _packet.default


def grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    pairs = zip(weights, biases, strict=True)
    if PACKED_LINEAR is None:
        return [torch.nn.functional.linear(x, weight, bias) for weight, bias in pairs]
    return [PACKED_LINEAR(x, weight, bias, "none", [], "") for weight, bias in pairs]


def look_of_grouped_linear(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


# Packed weights have a layout of their own: the kernel is for all of them, not for one backend.
LIBRARY.impl("grouped_linear", grouped_linear, "CompositeExplicitAutograd")
torch.library.register_fake("ferrite::grouped_linear", look_of_grouped_linear, lib=LIBRARY)
