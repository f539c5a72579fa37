"""Matrix products on a GPU that are kernels of our own, not a library's: with what follows them inside.

    mm(a, b), bmm(a, b)                     =>      product(a, b)
    addmm(bias, a, b), in 16 bits           =>      to 16 bits(wide_product(a, b) + bias)

A library rounds the sum of a product and its bias once, so in 16 bits the bias is added to a sum of 32.
`ferrite.schedule.gpu.products` arranges them in blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from ferrite.capture import product_libraries, torch_operators
from ferrite.errors import Refusal
from ferrite.graph import HALVES, SHORT_NAMES, fake_value, is_elementwise
from ferrite.machines import beside_cublas, gpu_machine
from ferrite.passes.shared.cases import normal, on_accelerator
from ferrite.passes.shared.own_products import OPERANDS, owned
from ferrite.rewrite import Case, NodeRule, Site
from ferrite.tune import MAX_RATIO, Along, ProductProblem

aten = torch.ops.aten
ON_GPU = ("cuda", "meta")  # where there is none, rules look at tensors without memory


def owned_on_gpu(site: Site) -> Any:
    return owned(site, reason_against, reason_to_leave, written)


def written(site: Site, left: Any, right: Any) -> Any:
    """The product, with what the operator adds to it."""
    given, dtype = site.arguments, fake_value(site.node).dtype
    if "beta" not in given:
        return site.call(torch.ops.ferrite.product.default, left, right)
    made = site.call(torch.ops.ferrite.wide_product.default, left, right)
    if given.get("alpha", 1) != 1:
        made = site.call(aten.mul.Tensor, made, given["alpha"])
    if given.get("beta", 1) != 0:  # zero times infinity is not asked for
        bias = given["self"] if given.get("beta", 1) == 1 else site.call(aten.mul.Tensor, wide(site), given["beta"])
        made = site.call(aten.add.Tensor, made, bias)
    return site.call(torch.ops.prims.convert_element_type.default, made, dtype) if dtype in HALVES else made


def wide(site: Site) -> Any:
    """What is added, in 32 bits."""
    return site.call(torch.ops.prims.convert_element_type.default, site.arguments["self"], torch.float32)


def reason_against(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a product cannot be a kernel of our own on a GPU, as far as kernels go today."""
    if left.device.type not in ON_GPU:
        return Refusal("it is not on a GPU")
    if left.dtype not in (*HALVES, torch.float32) or fake_value(site.node).dtype != left.dtype:
        return Refusal("kernels of our own are there for products of float32, float16 and bfloat16")
    is_row = isinstance(left.shape[-2], int) and left.shape[-2] == 1  # of which every factor is read once anyway
    if left.dtype is torch.float32 and not is_row and product_libraries.may_round_operands("cuda"):
        return Refusal("it may round its operands to fewer bits, which a library does faster")
    if left.layout is not torch.strided or right.layout is not torch.strided:
        return Refusal("an operand is sparse")
    if not all(isinstance(size, int) for size in (*left.shape, *right.shape)):
        return Refusal("its sizes are not known")
    if math.prod((*left.shape, *right.shape)) == 0:
        return Refusal("it has no elements, or sums of none")
    if any(
        step == 0 and size > 1 for each in (left, right) for size, step in zip(each.shape, each.stride(), strict=True)
    ):
        return Refusal("elements of an operand are there several times")
    return None


# --- what was measured ------------------------------------------------------------------------------------------------


def reason_to_leave(site: Site, left: torch.Tensor, right: torch.Tensor) -> Refusal | None:
    """Why a kernel of our own was not measured to be faster than torch's call. Where what follows is elementwise, the
    result need not go to memory and back."""
    problem = problem_of(left, right)
    found = site.times(problem)
    if found is None:
        return beside_cublas(name_of(left.device)).product(problem)
    result = fake_value(site.node)
    saved = 2 * result.numel() * result.element_size() if all(map(is_read_elementwise, site.node.users)) else 0
    if found.ours < MAX_RATIO * (found.torch + 1e6 * saved / gpu_machine().copy_bytes_per_second):
        return None
    return Refusal(f"it takes {found.ours:.1f} us as a kernel of our own, and {found.torch:.1f} as torch's")


def name_of(device: torch.device) -> str:
    """What torch calls a GPU; nothing for one that is not there."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else ""


def is_read_elementwise(reader: torch.fx.Node) -> bool:
    """Whether all that is done with a result, maybe after views of it, can be part of the kernel that makes it."""
    if torch_operators.is_operator(reader.target) and torch_operators.is_view(reader.target):
        return all(map(is_read_elementwise, reader.users))
    return is_elementwise(reader.target)


def problem_of(left: torch.Tensor, right: torch.Tensor) -> ProductProblem:
    batch = left.shape[0] if left.ndim == 3 else 1
    sizes = left.shape[-2], right.shape[-1], left.shape[-1]
    return ProductProblem(
        SHORT_NAMES[left.dtype], batch, *sizes, along(left, "rows", "summed"), along(right, "summed", "columns")
    )


def along(factor: torch.Tensor, first: Along, last: Along) -> Along:
    """The dimension whose elements lie side by side."""
    if factor.stride(-2) == 1:
        return first
    return last if factor.stride(-1) == 1 else "neither"


# --- what it fires on -------------------------------------------------------------------------------------------------


def linear(x: Any, weight: Any, bias: Any) -> Any:
    return aten.addmm.default(bias, x, aten.permute.default(weight, [1, 0]))


def scaled(bias: Any, a: Any, b: Any) -> Any:
    return aten.addmm.default(bias, a, b, alpha=2, beta=0.5)


ALWAYS = {"own_products": "always"}
LINEAR = normal((5, 32), (6, 32), (6,), dtype=torch.bfloat16)

OWN_PRODUCT_ON_GPU = NodeRule(
    name="own_product_on_gpu",
    purpose="a matrix product on a GPU becomes a kernel of our own, with what follows it inside",
    targets=tuple(OPERANDS),
    rewrite=owned_on_gpu,
    numerics="rounded",
    examples=(
        Case("two matrices", on_accelerator(aten.mm.default), normal((5, 4), (4, 6)), ALWAYS),
        Case("a linear layer in 16 bits", on_accelerator(linear), LINEAR, ALWAYS),
        Case("scaled", on_accelerator(scaled), normal((6,), (5, 4), (4, 6), dtype=torch.float16), ALWAYS),
        Case("a batch", on_accelerator(aten.bmm.default), normal((3, 5, 4), (3, 4, 6)), ALWAYS),
        Case(
            "a batch with a mask", on_accelerator(aten.baddbmm.default), normal((3, 5, 6), (3, 5, 4), (3, 4, 6)), ALWAYS
        ),
    ),
    near_misses=(
        Case("switched off", on_accelerator(linear), LINEAR, {"own_products": "off"}),
        Case("where that was not measured to be faster", on_accelerator(linear), LINEAR),
        Case("half precision on a cpu", linear, LINEAR, ALWAYS),
        Case("double precision", on_accelerator(aten.mm.default), normal((5, 4), (4, 6), dtype=torch.float64), ALWAYS),
        Case("sums of nothing", on_accelerator(aten.mm.default), normal((5, 0), (0, 6)), ALWAYS),
    ),
)
