"""ATen overloads spelled as torch functions again: how the stage hands its graph to users' passes and to autograd.

Tensors stand by position, everything else by name, nothing at its default. Arithmetic is Python's operators.

A spelling is used only if reading it back, as the stage reads what people write, gives the same overload with the same
arguments: so none is lost, and none taken for another. What has no such spelling stays an overload, which runs the
same: `aten.elu(x, 1.5, 1.05)` has a scale that F.elu has not, and `aten.add.Tensor(4, 3.3)` is a tensor, 4 + 3.3 not.
"""

from __future__ import annotations

import operator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.graph import OPERATORS, fake_value, signature
from ferrite.passes.pre_grad.canonical import read_call, same_arguments, shortest
from ferrite.passes.pre_grad.names import BY_NAME, PACKED, Arguments, PythonFunction
from ferrite.passes.pre_grad.spelling import SpelledCall
from ferrite.rewrite import MISSING, arguments_of, parameters_of, same_literal

aten = torch.ops.aten
# Python's operators that are another call than torch's functions: `~` raises a TypeError for numbers with fractions.
OTHERWISE = ("abs", "matmul", "floor_divide", "remainder", "bitwise_not")
PYTHON_OPERATORS = {name: function for function, name in OPERATORS.items() if name not in OTHERWISE}
METHODS = frozenset({*PACKED, "contiguous", "to", "type_as", "expand_as", "view_as", "reshape_as", "alias"}) - {
    "permute",
    "reshape",
    "broadcast_to",
    "tile",
    "flip",
    "alias",
}


def as_torch(gm: torch.fx.GraphModule) -> int:
    """Spell every ATen call of a graph that torch has a function for, in place."""
    rewritten = 0
    for node in gm.graph.nodes:
        if node.op == "call_function" and getattr(node.target, "namespace", "") == "aten":
            form = torch_form(node)
            if form is not None and reads_as(form, node):
                node.op, node.target, node.args, node.kwargs = form
                rewritten += 1
    return rewritten


def reads_as(form: SpelledCall, node: torch.fx.Node) -> bool:
    """Whether a spelling stands for the very call that a node is: the overload, and every argument by name."""
    found = read_call(form)
    if found is None:
        return False
    overload, given = found
    if overload is aten.split.sizes:  # another name for it, with another name for the sizes
        overload, given = aten.split_with_sizes.default, {**given, "split_sizes": given["split_size"]}
    if overload is not node.target:
        return False
    value = fake_value(node)
    return same_arguments(shortest(value, overload, given), shortest(value, overload, arguments_of(node)))


def torch_form(node: torch.fx.Node) -> SpelledCall | None:
    """How torch may say what a node does; None where it has no function for it. To be read back: see `reads_as`."""
    given = arguments_of(node)
    if any(value is MISSING for value in given.values()):
        return None
    name = node.target._schema.name.removeprefix("aten::")  # type: ignore[union-attr]
    parameters = parameters_of(node.target)
    if node.target is aten.select.int and is_index_of(given):
        return getitem(given["self"], given["dim"], given["index"])
    if node.target is aten.slice.Tensor and given["step"] == 1:
        item = slice(given["start"], given["end"])
        return getitem(given["self"], given["dim"], item)
    if node.target is aten.split_with_sizes.default:
        return SpelledCall(
            "call_function", torch.functional.split, (given["self"], given["split_sizes"]), rest(given, "dim", 0)
        )
    if node.target is aten.einsum.default and given["path"] is None:
        return SpelledCall("call_function", torch.functional.einsum, (given["equation"], *given["tensors"]), {})
    if name in BY_NAME:
        return python_form(BY_NAME[name], given)
    defaults = {p.name: p.default for p in parameters if p.has_default}
    extra = {p.name for p in parameters if p.kwarg_only and not same_literal(given[p.name], defaults.get(p.name))}
    if name in PYTHON_OPERATORS and not extra:
        args = tuple(given[p.name] for p in parameters if not p.kwarg_only)
        return SpelledCall("call_function", PYTHON_OPERATORS[name], args, {})
    if name in METHODS:
        return method_form(node, name)
    return builtin_form(node, name, given, defaults)


def method_form(node: torch.fx.Node, name: str) -> SpelledCall:
    """A method of the tensor: as the operator, but that a memory format is given by name alone."""
    parameters = [parameter.name for parameter in parameters_of(node.target)]
    given = dict(zip(parameters, node.args, strict=False))
    form = given.pop("memory_format", None)
    kwargs = {**node.kwargs, **({} if form is None else {"memory_format": form})}
    return SpelledCall("call_method", name, tuple(given.values()), kwargs)


def builtin_form(node: torch.fx.Node, name: str, given: Arguments, defaults: Arguments) -> SpelledCall | None:
    function = torch_api.built_in(name)
    if function is None:
        return None
    args: list[Any] = []
    kwargs: Arguments = {}
    for parameter in parameters_of(node.target):
        value = given[parameter.name]
        in_front = not kwargs and not parameter.kwarg_only
        if in_front and ("Tensor" in parameter.type or parameter.name == "self"):
            args.append(value)
        elif parameter.name not in defaults or not same_literal(value, defaults[parameter.name]):
            kwargs[parameter.name] = value
    while args and args[-1] is None:
        args.pop()
    values, keywords = torch.fx.node.map_arg((tuple(args), kwargs), fake_value)
    chosen = torch_api.overload_for(f"aten::{name}", values, keywords)
    if chosen != node.target._overloadname:  # type: ignore[union-attr]
        return None
    return SpelledCall("call_function", function, tuple(args), kwargs)


def python_form(entry: PythonFunction, given: Arguments) -> SpelledCall | None:
    """A function written in Python, if what it sets by itself is what the call has."""
    fixed = entry.fixed()
    if any(given[name] != value for name, value in fixed.items()) or not entry.accepts(given):
        return None
    if entry.name == "embedding" and given["padding_idx"] != -1:
        return None
    found = {name: given[parameter] for name, parameter in entry.parameters.items()}
    python = signature(entry.function)
    assert python is not None
    tensors = [name for name in python.parameters if name in found and isinstance(found[name], torch.fx.Node)]
    args: list[Any] = []
    for name in python.parameters:  # tensors in front stand by position
        if name not in tensors:
            break
        args.append(found.pop(name))
    kwargs = {
        name: found[name]
        for name, parameter in python.parameters.items()
        if name in found and not same_literal(found[name], parameter.default)
    }
    return SpelledCall("call_function", entry.function, tuple(args), kwargs)


def is_index_of(given: Arguments) -> bool:
    """Whether Python indexes by the number that an element is selected by: it does not by one that data decides, and
    looks at once whether there is such an element."""
    size = fake_value(given["self"]).shape[given["dim"]]
    index = given["index"]
    return isinstance(index, int) and (not isinstance(size, int) or -size <= index < size)


def getitem(source: Any, dim: int, item: Any) -> SpelledCall:
    index = item if dim == 0 else (*(slice(None),) * dim, item)
    return SpelledCall("call_function", operator.getitem, (source, index), {})


def rest(given: Arguments, name: str, default: Any) -> Arguments:
    return {} if given[name] == default else {name: given[name]}
