"""Which operator is lowered how: each stands in one of two tables, or in none.

    lowered   `@lowers(aten.amax.default)`: a function from values to values
    eager     `eager(aten.nonzero.default, because="...")`: one call, with a reason

What stands in none is composed where torch can take it apart, by operators that are lowered, and called in eager where
not. `how_lowered` answers for any operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ferrite.capture import decomposition, functional_twin, is_random, overloads, written_arguments

aten = torch.ops.aten

Lower = Callable[..., Any]
Function = TypeVar("Function", bound=Lower)

LOWERED: dict[Any, Lower] = {}
LOWERED_BY_NAME: dict[str, Lower] = {}  # by name: operators that torch defines when it first needs them
OTHERWISE: dict[Any, Lower] = {}  # what a lowered operator is taken apart by where its lowering refuses
EAGER: dict[Any, str] = {}


def _put(table: dict[Any, Any], operators: tuple[Any, ...], entry: Any) -> None:
    for operator in operators:
        for each in overloads(operator):
            for other in (LOWERED, EAGER):
                if each in other:
                    raise ValueError(f"{each} is in a table already")
            table[each] = entry


def lowers(*operators: Any, otherwise: Callable[[Any], Lower] | None = None) -> Callable[[Function], Function]:
    """Mark a function as the lowering of operators: `f(ctx, *args)`, arguments as the schema has them. `otherwise`: for
    an operator, the function of tensors by which it is taken apart where the lowering refuses; else it is a call."""

    def mark(function: Function) -> Function:
        _put(LOWERED, operators, function)
        if otherwise is not None:
            OTHERWISE.update({operator: otherwise(operator) for operator in operators})
        return function

    return mark


def lowers_later(name: str) -> Callable[[Function], Function]:
    """The same for an operator that may not be there yet: `prims.fma.default`."""

    def mark(function: Function) -> Function:
        LOWERED_BY_NAME[name] = function
        return function

    return mark


def lowering_of(operator: Any) -> Lower | None:
    return LOWERED.get(operator) or LOWERED_BY_NAME.get(str(operator))


def eager(*operators: Any, because: str) -> None:
    _put(EAGER, operators, because)


# Work that libraries have kernels for: called in eager, but where a pass has made another operator of it before.
TEMPLATES = {
    "matmul": "mm addmm bmm baddbmm addbmm mv addmv dot vdot _int_mm _scaled_mm _grouped_mm _scaled_grouped_mm",
    "convolution": "convolution _convolution convolution_backward convolution_overrideable",
    "attention": "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_flash_attention_for_cpu_backward "
    "_scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_backward "
    "_scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward "
    "_scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward scaled_dot_product_attention",
}
TEMPLATE_OF = {
    getattr(aten, name): kind for kind, names in TEMPLATES.items() for name in names.split() if hasattr(aten, name)
}
NOT_YET = "no lowering yet"
DRAWN = "its random numbers are those of torch's generator"


def template_kind(operator: Any) -> str | None:
    return TEMPLATE_OF.get(getattr(operator, "overloadpacket", None))


def how_lowered(operator: Any) -> tuple[str, str]:
    """How an operator is lowered, and a note: lowered, template, in place (with its twin), composed, or eager."""
    if operator in EAGER:
        return "eager", EAGER[operator]
    kind = template_kind(operator)
    if lowering_of(operator) is not None:
        return "lowered", f"depthwise, on CPU; others are {kind}: a kernel of torch" if kind else ""
    if kind is not None:
        return "template", f"{kind}: a kernel of torch"
    if is_random(operator):
        return "eager", DRAWN
    twin = functional_twin(operator)
    if twin is not None:
        how, note = how_lowered(twin)
        return ("in place", str(twin)) if how in ("lowered", "composed") else (how, note)
    if not written_arguments(operator) and decomposition(operator) is not None:
        return "composed", ""
    return "eager", NOT_YET
