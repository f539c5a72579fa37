"""Tables of what the stage reads: operators, other names for them, functions of torch that are written in Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from ferrite.graph import fake_value

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

    `must_be` lists parameters the operator lacks, with the value at which the two are the same. A function may refuse
    what the operator computes: `accepts` says of the operator's arguments that this one does not.
    """

    function: Callable[..., Any]
    name: str
    parameters: Mapping[str, str]  # of the function, to the operator's
    must_be: Mapping[str, Any] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    fixed: Callable[[], Arguments] = dict  # parameters of the operator that the function sets by itself
    accepts: Callable[[Arguments], bool] = lambda given: True  # what the operator takes, does the function, too


def unary(function: Callable[..., Any], *parameters: str) -> PythonFunction:
    names = {"input": "self", **{name: name for name in parameters}}
    return PythonFunction(function, function.__name__, names, {"inplace": False}, accepts=has_limits_in_order)


def has_limits_in_order(given: Arguments) -> bool:
    """What F.hardtanh checks."""
    limits = [given.get("min_val", 0), given.get("max_val", 0)]
    return all(isinstance(limit, (int, float)) for limit in limits) and limits[0] <= limits[1]


def dropout(function: Callable[..., Any], name: str = "") -> PythonFunction:
    names = {"input": "input", "p": "p", "training": "train"}
    return PythonFunction(
        function, name or function.__name__, names, {"inplace": False}, accepts=lambda given: is_chance(given["p"])
    )


def is_chance(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 <= value <= 1


def has_several_values(given: Arguments) -> bool:
    """F.batch_norm refuses a single value per channel while training, and a bad eps; the operator does not."""
    if not isinstance(given["eps"], (int, float)) or given["eps"] < 0 or given["training"] not in (False, True):
        return False
    return not given["training"] or (given["eps"] > 0 and more_than_one(sizes_of(given["input"]), 1))


def has_several_values_per_group(given: Arguments) -> bool:
    """F.group_norm refuses a single value per channel."""
    sizes = sizes_of(given["input"])
    groups = given["num_groups"]
    if len(sizes) < 2 or type(groups) is not int or groups < 1:
        return False
    return more_than_one((sizes[0] * sizes[1] // groups, groups, *sizes[2:]), 1)


def sizes_of(item: Any) -> tuple[Any, ...]:
    """Sizes of the tensor behind a node; those that are not fixed are 1, as nothing is known of them."""
    value = fake_value(item) if isinstance(item, torch.fx.Node) else None
    sizes = value.shape if isinstance(value, torch.Tensor) else ()
    return tuple(size if type(size) is int else 1 for size in sizes)


def more_than_one(sizes: tuple[Any, ...], leaving_out: int) -> bool:
    return any(size > 1 for place, size in enumerate(sizes) if place != leaving_out)


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
        accepts=has_several_values_per_group,
    ),
    PythonFunction(
        F.batch_norm,
        "batch_norm",
        {name: name for name in (*NORM_PARAMETERS, "running_mean", "running_var", "training", "momentum")},
        fixed=cudnn("cudnn_enabled"),
        accepts=has_several_values,
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
