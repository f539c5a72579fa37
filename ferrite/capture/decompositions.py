"""How far operators are taken apart while capturing, as data.

Taking an operator apart pays only where the parts are compiled: in eager, a softmax in four calls is slower and less
exact than the one it came from. So the default table holds only other spellings of the same kernels, which leave
later rules one form to match. `core` goes down to the core ATen operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch

from ferrite.capture import torch_api

aten = torch.ops.aten

# Each becomes another call of the same kernel: t and transpose become permute, rsub becomes sub, and so on.
SPELLINGS = (
    aten.t.default,
    aten.transpose.int,
    aten._reshape_alias.default,
    aten._unsafe_view.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.rsub.Tensor,
    aten.split.Tensor,
)


# Decompositions that give another memory format than the operator does; tracing computes the operator's own shape
# through them too, so the difference could not be seen later.
INEXACT = (
    aten.roll.default,
    aten.xlogy.Tensor,
)


@functools.lru_cache
def decompositions(level: Literal["spelling", "core"]) -> Mapping[Any, Callable[..., Any]]:
    if level == "core":
        table = torch_api.core_decompositions()
        return {operator: function for operator, function in table.items() if operator not in INEXACT}
    return torch_api.decompositions_of(SPELLINGS)
