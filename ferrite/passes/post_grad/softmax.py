"""The two reductions of a softmax in one pass over its operand.

    m = amax(x, [d], True); z = x - m; e = exp(z); s = sum(e, [d], True)
                                    =>
    m, s = prepare_softmax_online(x, d); z = x - m; e = exp(z)

A softmax goes on with e, a log-softmax with z: all four values may have other readers, and who reads none of z and e
lets them go. The rewrite belongs behind autograd, where e is no longer saved.

torch's own softmax and log-softmax are lowered to the same reduction, and need no rule.
"""

from __future__ import annotations

from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.passes.post_grad import operators as operators  # defines torch.ops.ferrite
from ferrite.rewrite import Case, Match, Rule

aten = torch.ops.aten


def largest_and_sum(x: Any, dim: Any) -> Any:
    largest = aten.amax.default(x, dim, True)
    shifted = aten.sub.Tensor(x, largest)
    powers = aten.exp.default(shifted)
    return largest, shifted, powers, aten.sum.dim_IntList(powers, dim, True)


def largest_and_sum_online(x: Any, dim: Any) -> Any:
    pair = torch.ops.ferrite.prepare_softmax_online.default(x, dim[0])
    largest, total = pair[0], pair[1]
    shifted = aten.sub.Tensor(x, largest)
    return largest, shifted, aten.exp.default(shifted), total


def asked_for(match: Match) -> Refusal | None:
    return None if match.options.online_softmax else Refusal("the option online_softmax is off")


def one_dimension(match: Match) -> Refusal | None:
    dims = match["dim"]
    return (
        None
        if isinstance(dims, (list, tuple)) and len(dims) == 1
        else Refusal("it does not reduce exactly one dimension")
    )


def of_floats(match: Match) -> Refusal | None:
    return None if match.value("x").is_floating_point() else Refusal("the operand is no floating-point tensor")


# --- cases ------------------------------------------------------------------------------------------------------------


def softmax(x: Any) -> Any:
    return softmax_along(x, -1)


def softmax_along(x: Any, dim: int) -> Any:
    _, _, powers, total = largest_and_sum(x, [dim])
    return aten.div.Tensor(powers, total)


def log_softmax(x: Any) -> Any:
    _, shifted, _, total = largest_and_sum(x, [1])
    return aten.sub.Tensor(shifted, aten.log.default(total))


def half_softmax(x: Any) -> Any:
    return aten._to_copy.default(softmax(aten._to_copy.default(x, dtype=torch.float32)), dtype=torch.float16)


def dropped_dimension(x: Any) -> Any:
    largest = aten.amax.default(x, [1])
    powers = aten.exp.default(aten.sub.Tensor(x, aten.unsqueeze.default(largest, 1)))
    return aten.sum.dim_IntList(powers, [1], True)


def sum_along(x: Any, dim: list[int], dtype: torch.dtype | None = None) -> Any:
    powers = aten.exp.default(aten.sub.Tensor(x, aten.amax.default(x, [1], True)))
    return aten.sum.dim_IntList(powers, dim, True, dtype=dtype)


def rows() -> list[torch.Tensor]:
    return [torch.randn(4, 6)]


def special_rows() -> list[torch.Tensor]:
    """Their logarithms hold rows of -inf, and rows with -inf, inf and nan."""
    x = torch.rand(5, 3)
    x[0], x[1, 1], x[2, 0], x[3, 2] = 0, 0, torch.inf, -1
    return [x]


PREPARE_SOFTMAX = Rule(
    name="prepare_softmax_online",
    purpose="the maximum and the sum of a softmax are found in one pass",
    before=largest_and_sum,
    after=largest_and_sum_online,
    when=(asked_for, one_dimension, of_floats),
    numerics="rounded",
    examples=(
        Case("softmax", softmax, rows),
        Case("log-softmax", log_softmax, rows),
        Case("all four are read", lambda x: largest_and_sum(x, [0]), rows),
        Case("a dimension in the middle", lambda x: softmax_along(x, 1), lambda: [torch.randn(2, 5, 3)]),
        Case("rows of infinities and nan", lambda x: softmax(aten.log.default(x)), special_rows),
        Case("one number per row", softmax, lambda: [torch.randn(4, 1)]),
        Case("half precision, computed in single", half_softmax, lambda: [torch.randn(4, 6).half()]),
    ),
    near_misses=(
        Case("switched off", softmax, rows, {"online_softmax": False}),
        Case("the dimension is dropped", dropped_dimension, rows),
        Case("two dimensions", lambda x: largest_and_sum(x, [0, 1])[3], rows),
        Case("the sum is along another dimension", lambda x: sum_along(x, [0]), rows),
        Case("the sum is wider", lambda x: sum_along(x, [1], torch.float64), rows),
        Case(
            "shifted by the maximum of another",
            lambda x: aten.sum.dim_IntList(
                aten.exp.default(aten.sub.Tensor(x, aten.amax.default(aten.neg.default(x), [1], True))), [1], True
            ),
            rows,
        ),
        Case(
            "the difference is scaled",
            lambda x: aten.sum.dim_IntList(
                aten.exp.default(aten.sub.Tensor(x, aten.amax.default(x, [1], True), alpha=2)), [1], True
            ),
            rows,
        ),
    ),
)
