"""What torch's operators in memory that ranks share do of what collectives do.

They are functions of Python over copies between GPUs, each for the case it was made for. Collectives take more:

- `fused_matmul_reduce_scatter` and `_low_contention_reduce_scatter` know "sum" and "avg", and raise for the rest. They
  add up with `torch.sum`, which makes 64 bits of integers, where a collective keeps the type.
- `fused_all_gather_matmul` takes rows that lie in order; with multicast it sends them in words of four bytes.
- The copies read memory of an input from its beginning, where that is itself memory that ranks share: of a view into
  it they would send what lies before.
- All of them use one piece of memory for each group, one stream, and barriers that are numbered alike: a product there
  may not run while copies are on their way.
- Ranks make that memory larger together, so that its size may not follow from data of one rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.passes.post_grad.distributed.exchanges import Exchange

REDUCTIONS = ("sum", "avg")
ADDED_AS_THEY_ARE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
BYTES_OF_WORD = 4


def refuse_operator(exchange: Exchange, operator: Any) -> Refusal | None:
    """Why an operator in shared memory does not do what a collective does; None where it does. The collective is not
    one on a list, and not one in place."""
    value: Any = fake_value(exchange.start.all_input_nodes[0])
    if operator is None or not torch_operators.has_kernel(operator, exchange.device.type):
        return Refusal(f"torch has no such operator in shared memory for {exchange.device.type}")
    if exchange.kind == "reduce_scatter" and exchange.reduce_op not in REDUCTIONS:
        return Refusal(f"in shared memory are sums and averages, no {exchange.reduce_op!r}")
    if exchange.kind == "reduce_scatter" and value.dtype not in ADDED_AS_THEY_ARE:
        return Refusal(f"sums in shared memory are not of {value.dtype}")
    if not all(isinstance(size, int) or torch_api.has_hint(size) for size in value.shape):
        return Refusal("its sizes follow from data")
    if any(torch_api.known_equal(size, 0) for size in value.shape):
        return Refusal("it is empty")
    return None


def refuse_memory(exchange: Exchange) -> Refusal | None:
    """Why what is sent does not lie as it must for copies of it."""
    value: Any = fake_value(exchange.start.all_input_nodes[0])
    if not torch_operators.begins_its_storage(value):
        return Refusal("what is sent does not lie in order at the beginning of its memory")
    return None


def refuse_words(exchange: Exchange) -> Refusal | None:
    """Why what is gathered cannot be sent in words."""
    if exchange.given % BYTES_OF_WORD:
        return Refusal(f"{exchange.given} bytes of a rank are not a number of words of {BYTES_OF_WORD}")
    return None


def is_product_in_shared_memory(node: torch.fx.Node) -> bool:
    """Whether a node uses shared memory and is over when it returns, so that nothing waits for it."""
    return str(node.target).startswith("symm_mem.fused_")
