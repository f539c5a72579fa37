"""What a call at the level of torch does, before it has become an ATen operator.

Graphs as Dynamo captures them hold functions (`torch.relu`, `F.dropout`), methods (`x.relu()`) and operators
(`x + 1`). They have no schema, so what they write, draw or switch is read off their names and arguments.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import math
import operator
from typing import Any

import torch

# The ATen operator behind each of Python's, where a tensor is the first operand.
OPERATORS = {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.floordiv: "floor_divide",
    operator.mod: "remainder",
    operator.pow: "pow",
    operator.matmul: "matmul",
    operator.neg: "neg",
    operator.abs: "abs",
    operator.and_: "bitwise_and",
    operator.or_: "bitwise_or",
    operator.xor: "bitwise_xor",
    operator.invert: "bitwise_not",
    operator.eq: "eq",
    operator.ne: "ne",
    operator.lt: "lt",
    operator.le: "le",
    operator.gt: "gt",
    operator.ge: "ge",
}
IN_PLACE_OPERATORS = frozenset(
    {
        *(operator.setitem, operator.delitem, operator.iadd, operator.isub, operator.imul, operator.itruediv),
        *(operator.ifloordiv, operator.imod, operator.ipow, operator.imatmul, operator.iand, operator.ior),
        *(operator.ixor, operator.ilshift, operator.irshift),
    }
)
# They write their running statistics while training, and no schema says so.
TRAINING_FLAG = {"batch_norm": "training", "instance_norm": "use_input_stats"}
# They draw and are written in Python, so no operator of their name says so.
DRAWING = frozenset({"dropout1d", "dropout2d", "dropout3d", "gumbel_softmax", "multi_head_attention_forward"}) | {
    *("fractional_max_pool2d_with_indices", "fractional_max_pool3d_with_indices"),
    *("_fractional_max_pool2d", "_fractional_max_pool3d"),
}
PURE_MODULES = frozenset({"_operator", "operator", "math", "builtins"})
TORCH_NAMESPACES = frozenset({"torch", "torch._C._nn", "torch.functional", "torch.nn.functional", "torch._tensor"})


def called_name(node: torch.fx.Node) -> str:
    """The name of the function or method that a node calls: 'relu' for torch.relu and for 'relu'."""
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))


@functools.cache
def aten_name(target: Any) -> str | None:
    """The name of the ATen operator that a function or method stands for: 'relu' for torch.relu and for 'relu'."""
    if isinstance(target, str):
        return target if is_operator(target) else None
    if target in OPERATORS:
        return OPERATORS[target]
    name = str(getattr(target, "__name__", ""))
    if not name.isidentifier() or not is_torch_function(target):
        return None
    return name if is_operator(name) else None


def is_operator(name: str) -> bool:
    """Whether ATen has an operator of this name; the namespace has attributes of its own, such as __or__."""
    return hasattr(getattr(torch.ops.aten, name, None), "overloads")


def is_torch_function(target: Any) -> bool:
    """Whether it is one of the functions that compute: not one that switches a mode or keeps a state."""
    module = getattr(target, "__module__", None)
    if module is None:  # torch.relu and most others are built in
        return getattr(torch, str(getattr(target, "__name__", "")), None) is target
    return module in TORCH_NAMESPACES


def writes(node: torch.fx.Node) -> bool:
    """Whether a call without a schema writes into one of its operands."""
    name = called_name(node)
    if node.target in IN_PLACE_OPERATORS or node.kwargs.get("out") is not None:
        return True
    if name.endswith("_") and not name.endswith("__") and (node.op == "call_method" or aten_name(node.target)):
        return True
    given = bound_arguments(node.target, node.args, node.kwargs)
    return bool(given.get("inplace")) or (name in TRAINING_FLAG and bool(given.get(TRAINING_FLAG[name])))


def draws(node: torch.fx.Node) -> bool:
    """Whether a call without a schema draws random numbers."""
    name = aten_name(node.target)
    if not (is_seeded(name) if name is not None else getattr(node.target, "__name__", "") in DRAWING):
        return False
    given = bound_arguments(node.target, node.args, node.kwargs)
    return given.get("training") is not False and given.get("dropout_p", 1) != 0 and given.get("p", 1) != 0


@functools.cache
def is_seeded(name: str) -> bool:
    packet = getattr(torch.ops.aten, name)
    overloads = (getattr(packet, overload) for overload in packet.overloads())
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in overloads)


def is_barrier(node: torch.fx.Node) -> bool:
    """Whether nothing may move across a node: it switches a mode, or nobody knows what it does."""
    if node.op == "call_module":
        return True
    if node.op != "call_function" or hasattr(node.target, "_schema") or is_higher_order(node.target):
        return False
    module = str(getattr(node.target, "__module__", None) or "")
    if module in PURE_MODULES or getattr(math, getattr(node.target, "__name__", ""), None) is node.target:
        return node.target in (builtins.print, builtins.setattr)
    name = str(getattr(node.target, "__name__", ""))
    if hasattr(node.target, "overloads") or name.startswith("sym_"):
        return False
    return not is_torch_function(node.target) or name.startswith(("_", "set_"))


def is_higher_order(target: Any) -> bool:
    """Whether it is an operator that runs graphs: what it does is what they do."""
    return any(kind.__name__ == "HigherOrderOperator" for kind in type(target).__mro__)


@functools.cache
def signature(function: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None  # built in: it takes no `inplace` and no `training`


def bound_arguments(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments by the names of a Python function's parameters, defaults filled in; only keywords where it has none."""
    found = signature(function) if callable(function) else None
    if found is None:
        return dict(kwargs)
    try:
        bound = found.bind(*args, **kwargs)
    except TypeError:
        return dict(kwargs)
    bound.apply_defaults()
    return dict(bound.arguments)
