"""Where one call of scaled_dot_product_attention pays, and where it is none of eager's numbers.

On a CPU torch has one kernel that never writes the scores down; where that does not apply, attention is computed as it
was written, with more steps. The kernel takes neither dropout nor masks that are trained, and wants rows that are
dense. Where it applies it is ahead of eager's products at every size measured (`bench/attention.py`), and of compiled
ones with few keys; with many, and a mask, compiled products are up to a tenth faster, but need memory for the scores.
While training it is level with them up to some keys (`max_training_attention_keys`); with more its way back is slower.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import product_libraries, torch_api
from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value
from ferrite.machines import host_machine
from ferrite.passes.shared.attention.found import Node


@dataclass(frozen=True)
class AttentionCall:
    """A call of scaled_dot_product_attention that could be written."""

    query: Node
    key: Node
    value: Node
    bias: Node | None
    dropout: float
    factor: float
    filled: Node | None
    grouped: bool  # heads of queries share heads of keys and values
    training: bool
    looks_at_mask: bool  # when it runs, for rows of which nothing is left
    trains_mask: bool

    @property
    def arguments(self) -> tuple[Any, ...]:
        if self.dropout:
            return self.query, self.key, self.value, self.bias, self.dropout
        return (self.query, self.key, self.value, *([] if self.bias is None else [self.bias]))

    @property
    def keywords(self) -> dict[str, Any]:
        return {"scale": self.factor, **({"enable_gqa": True} if self.grouped else {})}

    def problem(self, must_pay: bool) -> Refusal | None:
        query, key, value = (fake_value(node) for node in (self.query, self.key, self.value))
        if len({(each.dtype, each.device) for each in (query, key, value)}) != 1:
            return Refusal("query, key and value differ in type or device")
        bias = fake_value(self.bias) if self.bias is not None else None
        if bias is not None and (bias.dtype not in (query.dtype, torch.float32) or bias.device != query.device):
            return Refusal(f"the mask is {bias.dtype} on {bias.device}, the query {query.dtype} on {query.device}")
        if not 0 < self.factor < math.inf:
            return Refusal("the scale is not positive")
        if self.looks_at_mask and (why := self.kernel_problem(query, key, value)) is not None:
            return Refusal(f"rows that a mask may hide are for the kernel of CPUs: {why}")
        on_cuda = query.device.type == "cuda"
        if on_cuda and query.dtype is torch.float32 and not product_libraries.may_round_operands("cuda"):
            return Refusal("attention may round to TF32 there, which products may not")
        if not must_pay:
            return None
        return self.loss_on_cuda(query) if on_cuda else self.loss_on_cpu(query, key, value)

    def loss_on_cuda(self, query: torch.Tensor) -> Refusal | None:
        return None if query.dtype in (*HALVES, torch.float32) else Refusal("no kernel takes this type")

    def loss_on_cpu(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Refusal | None:
        if query.device.type != "cpu":
            return Refusal(f"whether it pays on {query.device.type} is not known")
        if self.trains_mask:
            return Refusal("the kernel does not train masks")
        if self.training and torch_api.size_hint(key.shape[-2]) > host_machine().max_training_attention_keys:
            return Refusal("with so many keys products are faster on the way back")
        return self.kernel_problem(query, key, value)

    def kernel_problem(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Refusal | None:
        """Why the kernel of CPUs does not take the call."""
        if query.device.type != "cpu":
            return Refusal(f"it is on {query.device.type}")
        if self.dropout:
            return Refusal("the kernel does not drop weights")
        if not torch_api.known_equal(query.shape[-1], value.shape[-1]):
            return Refusal("the kernel wants keys and values of one width")
        if any(not torch_api.known_equal(each.stride(-1), 1) for each in (query, key, value)):
            return Refusal("the kernel wants dense rows")
        if any(torch_api.known_equal(each.numel(), 0) for each in (query, key, value)):
            return Refusal("it is empty")
        return None
