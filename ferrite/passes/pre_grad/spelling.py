"""One spelling for every operation: between torch calls as people write them and ATen operators.

`torch.relu(x)`, `F.relu(x)`, `x.relu()` are one operation, and so are `torch.concat([a, b], axis=1)` and
`torch.cat((a, b), 1)`. While the pre-grad stage runs, each is a call of the ATen overload it stands for: then the
matcher, the alias rules and the effects of the later stages hold here too, and a rule is written once. The graph is
still not functional, and autograd is still to come. Before users' own passes and at the end of the stage calls are
spelled as torch functions again (`as_torch`).

What is not in the tables below stays as it was written; no rule touches it.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.capture import torch_api
from ferrite.graph import fake_value
from ferrite.graph.torch_calls import OPERATORS, bound_arguments, is_torch_function

aten = torch.ops.aten
Arguments = dict[str, Any]


def words(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operators that rules ask for, by their ATen names.
POINTWISE = words(
    "relu tanh sigmoid silu gelu elu leaky_relu hardtanh hardswish hardsigmoid softplus mish selu celu relu6 exp log "
    "log1p expm1 sqrt rsqrt abs neg sign sin cos erf floor ceil trunc round reciprocal square clamp clamp_min "
    "clamp_max nan_to_num logical_not isnan isinf isfinite add sub mul div pow maximum minimum where eq ne lt le gt "
    "ge bitwise_and bitwise_or bitwise_xor bitwise_not logical_and logical_or masked_fill rsub floor_divide "
    "remainder lerp addcmul addcdiv"
)
MOVES = words(
    "view reshape flatten unflatten squeeze unsqueeze transpose t permute movedim expand expand_as broadcast_to "
    "repeat tile narrow select slice split split_with_sizes chunk tensor_split hsplit vsplit dsplit unbind cat stack "
    "contiguous clone detach alias to type_as view_as reshape_as ravel flip roll"
)
PRODUCTS = words(
    "linear mm bmm matmul addmm baddbmm einsum conv1d conv2d conv3d conv_transpose1d conv_transpose2d "
    "conv_transpose3d scaled_dot_product_attention bilinear"
)
NORMS_AND_REDUCTIONS = words(
    "layer_norm batch_norm group_norm instance_norm rms_norm softmax log_softmax dropout alpha_dropout "
    "feature_dropout feature_alpha_dropout sum mean amax amin argmax argmin max min prod cumsum embedding"
)
NAMES = POINTWISE | MOVES | PRODUCTS | NORMS_AND_REDUCTIONS

SAME_AS: Mapping[str, str] = {
    "concat": "cat",
    "concatenate": "cat",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "moveaxis": "movedim",
    "absolute": "abs",
    "negative": "neg",
    "clip": "clamp",
    "greater": "gt",
    "greater_equal": "ge",
    "less": "lt",
    "less_equal": "le",
    "not_equal": "ne",
}
# Overloads for Python's way to give a device alone; the first operator with all their parameters is not among them.
CONVERSIONS = frozenset({aten.to.prim_Device, aten.to.prim_dtype, aten.to.prim_other})
DTYPE_METHODS: Mapping[str, torch.dtype] = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
    "long": torch.int64,
    "int": torch.int32,
    "short": torch.int16,
    "bool": torch.bool,
}
# Methods whose last argument may be given as separate numbers, and the name of that argument.
PACKED: Mapping[str, str] = {
    "permute": "dims",
    "view": "size",
    "reshape": "shape",
    "expand": "size",
    "broadcast_to": "size",
    "repeat": "repeats",
    "tile": "dims",
    "flip": "dims",
}
# The names that NumPy gives to parameters.
NUMPY_NAMES: Mapping[str, str] = {
    "axis": "dim",
    "keepdims": "keepdim",
    "x": "input",
    "a": "input",
    "x1": "input",
    "x2": "other",
}


@dataclass(frozen=True)
class PythonFunction:
    """A function of torch written in Python, and how its parameters map to those of the operator behind it.

    `must_be` lists parameters the operator lacks, with the value at which the two are the same.
    """

    function: Callable[..., Any]
    name: str
    parameters: Mapping[str, str]  # of the function, to the operator's
    must_be: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    fixed: Callable[[], Arguments] = dict  # parameters of the operator that the function sets by itself


def unary(function: Callable[..., Any], *parameters: str) -> PythonFunction:
    names = {"input": "self", **{name: name for name in parameters}}
    return PythonFunction(function, function.__name__, names, {"inplace": False})


def dropout(function: Callable[..., Any], name: str = "") -> PythonFunction:
    names = {"input": "input", "p": "p", "training": "train"}
    return PythonFunction(function, name or function.__name__, names, {"inplace": False})


def softmax(function: Callable[..., Any]) -> PythonFunction:
    return PythonFunction(
        function, function.__name__, {"input": "self", "dim": "dim", "dtype": "dtype"}, ignored=("_stacklevel",)
    )


def cudnn(name: str) -> Callable[[], Arguments]:
    return lambda: {name: bool(torch.backends.cudnn.enabled)}


NORM_PARAMETERS = ("input", "weight", "bias", "eps")
PYTHON_FUNCTIONS = (
    unary(F.relu),
    unary(F.silu),
    unary(F.mish),
    unary(F.relu6),
    unary(F.selu),
    unary(F.hardswish),
    unary(F.hardsigmoid),
    unary(F.sigmoid),
    unary(F.tanh),
    unary(F.elu, "alpha"),
    unary(F.celu, "alpha"),
    unary(F.hardtanh, "min_val", "max_val"),
    unary(F.leaky_relu, "negative_slope"),
    dropout(F.dropout),
    dropout(F.alpha_dropout),
    dropout(F.feature_alpha_dropout),
    dropout(F.dropout1d, "feature_dropout"),
    dropout(F.dropout2d, "feature_dropout"),
    dropout(F.dropout3d, "feature_dropout"),
    softmax(F.softmax),
    softmax(F.log_softmax),
    PythonFunction(
        F.layer_norm,
        "layer_norm",
        {name: name for name in (*NORM_PARAMETERS, "normalized_shape")},
        fixed=cudnn("cudnn_enable"),
    ),
    PythonFunction(
        F.group_norm,
        "group_norm",
        {name: name for name in (*NORM_PARAMETERS, "num_groups")},
        fixed=cudnn("cudnn_enabled"),
    ),
    PythonFunction(
        F.batch_norm,
        "batch_norm",
        {name: name for name in (*NORM_PARAMETERS, "running_mean", "running_var", "training", "momentum")},
        fixed=cudnn("cudnn_enabled"),
    ),
    PythonFunction(
        F.embedding,
        "embedding",
        {"input": "indices", "weight": "weight", "scale_grad_by_freq": "scale_grad_by_freq", "sparse": "sparse"},
        {"max_norm": None, "padding_idx": None},
        ignored=("norm_type",),
    ),
    PythonFunction(
        torch.functional.split, "split", {"tensor": "self", "split_size_or_sections": "sizes", "dim": "dim"}
    ),
)
BY_FUNCTION: Mapping[Any, PythonFunction] = {entry.function: entry for entry in PYTHON_FUNCTIONS}
# Their operators are functions of torch themselves.
BUILT_IN = frozenset({"split", "feature_dropout", "feature_alpha_dropout"})
BY_NAME: Mapping[str, PythonFunction] = {entry.name: entry for entry in PYTHON_FUNCTIONS if entry.name not in BUILT_IN}
# With fewer dimensions these warn, or take the first one for a batch.
BATCHED_DIMS: Mapping[Any, int] = {F.dropout1d: 3, F.dropout2d: 4, F.dropout3d: 5}


class Unbound(Exception):
    """A call cannot be read; it stays as it was written."""


def operator_call(node: torch.fx.Node) -> tuple[Any, Arguments] | None:
    """The overload that a call stands for, and its arguments by name; None for one that is not in the tables."""
    try:
        name, args, kwargs = named_call(node)
        if name == "to":
            args, kwargs = with_devices(args, kwargs)
        elif name.startswith("conv"):
            args, kwargs = per_dimension(int(name[-2]), args, kwargs)
        overload = resolve(name, args, kwargs)
        found = bind(overload, args, kwargs)
        return (aten.to.dtype_layout, found) if overload in CONVERSIONS else (overload, found)
    except Unbound:
        return None


def with_devices(args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """`x.to("cuda")` names a device."""

    def device(value: Any) -> Any:
        return torch.device(value) if isinstance(value, str) else value

    return tuple(map(device, args)), {name: device(value) for name, value in kwargs.items()}


def per_dimension(rank: int, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """A convolution's stride of 2 is one of [2, 2]: one number stands for every dimension of the image."""
    tensors, groups = 3, 6  # by position

    def several(value: Any) -> Any:
        return [value] * rank if type(value) is int else value

    numbered = (item if place < tensors or place == groups else several(item) for place, item in enumerate(args))
    return tuple(numbered), {name: item if name == "groups" else several(item) for name, item in kwargs.items()}


def named_call(node: torch.fx.Node) -> tuple[str, tuple[Any, ...], Arguments]:
    """An ATen name with the arguments it is given, whatever form the call has."""
    args, kwargs = node.args, dict(node.kwargs)
    if kwargs.get("out") is not None:
        raise Unbound("it writes into `out`")
    kwargs.pop("out", None)
    if node.op == "call_method":
        return method_call(str(node.target), args, kwargs)
    if node.op != "call_function":
        raise Unbound("it is no call of a function")
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
        raise Unbound("it is a function written in Python")
    name = str(getattr(node.target, "__name__", ""))
    return SAME_AS.get(name, name), args, kwargs


def operands_of(target: Any, args: tuple[Any, ...]) -> tuple[tuple[Any, ...], Arguments]:
    if not is_tensor(args[0]):
        # 1 + x is x + 1; what other operators do with a number in front is not one operator
        if target not in (operator.add, operator.mul) or len(args) != 2 or not is_tensor(args[1]):
            raise Unbound("no tensor in front")
        args = (args[1], args[0])
    return args, {}


def method_call(name: str, args: tuple[Any, ...], kwargs: Arguments) -> tuple[str, tuple[Any, ...], Arguments]:
    if not args or not is_tensor(args[0]):
        raise Unbound("it is no method of a tensor")
    if name in DTYPE_METHODS and len(args) == 1 and not kwargs:
        return "to", (args[0], DTYPE_METHODS[name]), {}
    if name == "type" and len(args) == 2 and isinstance(args[1], torch.dtype) and not kwargs:
        return "to", args, {}
    if name in ("__matmul__", "__rmatmul__") and len(args) == 2 and not kwargs:
        return "matmul", args if name == "__matmul__" else args[::-1], {}
    name = SAME_AS.get(name, name)
    if name in PACKED and len(args) > 1 and not isinstance(args[1], (list, tuple, torch.Size, torch.dtype)):
        args = (args[0], list(args[1:]))
    if name in ("mT", "T"):
        raise Unbound("an attribute")
    return name, args, kwargs


def attribute_call(tensor: Any, name: Any) -> tuple[str, tuple[Any, ...], Arguments]:
    """`x.mT`, and `x.T` of a matrix."""
    rank = fake_value(tensor).dim() if is_tensor(tensor) else 0
    if (name == "mT" and rank >= 2) or (name == "T" and rank == 2):
        return "transpose", (tensor, -2, -1), {}
    raise Unbound("an attribute")


def function_call(
    entry: PythonFunction, args: tuple[Any, ...], kwargs: Arguments
) -> tuple[str, tuple[Any, ...], Arguments]:
    given = bound_arguments(entry.function, args, kwargs)
    if set(kwargs) - set(given) or (args and not given):
        raise Unbound("its arguments do not fit")
    found = dict(entry.fixed())
    for name, value in given.items():
        if name in entry.parameters:
            found[entry.parameters[name]] = value
        elif name in entry.must_be and (isinstance(value, torch.fx.Node) or value != entry.must_be[name]):
            raise Unbound(f"{name} is {value}")
    if entry.function in BATCHED_DIMS and rank_of(found["input"]) != BATCHED_DIMS[entry.function]:
        raise Unbound("it is not given a batch")
    if entry.name == "split":
        return "split", (found["self"], found["sizes"], found["dim"]), {}
    if entry.name in ("softmax", "log_softmax") and found["dim"] is None:
        raise Unbound("the dimension is guessed")
    return entry.name, (), found


def resolve(name: str, args: tuple[Any, ...], kwargs: Arguments) -> Any:
    """The overload that these arguments choose."""
    if name not in NAMES:
        raise Unbound(f"{name} is not in the tables")
    values, keywords = torch.fx.node.map_arg((args, kwargs), _value)
    keywords = {("self" if key == "input" and takes_self(name) else key): value for key, value in keywords.items()}
    overload = torch_api.overload_for(f"aten::{name}", values, keywords)
    if overload is None:
        overload = torch_api.overload_for(f"aten::{name}", *with_lists(name, values, keywords))
    if overload is None:
        raise Unbound(f"no overload of {name} takes these arguments")
    return getattr(getattr(aten, name), overload)


def with_lists(name: str, args: tuple[Any, ...], kwargs: Arguments) -> tuple[tuple[Any, ...], Arguments]:
    """Arguments as matching wants them: where a list of two is asked for, Python takes one number for both."""
    parameters = first_schema(name).arguments
    lengths = {each.name: each.N for each in parameters if str(each.type) == "List[int]"}

    def spread(parameter: str, value: Any) -> Any:
        return [value] * (lengths[parameter] or 1) if parameter in lengths and type(value) is int else value

    by_place = tuple(spread(each.name, value) for each, value in zip(parameters, args, strict=False))
    by_name = {key: spread(key, value) for key, value in kwargs.items()}
    return by_place + args[len(by_place) :], by_name


def first_schema(name: str) -> Any:
    packet = getattr(aten, name)
    return getattr(packet, packet.overloads()[0])._schema


def takes_self(name: str) -> bool:
    return str(first_schema(name).arguments[0].name) == "self"


def bind(overload: Any, args: tuple[Any, ...], kwargs: Arguments) -> Arguments:
    """Arguments by the schema's names, those at their defaults left out, dimensions counted from the front."""
    parameters = overload._schema.arguments
    if parameters[0].name == "self" and "input" in kwargs:
        kwargs = {"self": kwargs.pop("input"), **kwargs}
    found: Arguments = {}
    for position, parameter in enumerate(parameters):
        if position < len(args) and not parameter.kwarg_only:
            found[parameter.name] = args[position]
        elif parameter.name in kwargs:
            found[parameter.name] = kwargs[parameter.name]
        elif not parameter.has_default_value():
            raise Unbound(f"{parameter.name} is not given")
        if str(parameter.type) == "bool" and not isinstance(value_in(found, parameter.name), (bool, torch.SymBool)):
            # matching takes a number for a truth value, Python's reading of the same call does not
            raise Unbound(f"{parameter.name} is no truth value")
    if len(args) > len(parameters) or set(kwargs) - set(found):
        raise Unbound("too many arguments")
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
        raise Unbound(f"{node.name} has no metadata")
    return value
