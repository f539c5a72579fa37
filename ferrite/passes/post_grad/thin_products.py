"""Products so thin that reading the matrices is the work: a multiplication and a sum, which fuse with what is around.

    mm(a, b)        =>      sum(a[:, :, None] * b[None, :, :], 1)

The sum is taken as the product would take it: half precision in single, integers in their own dtype.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.options import at_least, settings_of
from ferrite.passes.shared.cases import on_accelerator, uniform
from ferrite.rewrite import AnyRule, Case, NodeRule, Site

aten = torch.ops.aten
GROUP = "decompose_mm_pass"
matrices = functools.partial(uniform, high=8)
WIDER = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


@dataclass(frozen=True)
class Thin:
    """What counts as thin: many rows and a small right side on an accelerator, hardly any rows on a cpu."""

    min_rows: int = 10240
    max_side: int = 32  # both sides of the right matrix are below; of a batch, two of the three sizes
    cpu_max_rows: int = at_least(0, 1)
    cpu_max_side: int = 2048
    allow_unknown_sizes: bool = False  # take sizes that are not provably outside

    def holds(self, condition: bool | torch.SymBool, opposite: bool | torch.SymBool) -> bool:
        if self.allow_unknown_sizes:
            return not torch_api.known_true(opposite)
        return torch_api.known_true(condition)

    def at_least(self, size: Any, limit: int) -> bool:
        return self.holds(size >= limit, size < limit)

    def at_most(self, size: Any, limit: int) -> bool:
        return self.holds(size <= limit, size > limit)

    def matrices(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.device.type == "cpu":
            return self.at_most(left.shape[0], self.cpu_max_rows) and self.all_at_most(right.shape, self.cpu_max_side)
        return self.at_least(left.shape[0], self.min_rows) and self.all_at_most(right.shape, self.max_side - 1)

    def batches(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        if left.device.type == "cpu":
            sides = right.shape[1:]
            return self.at_most(left.shape[0], self.cpu_max_rows) and self.all_at_most(sides, self.cpu_max_side)
        small = [self.at_most(size, self.max_side - 1) for size in (*left.shape[1:], right.shape[2])]
        return self.at_least(left.shape[0], self.min_rows) and sum(small) >= 2

    def all_at_most(self, sizes: Sequence[Any], limit: int) -> bool:
        return all(self.at_most(size, limit) for size in sizes)


def dtype_problem(*values: torch.Tensor) -> Refusal | None:
    dtype = values[0].dtype
    if any(value.dtype != dtype for value in values):
        return Refusal("the dtypes differ")
    if dtype.is_complex or dtype is torch.bool or (dtype.is_floating_point and dtype.itemsize == 1):
        return Refusal(f"a sum of {dtype} is not what the product adds up")
    return None


def multiply_and_sum(site: Site, left: Any, right: Any, dim: int) -> Any:
    """The product over `dim` of both with a new dimension each, in the dtype in which it adds up."""
    dtype = site.value(left).dtype
    inner = WIDER.get(dtype, dtype)
    wide = [
        site.call(aten._to_copy.default, item, dtype=inner) if inner is not dtype else item for item in (left, right)
    ]
    columns = site.call(aten.unsqueeze.default, wide[0], dim + 1)
    rows = site.call(aten.unsqueeze.default, wide[1], dim - 1)
    return site.call(aten.sum.dim_IntList, site.call(aten.mul.Tensor, columns, rows), [dim], dtype=inner)


def narrowed(site: Site, result: Any) -> Any:
    dtype = site.value(site.node).dtype
    return site.call(aten._to_copy.default, result, dtype=dtype) if site.value(result).dtype != dtype else result


def thin(site: Site) -> Thin:
    return settings_of(site.options.post_grad_fusions, GROUP, Thin)


def thin_product(site: Site) -> Any:
    """mm or bmm, which have the dimension that is summed one place further back."""
    left, right, batched = site.arguments["self"], site.arguments["mat2"], site.node.target is aten.bmm.default
    problem = dtype_problem(site.value(left), site.value(right))
    is_thin = thin(site).batches if batched else thin(site).matrices
    if problem or not is_thin(site.value(left), site.value(right)):
        return problem or Refusal("it is not provably thin")
    return narrowed(site, multiply_and_sum(site, left, right, 2 if batched else 1))


def thin_addmm(site: Site) -> Any:
    bias, left, right, beta, alpha = (site.arguments[n] for n in ("self", "mat1", "mat2", "beta", "alpha"))
    value = site.value(left)
    problem = dtype_problem(value, site.value(right), site.value(bias))
    if problem or not thin(site).matrices(value, site.value(right)):
        return problem or Refusal("it is not provably thin")
    exact = (int, float) if value.is_floating_point() else int
    if not isinstance(beta, exact) or not isinstance(alpha, exact):
        return Refusal("a factor is of another kind than the product")
    total = multiply_and_sum(site, left, right, 1)
    if alpha != 1:
        total = site.call(aten.mul.Tensor, total, alpha)
    if beta != 0:  # a bias times nothing is not read: its nan does not count
        inner = site.value(total).dtype
        term = bias if inner == value.dtype else site.call(aten._to_copy.default, bias, dtype=inner)
        term = term if beta == 1 else site.call(aten.mul.Tensor, term, beta)
        total = site.call(aten.add.Tensor, term, total)
    return narrowed(site, total)


def with_bias(**factors: float) -> Callable[..., Any]:
    return lambda bias, a, b: aten.addmm.default(bias, a, b, **factors)


def asking(**settings: Any) -> Mapping[str, Any]:
    return {"post_grad_fusions": {GROUP: settings}}


mm, bmm = aten.mm.default, aten.bmm.default
ROW, BATCH = ((1, 6), (6, 5)), ((1, 3, 6), (1, 6, 5))


DECOMPOSE_MEM_BOUND_MM: tuple[AnyRule, ...] = (
    NodeRule(
        name="decompose_mm",
        purpose="a thin product is a multiplication and a sum",
        targets=(mm,),
        rewrite=thin_product,
        numerics="rounded",
        examples=(
            Case("one row", mm, matrices(*ROW)),
            Case("bfloat16", mm, matrices(*ROW, dtype=torch.bfloat16)),
            Case("int32", mm, matrices(*ROW, dtype=torch.int32)),
            Case("nothing to add up", mm, matrices((1, 0), (0, 5))),
            Case("many rows on an accelerator", on_accelerator(mm), matrices((10240, 4), (4, 31))),
            Case("as many rows as was asked for", mm, matrices((3, 6), (6, 5)), asking(cpu_max_rows=3)),
        ),
        near_misses=(
            Case("two rows", mm, matrices((2, 6), (6, 5))),
            Case("more rows than was asked for", mm, matrices((4, 6), (6, 5)), asking(cpu_max_rows=3)),
            Case("a wide right side", mm, matrices((1, 2049), (2049, 2))),
            Case("complex", mm, matrices(*ROW, dtype=torch.complex64)),
            Case("few rows on an accelerator", on_accelerator(mm), matrices((10239, 4), (4, 31))),
            Case("a wide right side on an accelerator", on_accelerator(mm), matrices((10240, 4), (4, 32))),
        ),
    ),
    NodeRule(
        name="decompose_addmm",
        purpose="a thin product with a bias is a multiplication and two sums",
        targets=(aten.addmm.default,),
        rewrite=thin_addmm,
        numerics="rounded",
        examples=(
            Case("plain", with_bias(), matrices((5,), *ROW)),
            Case("scaled", with_bias(beta=3, alpha=2), matrices((5,), *ROW)),
            Case("half precision", with_bias(beta=3, alpha=2), matrices((5,), *ROW, dtype=torch.float16)),
            Case("the bias does not count", with_bias(beta=0), matrices((5,), *ROW)),
        ),
        near_misses=(Case("two rows", with_bias(), matrices((5,), (2, 6), (6, 5))),),
    ),
    NodeRule(
        name="decompose_bmm",
        purpose="a thin batch of products is a multiplication and a sum",
        targets=(bmm,),
        rewrite=thin_product,
        numerics="rounded",
        examples=(
            Case("a batch of one", bmm, matrices(*BATCH)),
            Case("half precision", bmm, matrices(*BATCH, dtype=torch.float16)),
            Case("a large batch on an accelerator", on_accelerator(bmm), matrices((10240, 2, 3), (10240, 3, 40))),
        ),
        near_misses=(
            Case("a batch of two", bmm, matrices((2, 3, 6), (2, 6, 5))),
            Case("two large sides on an accelerator", on_accelerator(bmm), matrices((10240, 2, 32), (10240, 32, 40))),
        ),
    ),
)

THIN_PRODUCT_GROUPS = {GROUP: DECOMPOSE_MEM_BOUND_MM}
