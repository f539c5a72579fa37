"""What a node calls, seen through what torch wraps around calls.

    with_effects(token, op, x)                  calls op; its value begins with a token that keeps effects in order
    auto_functionalized_v2(op, _all_bases=[x])  copies x, calls op on the copy, and returns that copy as well

The passes that let operators write ask here which operator it is, what it copies, and where in the value the results
stand.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api, torch_operators
from ferrite.graph import attribute_of, fake_value, schema_of

# Under this key a node keeps the names, or the positions, of those of its operands that need no copy.
NEEDS_NO_COPY = "needs_no_copy"


@dataclass(frozen=True)
class Called:
    """A call without the effect token around it."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any  # the fake value of what the operator itself returns
    token: Any = None

    @property
    def wraps(self) -> bool:
        """Whether it copies operands, calls a mutating operator on the copies, and returns these."""
        return self.operator in torch_operators.functional_wrappers()

    @property
    def wrapped(self) -> Any:
        """The mutating operator behind the copies; a Triton kernel has none."""
        return self.args[0] if self.args else None

    @property
    def is_higher_order(self) -> bool:
        return isinstance(self.wrapped, torch_api.HigherOrderOperator)

    @property
    def schema(self) -> Any | None:
        """The schema of the mutating operator. That of a higher-order one depends on the call, and comes with it."""
        if not self.is_higher_order:
            return schema_of(self.wrapped)
        spec = self.kwargs["_op_schema"]
        return torch_operators.schema_beside(attribute_of(spec) if isinstance(spec, torch.fx.Node) else spec)

    @property
    def mutable_arguments(self) -> list[str]:
        arguments = self.schema.arguments if self.schema is not None else ()
        return [each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write]

    @property
    def copied(self) -> list[tuple[Any, Any, Any]]:
        """What it copies: (name or position, the operand or a list of them, what it returns in its place)."""
        kwargs: Any = self.kwargs
        if "tensors_to_clone" in kwargs:
            return [(name, kwargs["kwargs"][name], self.value[name]) for name in kwargs["tensors_to_clone"]]
        if "_all_bases" in kwargs or self.operator is torch_operators.higher_order("auto_functionalized_v2"):
            given = list(kwargs.get("_all_bases", ()))
            keys: list[Any] = list(range(len(given)))
        else:
            keys = self.mutable_arguments
            given = [kwargs[name] for name in keys]
        results = list(self.value)[len(self.value) - len(keys) :] if keys else []
        return list(zip(keys, given, results, strict=True))


def called(node: torch.fx.Node) -> Called:
    if node.op != "call_function" or node.target is not torch_operators.higher_order("with_effects"):
        return Called(node.target, node.args, node.kwargs, fake_value(node))
    token, operator, *args = node.args
    _, *results = fake_value(node) or (None, None)
    return Called(operator, tuple(args), node.kwargs, results if returns_tuple(operator) else results[0], token)


def returns_tuple(operator: Any) -> bool:
    """Whether an operator's results stand one by one behind an effect token, and not as one item."""
    schema = schema_of(operator)
    if schema is not None:
        return len(schema.returns) > 1
    return operator is not torch_operators.higher_order("triton_kernel_wrapper_functional")
