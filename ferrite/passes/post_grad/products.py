"""Matrix products and what stands right behind them.

    add(mm(a, b), mm(c, d))         =>      mm_plus_mm(a, b, c, d)
    addmm(bias, a, b)               =>      bias + mm(a, b)              where only pointwise operators read it
    mul(_int_mm(a, b), scale)       =>      int_mm_mul(a, b, scale)

`should_prefer_unfused_addmm` decides between a product with a bias inside and one with the bias behind it. The rule
that puts it inside asks the same question, so that the two never undo each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import HALVES, fake_value, is_elementwise
from ferrite.passes.post_grad import operators as operators  # defines torch.ops.ferrite
from ferrite.passes.post_grad.product_layouts import is_by_columns
from ferrite.passes.shared.cases import on_meta, uniform
from ferrite.rewrite import AnyRule, Case, Match, Rule

aten = torch.ops.aten


# --- who reads a product ----------------------------------------------------------------------------------------------

# These are no views by schema, but all they do is to say how memory is read.
LIKE_VIEWS = frozenset({aten.reshape.default, aten._unsafe_view.default})


def is_view(node: torch.fx.Node) -> bool:
    return bool(getattr(node.target, "is_view", False)) or node.target in LIKE_VIEWS


def readers_of(root: torch.fx.Node) -> Iterator[torch.fx.Node]:
    """Those that read a value or a view of it; views themselves, and items, are none."""
    waiting, seen = list(root.users), set(root.users)
    while waiting:
        user = waiting.pop()
        if user.op == "call_function" and (is_view(user) or getattr(user.target, "__name__", "") == "getitem"):
            new = set(user.users) - seen
            seen |= new
            waiting += new
        else:
            yield user


# --- two products, added ----------------------------------------------------------------------------------------------


def products_of_one_look(match: Match) -> Refusal | None:
    a, b, c, d = (match.value(name) for name in "abcd")
    if len({value.dtype for value in (a, b, c, d)}) != 1 or not a.is_floating_point():
        return Refusal("the products are not of one floating-point dtype")
    if len({value.device for value in (a, b, c, d)}) != 1:
        return Refusal("the products are on different devices")
    if not (torch_api.known_equal(a.shape[0], c.shape[0]) and torch_api.known_equal(b.shape[1], d.shape[1])):
        return Refusal("the products are not provably of one size")
    return None


PRODUCTS = frozenset({aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default})


def sum_is_written_anyway(match: Match) -> Refusal | None:
    """Where it is done by itself: on a CPU, in single or double precision, where no kernel reads the sum.

    Else the sum is addmm(mm(c, d), a, b), which copies the first product. Time without that copy, with one thread of a
    Neoverse N1, to the time with it (`python -m bench.passes rewrites --compiled --only kernel_patterns`): 0.76 to
    0.99 where the sum is a result, 0.91 to 1.10 where a kernel reads it. In 16 bits there is no difference: the
    products themselves take all the time.
    """
    if match.options.kernel_rewrites == "always":
        return None
    value = fake_value(match.roots[0])
    if value.device.type != "cpu" or value.dtype not in (torch.float32, torch.float64):
        return Refusal("it was measured for single and double precision on a cpu only")
    if any(is_by_columns(match.value(name)) for name in "bd"):
        return Refusal("a product like a linear layer's may be laid out anew")
    if not all(user.op == "output" or user.target in PRODUCTS for user in readers_of(match.roots[0])):
        return Refusal("a kernel reads the sum")
    return None


def added(a: Any, b: Any, c: Any, d: Any) -> Any:
    return aten.add.Tensor(aten.mm.default(a, b), aten.mm.default(c, d))


ALWAYS = {"kernel_rewrites": "always"}
SQUARE = ((3, 4), (4, 5), (3, 4), (4, 5))

MM_PLUS_MM = Rule(
    name="mm_plus_mm",
    purpose="the sum of two products has one accumulator",
    before=added,
    after=lambda a, b, c, d: torch.ops.ferrite.mm_plus_mm.default(a, b, c, d),
    when=(products_of_one_look, sum_is_written_anyway),
    numerics="rounded",
    examples=(
        Case("plain", added, uniform(*SQUARE)),
        Case("inner sizes differ", added, uniform((3, 4), (4, 5), (3, 6), (6, 5))),
        Case("no rows", added, uniform((0, 4), (4, 5), (0, 4), (4, 5))),
        Case("one operand in common", lambda a, b, c: added(a, b, a, c), uniform((3, 4), (4, 5), (4, 5))),
        Case("a view of it is returned", lambda a, b, c, d: added(a, b, c, d).view(5, 3), uniform(*SQUARE)),
        Case(
            "a product reads it",
            lambda a, b, c, d: aten.mm.default(y := added(a, b, c, d), aten.t.default(y)),
            uniform(*SQUARE),
        ),
        Case("a kernel reads it", lambda a, b, c, d: aten.relu.default(added(a, b, c, d)), uniform(*SQUARE), ALWAYS),
        Case("half precision", added, uniform(*SQUARE, dtype=torch.bfloat16), ALWAYS),
    ),
    near_misses=(
        Case(
            "scaled",
            lambda a, b, c, d: aten.add.Tensor(aten.mm.default(a, b), aten.mm.default(c, d), alpha=2),
            uniform(*SQUARE),
        ),
        Case("one row spreads", added, uniform((1, 4), (4, 5), (3, 4), (4, 5))),
        Case("one product twice", lambda a, b: aten.add.Tensor(p := aten.mm.default(a, b), p), uniform(*SQUARE[:2])),
        Case(
            "a product is read again",
            lambda a, b, c, d: aten.add.Tensor(p := aten.mm.default(a, b), aten.mm.default(c, d)) * p,
            uniform(*SQUARE),
        ),
        Case("one is wider", lambda a, b, c, d: added(a, b, c.double(), d.double()), uniform(*SQUARE)),
        Case("integers", added, uniform(*SQUARE, dtype=torch.int64)),
        Case("a kernel reads it", lambda a, b, c, d: aten.relu.default(added(a, b, c, d)), uniform(*SQUARE)),
        Case("half precision", added, uniform(*SQUARE, dtype=torch.bfloat16)),
        Case(
            "like a linear layer",
            lambda a, b, c, d: added(a, aten.t.default(b), c, d),
            uniform((3, 4), (5, 4), (3, 4), (4, 5)),
        ),
    ),
)


# --- a bias behind the product ----------------------------------------------------------------------------------------


def should_prefer_unfused_addmm(root: torch.fx.Node, bias: torch.fx.Node) -> bool:
    """Whether a bias is better added behind the product: on a GPU, where every reader is pointwise and takes it along.

    `root` is the sum, fused or not. Views and items of it are looked through; an output is a reader that is not.
    """
    return fake_value(bias).device.type != "cpu" and all(is_elementwise(reader.target) for reader in readers_of(root))


def bias_stays_behind(match: Match) -> Refusal | None:
    """The same question, as a guard of a rule that would fuse `bias` into the product."""
    if should_prefer_unfused_addmm(match.roots[0], match["bias"]):
        return Refusal("the pointwise operators that read the sum take the bias along")
    return None


def bias_goes_behind(match: Match) -> Refusal | None:
    if not isinstance(match["beta"], (int, float)) or not isinstance(match["alpha"], (int, float)):
        return Refusal("a factor is complex or symbolic")
    value = fake_value(match.roots[0])
    if not value.is_floating_point():
        return Refusal("it is not of floating-point numbers")
    if value.dtype in HALVES and match.options.keep_half_addmm:
        return Refusal("in half precision the product would be rounded once more")
    if not should_prefer_unfused_addmm(match.roots[0], match["bias"]):
        return Refusal("it is on a cpu, or not only pointwise operators read it")
    return None


def product_then_bias(bias: Any, a: Any, b: Any, beta: float, alpha: float) -> Any:
    product = aten.mm.default(a, b)
    if alpha != 1:
        product = aten.mul.Tensor(product, alpha)
    if beta == 0:
        return product  # a bias times nothing is not read: its nan does not count
    return aten.add.Tensor(bias if beta == 1 else aten.mul.Tensor(bias, beta), product)


def biased(then: Callable[[Any], Any], dtype: torch.dtype | None = None, **factors: float) -> Callable[..., Any]:
    return lambda bias, a, b: then(aten.addmm.default(*(on_meta(item, dtype) for item in (bias, a, b)), **factors))


def bias_and_matrices() -> list[torch.Tensor]:
    return [torch.rand(5), torch.rand(3, 4), torch.rand(4, 5)]


UNFUSE_BIAS = Rule(
    name="unfuse_bias_add_to_pointwise",
    purpose="a bias is added by the pointwise kernel that reads the product",
    before=lambda bias, a, b, beta, alpha: aten.addmm.default(bias, a, b, beta=beta, alpha=alpha),
    after=product_then_bias,
    when=(bias_goes_behind,),
    numerics="rounded",
    examples=(
        Case("relu reads it", biased(aten.relu.default), bias_and_matrices),
        Case("through a view", biased(lambda x: aten.relu.default(aten.view.default(x, [15]))), bias_and_matrices),
        Case("scaled", biased(aten.relu.default, beta=3, alpha=2), bias_and_matrices),
        Case("the bias does not count", biased(aten.relu.default, beta=0), bias_and_matrices),
        Case(
            "half precision, where that may be rounded once more",
            biased(aten.relu.default, torch.bfloat16),
            bias_and_matrices,
            {"keep_half_addmm": False},
        ),
    ),
    near_misses=(
        Case("returned", biased(lambda x: x), bias_and_matrices),
        Case("a product reads it", biased(lambda x: aten.mm.default(x, aten.t.default(x))), bias_and_matrices),
        Case("half precision", biased(aten.relu.default, torch.bfloat16), bias_and_matrices),
        Case("on a cpu", lambda bias, a, b: aten.relu.default(aten.addmm.default(bias, a, b)), bias_and_matrices),
    ),
)


# --- a scale behind an integer product --------------------------------------------------------------------------------


def check_shape_cuda_and_fused_int_mm_mul_enabled(scale: Any, enabled: bool = True) -> bool:
    """Whether a scale is one that a kernel can take along: asked for, a matrix, on an accelerator."""
    return enabled and isinstance(scale, torch.Tensor) and scale.ndim == 2 and scale.device.type != "cpu"


def scale_spreads(match: Match) -> Refusal | None:
    scale, a, b = match.value("scale"), match.value("a"), match.value("b")
    if not check_shape_cuda_and_fused_int_mm_mul_enabled(scale, match.options.fuse_int_mm_scale):
        return Refusal("the option fuse_int_mm_scale is off, or the scale is no matrix on an accelerator")
    if not scale.is_floating_point() or scale.device != a.device:
        return Refusal("the scale is of integers or elsewhere")
    for size, wanted in zip(scale.shape, (a.shape[0], b.shape[1]), strict=True):
        if not torch_api.known_equal(size, 1) and not torch_api.known_equal(size, wanted):
            return Refusal("the scale does not provably spread over the product")
    return None


def scaled(a: Any, b: Any, scale: Any) -> Any:
    return aten.mul.Tensor(aten._int_mm.default(a, b), scale)


def eights(*scale: int) -> Callable[[], list[torch.Tensor]]:
    return lambda: [*(torch.randint(-9, 9, (32, 32), dtype=torch.int8) for _ in range(2)), torch.rand(scale)]


def scaled_on_meta(a: Any, b: Any, scale: Any) -> Any:
    return scaled(on_meta(a), on_meta(b), on_meta(scale))


FUSING_SCALES = {"fuse_int_mm_scale": True}
INT_MM_MUL = Rule(
    name="fused_int_mm_mul",
    purpose="an integer product is scaled before it is written",
    before=scaled,
    after=lambda a, b, scale: torch.ops.ferrite.int_mm_mul.default(a, b, scale),
    when=(scale_spreads,),
    examples=(
        Case("a column", scaled_on_meta, eights(32, 1), FUSING_SCALES),
        Case("a row", scaled_on_meta, eights(1, 32), FUSING_SCALES),
        Case(
            "on the left",
            lambda a, b, s: aten.mul.Tensor(on_meta(s), aten._int_mm.default(on_meta(a), on_meta(b))),
            eights(1, 1),
            FUSING_SCALES,
        ),
    ),
    near_misses=(
        Case("not asked for", scaled_on_meta, eights(32, 1)),
        Case("on a cpu", scaled, eights(32, 1), FUSING_SCALES),
        Case("no matrix", scaled_on_meta, eights(32), FUSING_SCALES),
        Case(
            "the product is read again",
            lambda a, b, s: (p := aten._int_mm.default(on_meta(a), on_meta(b)), aten.mul.Tensor(p, on_meta(s)) + p)[1],
            eights(32, 1),
            FUSING_SCALES,
        ),
        Case("a scale of integers", lambda a, b, s: scaled_on_meta(a, b, s.int()), eights(32, 1), FUSING_SCALES),
    ),
)

AUTOTUNE_RULES: tuple[AnyRule, ...] = (MM_PLUS_MM,)
PRODUCT_RULES: tuple[AnyRule, ...] = (UNFUSE_BIAS,)
INT_MM_RULES: tuple[AnyRule, ...] = (INT_MM_MUL,)
