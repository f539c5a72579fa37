"""One spelling for every operation: between torch calls as people write them and ATen operators.

`torch.relu(x)`, `F.relu(x)`, `x.relu()` are one operation, and so are `torch.concat([a, b], axis=1)` and
`torch.cat((a, b), 1)`. While the pre-grad stage runs, each is a call of the ATen overload it stands for: then the
matcher, the alias rules and the effects of the later stages hold here too, and a rule is written once. The graph is
still not functional, and autograd is still to come. Before users' own passes and at the end of the stage calls are
spelled as torch functions again (`as_torch`).

What is not in the tables of `names` stays as it was written; no rule touches it. Nothing is spelled otherwise unless
every argument of the call has a place in the other spelling.
"""

from __future__ import annotations

import builtins
import contextlib
import operator
from typing import Any, NamedTuple

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import OPERATORS, bound_arguments, fake_value, is_torch_function, leaves, leaving_no_symbols
from ferrite.passes.pre_grad.names import (
    BATCHED_DIMS,
    BY_FUNCTION,
    CONVERSIONS,
    DTYPE_METHODS,
    NAMES,
    PACKED,
    SAME_AS,
    Arguments,
    PythonFunction,
)
from ferrite.rewrite import parameters_of

aten = torch.ops.aten
ONE_OPERAND = frozenset({operator.neg, operator.abs, operator.invert})
# Numbers to the matching, but not to torch's functions.
KINDS = {"dtype": torch.dtype, "layout": torch.layout, "memory_format": torch.memory_format}


class SpelledCall(NamedTuple):
    """What a node says, apart from the node: ("call_method", "relu", (x,), {})."""

    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: Arguments


def operator_call(node: torch.fx.Node | SpelledCall) -> tuple[Any, Arguments] | None:
    """The overload that a call stands for, and its arguments by name; None for one that is not in the tables."""
    try:
        name, args, kwargs = named_call(node)
        if name == "to":
            args, kwargs = with_devices(args, kwargs)
        overload = resolve(name, args, kwargs)
        found = bind(overload, args, kwargs)
        return (aten.to.dtype_layout, found) if overload in CONVERSIONS else (overload, found)
    except NotApplied:
        return None


def with_devices(args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """`x.to("cuda")` names a device."""

    def device(value: Any) -> Any:
        return torch.device(value) if isinstance(value, str) else value

    return tuple(map(device, args)), {name: device(value) for name, value in kwargs.items()}


def named_call(node: torch.fx.Node | SpelledCall) -> tuple[str, tuple[Any, ...], Arguments]:
    """An ATen name with the arguments it is given, whatever form the call has."""
    args, kwargs = node.args, dict(node.kwargs)
    if kwargs.get("out") is not None:
        raise NotApplied("it writes into `out`")
    kwargs.pop("out", None)
    if node.op == "call_method":
        return method_call(str(node.target), args, kwargs)
    if node.op != "call_function":
        raise NotApplied("it is no call of a function")
    if node.target in OPERATORS:
        return OPERATORS[node.target], *operands_of(node.target, args)
    if node.target is builtins.getattr and len(args) == 2:
        return attribute_call(args[0], args[1])
    if node.target in BY_FUNCTION:
        return function_call(BY_FUNCTION[node.target], args, kwargs)
    if node.target is torch.functional.einsum and args and isinstance(args[0], str):
        operands = args[1] if len(args) == 2 and isinstance(args[1], (list, tuple)) else args[1:]
        return "einsum", (args[0], list(operands)), kwargs
    if not is_torch_function(node.target) or str(node.target.__module__) not in ("torch", "torch._C._nn"):
        raise NotApplied("it is a function written in Python")
    name = str(getattr(node.target, "__name__", ""))
    return SAME_AS.get(name, name), args, kwargs


def operands_of(target: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Arguments]:
    if len(args) != (1 if target in ONE_OPERAND else 2):
        raise NotApplied("an operator of Python has no further arguments")
    if not is_tensor(args[0]):
        # 1 + x is x + 1; what other operators do with a number in front is not one operator
        if target not in (operator.add, operator.mul) or len(args) != 2 or not is_tensor(args[1]):
            raise NotApplied("no tensor in front")
        args = (args[1], args[0])
    return args, {}


def method_call(name: str, args: tuple[Any, ...], kwargs: Arguments) -> tuple[str, tuple[Any, ...], Arguments]:
    if not args or not is_tensor(args[0]):
        raise NotApplied("it is no method of a tensor")
    if name in DTYPE_METHODS and len(args) == 1 and not kwargs:
        return "to", (args[0], DTYPE_METHODS[name]), {}
    if name == "type" and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
        return "to", args, {}
    if name in ("__matmul__", "__rmatmul__") and len(args) == 2 and not kwargs:
        return "matmul", args if name == "__matmul__" else args[::-1], {}
    if name == "where":  # the condition comes second here, first in the operator
        given = {**dict(zip(("self", "condition", "other"), args, strict=False)), **kwargs}
        return "where", (), {key: given[key] for key in ("condition", "self", "other") if key in given}
    name = SAME_AS.get(name, name)
    if name in PACKED and len(args) > 1 and not isinstance(args[1], (list, tuple, torch.Size, torch.dtype)):
        args = (args[0], list(args[1:]))
    if name in ("mT", "T"):
        raise NotApplied("an attribute")
    if name == "to" and "layout" in kwargs:
        raise NotApplied("the operator takes a layout, the method does not")
    return name, args, kwargs


def attribute_call(tensor: Any, name: Any) -> tuple[str, tuple[Any, ...], Arguments]:
    """`x.mT`, and `x.T` of a matrix."""
    rank = fake_value(tensor).dim() if is_tensor(tensor) else 0
    if (name == "mT" and rank >= 2) or (name == "T" and rank == 2):
        return "transpose", (tensor, -2, -1), {}
    raise NotApplied("an attribute")


def function_call(
    entry: PythonFunction, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[str, tuple[Any, ...], Arguments]:
    given = bound_arguments(entry.function, args, kwargs)
    if set(kwargs) - set(given) or (args and not given):
        raise NotApplied("its arguments do not fit")
    found = dict(entry.fixed())
    for name, value in given.items():
        if name in entry.parameters:
            found[entry.parameters[name]] = value
        elif name in entry.must_be:
            if isinstance(value, torch.fx.Node) or value != entry.must_be[name]:
                raise NotApplied(f"{name} is {value}")
        elif name not in entry.ignored:
            raise NotApplied(f"the operator has nothing like {name}")
    if entry.function in BATCHED_DIMS and rank_of(found["input"]) != BATCHED_DIMS[entry.function]:
        raise NotApplied("it is not given a batch")
    if entry.name == "split":
        return "split", (found["self"], found["sizes"], found["dim"]), {}
    if entry.name in ("softmax", "log_softmax") and found["dim"] is None:
        raise NotApplied("the dimension is guessed")
    return entry.name, (), found


def resolve(name: str, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """The overload that these arguments choose."""
    if name not in NAMES:
        raise NotApplied(f"{name} is not in the tables")
    values, keywords = torch.fx.node.map_arg((args, kwargs), _value)
    keywords = {("self" if key == "input" and takes_self(name) else key): value for key, value in keywords.items()}
    with asking_nothing((values, keywords)):
        overload = torch_api.overload_for(f"aten::{name}", values, keywords)
        if overload is None:
            overload = torch_api.overload_for(f"aten::{name}", *with_lists(name, values, keywords))
    if overload is None:
        raise NotApplied(f"no overload of {name} takes these arguments")
    return getattr(getattr(aten, name), overload)


def asking_nothing(given: Any) -> contextlib.AbstractContextManager[None]:
    """Matching reads the one element of a tensor where a number is asked for, and every element where a list of whole
    numbers is: that would guard on it, or leave a symbol for it that nothing carries."""
    tensors = (leaf for leaf in leaves(given) if isinstance(leaf, torch.Tensor))
    numbers = (leaf for leaf in tensors if leaf.dim() == 0 or (leaf.dim() == 1 and not leaf.is_floating_point()))
    mode = next((leaf.fake_mode for leaf in numbers if hasattr(leaf, "fake_mode")), None)
    return contextlib.nullcontext() if mode is None else leaving_no_symbols(mode)


def with_lists(name: str, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Arguments as matching wants them: where a list of two is asked for, Python takes one number for both."""
    parameters = parameters_of(first_overload(name))
    lengths = {each.name: each.length for each in parameters if each.type == "List[int]"}

    def spread(parameter: str, value: Any) -> Any:
        return [value] * (lengths[parameter] or 1) if parameter in lengths and type(value) is int else value

    by_place = tuple(spread(each.name, value) for each, value in zip(parameters, args, strict=False))
    by_name = {key: spread(key, value) for key, value in kwargs.items()}
    return by_place + args[len(by_place) :], by_name


def first_overload(name: str) -> Any:
    packet = getattr(aten, name)
    return getattr(packet, packet.overloads()[0])


def takes_self(name: str) -> bool:
    return parameters_of(first_overload(name))[0].name == "self"


def bind(overload: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Arguments by the schema's names, those at their defaults left out, dimensions counted from the front."""
    parameters = parameters_of(overload)
    if parameters[0].name == "self" and "input" in kwargs:
        kwargs = {"self": kwargs.pop("input"), **kwargs}
    found: Arguments = {}
    for position, parameter in enumerate(parameters):
        if position < len(args) and not parameter.kwarg_only:
            found[parameter.name] = args[position]
        elif parameter.name in kwargs:
            found[parameter.name] = kwargs[parameter.name]
        elif not parameter.has_default:
            raise NotApplied(f"{parameter.name} is not given")
        given = value_in(found, parameter.name)
        if parameter.name in KINDS and type(given) is int:
            raise NotApplied(f"{parameter.name} is a number, which only the operator takes")
        if given is None and parameter.type == "Tensor":  # matching takes None for a tensor; `x == None` is False
            raise NotApplied(f"{parameter.name} is no tensor")
        if isinstance(given, torch.Tensor) and "Tensor" not in parameter.type:
            raise NotApplied(f"{parameter.name} is a tensor, and its element is asked for")
        if parameter.type == "bool" and not isinstance(given, (bool, torch.SymBool)):
            # matching takes a number for a truth value, Python's reading of the same call does not
            raise NotApplied(f"{parameter.name} is no truth value")
    if len(args) > len(parameters) or set(kwargs) - set(found):
        raise NotApplied("too many arguments")
    return found


def value_in(found: Arguments, name: str) -> Any:
    """What is given for a parameter, by value; False if nothing is."""
    given = found.get(name, False)
    return _value(given) if isinstance(given, torch.fx.Node) else given


def rank_of(item: Any) -> int | None:
    return fake_value(item).dim() if is_tensor(item) else None


def is_tensor(item: Any) -> bool:
    return isinstance(item, torch.fx.Node) and isinstance(fake_value(item), torch.Tensor)


def _value(node: torch.fx.Node) -> Any:
    value = fake_value(node)
    if value is None:
        raise NotApplied(f"{node.name} has no metadata")
    return value
