"""Products of matrices with sides that matrix units do not like, padded with zeros to sides that they do.

    a [511, 1023], b [1023, 2047]
    mm(a, b)                        =>      mm(pad(a), pad(b))[:511, :2047]

Zeros add nothing, to the bit; the order of the sums may differ. The result is copied, so that nobody gets a tensor with
the padding behind it. A cost model decides: aligned products run faster, and the copies have to be paid for. What
counts is the side along which a matrix lies contiguous in memory; the others are left as they are.

A large result that leaves the graph as it is, as the logits of a language model do, would be there twice, padded and
not. It is made of products that are written where its rows are aligned, see `ferrite.passes.joint.aligned_rows`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import product_libraries, torch_api
from ferrite.errors import Refusal
from ferrite.machines import MATRIX_UNIT_BYTES, MatrixSpeeds, gpu_machine
from ferrite.passes.joint.aligned_rows import AlignedRows, in_aligned_rows
from ferrite.passes.shared.cases import normal, on_accelerator
from ferrite.pipeline import PassContext, graph_pass
from ferrite.rewrite import AnyRule, Case, NodeRule, Site, apply_rules

aten = torch.ops.aten
# In elements: rows that begin there are loaded as matrix units like it.
ALIGNMENT: Mapping[torch.dtype, int] = {
    dtype: MATRIX_UNIT_BYTES // dtype.itemsize for dtype in (torch.float16, torch.bfloat16, torch.float32)
}
# What a result may go through on its way out of the graph.
VIEWS = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default, aten.alias.default, aten.detach.default)


@dataclass(frozen=True)
class Sides:
    """The sides of a product, b times [m, k] @ [k, n], and what each is to be padded by."""

    batch: Any
    m: Any
    k: Any
    n: Any
    more: tuple[int, int, int]

    def worth(self, itemsize: int, speeds: MatrixSpeeds) -> bool:
        batch, m, k, n = (torch_api.size_hint(side) for side in (self.batch, self.m, self.k, self.n))
        more_m, more_k, more_n = self.more
        wide = (batch, m + more_m, k + more_k, n + more_n)
        cost = speeds.product(wide, itemsize)
        if more_m or more_k:
            cost += speeds.copy(batch * wide[1] * wide[2], itemsize)
        if more_k or more_n:
            cost += speeds.copy(batch * wide[2] * wide[3], itemsize)
        if more_m or more_n:
            cost += speeds.copy(batch * m * n, itemsize)
        return cost * speeds.margin < self.unaligned(itemsize, speeds)

    def unaligned(self, itemsize: int, speeds: MatrixSpeeds) -> float:
        """What the product takes as it is."""
        sides = [torch_api.size_hint(side) for side in (self.batch, self.m, self.k, self.n)]
        on_words = all(more * itemsize % 4 == 0 for more in self.more)
        return speeds.product(sides, itemsize, speeds.on_words if on_words else speeds.unaligned)

    def in_rows(self, alignment: int) -> AlignedRows | None:
        """The rows of the result, where these alone are not aligned."""
        if self.more[0] or self.more[1] or not self.more[2] or not isinstance(self.m, int):
            return None
        return AlignedRows(self.m, self.n, alignment) if self.n >= 2 * alignment else None

    def worth_in_rows(self, aligned: AlignedRows, itemsize: int, speeds: MatrixSpeeds) -> bool:
        """Each product of rows that are alike reads all of the right matrix."""
        k = torch_api.size_hint(self.k)
        each = speeds.product((1, -(-aligned.m // aligned.period), k, aligned.n), itemsize)
        columns = 2 * aligned.alignment
        edges = speeds.product((1, aligned.m, k, columns), itemsize) + speeds.copy(aligned.m * columns, itemsize)
        cost = aligned.period * (each + speeds.call) + edges
        return cost * speeds.margin < self.unaligned(itemsize, speeds)


def padding(side: Any, alignment: int) -> int:
    """Up to the next multiple; nothing for a side of one, which no alignment helps, or one that is not known."""
    return -side % alignment if isinstance(side, int) and side != 1 else 0


def contiguous_sides(left: torch.Tensor, right: torch.Tensor) -> tuple[bool, bool, bool]:
    """Of m, k and n, those along which an operand or the result lies contiguous."""
    return turned(left), not turned(left) or turned(right), True


def turned(matrix: torch.Tensor) -> bool:
    """Whether its columns lie contiguous, and not its rows."""
    return torch_api.known_equal(matrix.stride(-2), 1) and not torch_api.known_equal(matrix.stride(-1), 1)


def gains_nothing(value: torch.Tensor) -> Refusal | None:
    if value.device.type == "cpu":
        return Refusal("on a cpu alignment gains nothing")
    if value.dtype is torch.float32 and not product_libraries.may_round_operands(value.device.type):
        return Refusal("single precision runs without matrix units")
    return None


def sides_of(left: torch.Tensor, right: torch.Tensor, which: Sequence[bool]) -> Sides | Refusal:
    alignment = ALIGNMENT.get(left.dtype)
    if alignment is None or right.dtype != left.dtype:
        return Refusal(f"{left.dtype} has no alignment")
    batch = left.shape[0] if left.ndim == 3 else 1
    (m, k), n = left.shape[-2:], right.shape[-1]
    if any(isinstance(side, int) and side == 0 for side in (batch, m, k, n)):
        return Refusal("a side is empty")
    if not all(any(isinstance(side, int) for side in value.shape) for value in (left, right)):
        return Refusal("no side of an operand is known")
    more_m, more_k, more_n = (
        padding(side, alignment) if pad else 0 for side, pad in zip((m, k, n), which, strict=True)
    )
    if not more_m and not more_k and not more_n:
        return Refusal("the sides are aligned, or not known")
    return Sides(batch, m, k, n, (more_m, more_k, more_n))


def padded_product(site: Site) -> Any:
    names = ("mat1", "mat2") if "mat1" in site.arguments else ("self", "mat2")
    left, right = (site.arguments[name] for name in names)
    value, wanted = site.value(left), site.options.pad_mm
    if wanted == "off":
        return Refusal("the option pad_mm is off")
    if torch.are_deterministic_algorithms_enabled():
        return Refusal("torch is to be deterministic")
    if wanted == "auto" and (problem := gains_nothing(value)) is not None:
        return problem
    which = (True, True, True) if wanted == "always" else contiguous_sides(value, site.value(right))
    sides = sides_of(value, site.value(right), which)
    if isinstance(sides, Refusal):
        return sides
    itemsize, speeds = value.element_size(), gpu_machine().matrix_speeds
    aligned = sides.in_rows(ALIGNMENT[value.dtype]) if is_kept_once(site, value, site.value(right)) else None
    if aligned is not None and (wanted == "always" or sides.worth_in_rows(aligned, itemsize, speeds)):
        return in_aligned_rows(site, left, right, aligned)
    if wanted == "auto" and not sides.worth(itemsize, speeds):
        return Refusal("the copies cost more than alignment gains")
    more_m, more_k, more_n = sides.more
    matrices = [padded(site, left, more_m, more_k), padded(site, right, more_k, more_n)]
    if "mat1" in site.arguments:
        factors = {name: site.arguments[name] for name in ("beta", "alpha")}
        product = site.call(aten.addmm.default, padded_bias(site, sides), *matrices, **factors)
    else:
        product = site.call(site.node.target, *matrices)
    return cut(site, product, sides)


def is_kept_once(site: Site, left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether a result is large, leaves as it is, and can be made of products that torch writes into parts of it."""
    if site.node.target is not aten.mm.default or turned(left) or not turned(right):
        return False
    value = site.value(site.node)
    return value.numel() * value.element_size() >= gpu_machine().min_bytes_in_rows and only_leaves(site.node)


def only_leaves(node: torch.fx.Node) -> bool:
    """Whether nothing in the graph computes with a value."""
    return all(
        user.op == "output" or (user.target in VIEWS and user.args[0] is node and only_leaves(user))
        for user in node.users
    )


def padded(site: Site, tensor: torch.fx.Node, rows: int, columns: int) -> torch.fx.Node:
    """The matrix with zeros below and on the right. It keeps its layout, by which the sides to pad were chosen."""
    if not rows and not columns:
        return tensor
    if turned(site.value(tensor)):
        lying = turned_back(site, tensor)
        found: torch.fx.Node = site.call(aten.transpose.int, padded(site, lying, columns, rows), -1, -2)
    else:
        found = site.call(aten.constant_pad_nd.default, tensor, [0, columns, 0, rows])
    return found


def turned_back(site: Site, tensor: torch.fx.Node) -> torch.fx.Node:
    """The matrix with its rows as columns: what it was, where the graph has turned it, so that a gradient that two
    products need, one of them turned, is padded once."""
    dims = list(range(site.value(tensor).ndim))
    dims[-2:] = dims[:-3:-1]
    if tensor.target is aten.permute.default and [dim % len(dims) for dim in tensor.args[1]] == dims:  # type: ignore[operator,union-attr]
        source = tensor.args[0]
        assert isinstance(source, torch.fx.Node)
        return source
    made: torch.fx.Node = site.call(aten.transpose.int, tensor, -1, -2)
    return made


def padded_bias(site: Site, sides: Sides) -> torch.fx.Node:
    """The bias grows with the sides along which it is not spread."""
    bias: torch.fx.Node = site.arguments["self"]
    shape = site.value(bias).shape
    columns = sides.more[2] if shape and not torch_api.known_equal(shape[-1], 1) else 0
    rows = sides.more[0] if len(shape) > 1 and not torch_api.known_equal(shape[0], 1) else 0
    if not rows and not columns:
        return bias
    found: torch.fx.Node = site.call(
        aten.constant_pad_nd.default, bias, [0, columns, 0, rows] if len(shape) > 1 else [0, columns]
    )
    return found


def cut(site: Site, product: Any, sides: Sides) -> Any:
    if sides.more[0]:
        product = site.call(aten.slice.Tensor, product, -2, 0, sides.m)
    if sides.more[2]:
        product = site.call(aten.slice.Tensor, product, -1, 0, sides.n)
    if not sides.more[0] and not sides.more[2]:
        return product
    return site.call(aten.clone.default, product, memory_format=torch.contiguous_format)


mm_on_accelerator = on_accelerator(aten.mm.default)


def with_bias(**factors: float) -> Callable[..., Any]:
    return lambda bias, a, b: aten.addmm.default(bias, a, b, **factors)


mm, bmm, f16 = aten.mm.default, aten.bmm.default, torch.float16
ALWAYS = {"pad_mm": "always"}

PAD_MM = NodeRule(
    name="pad_mm",
    purpose="the sides of a product are padded to what matrix units like",
    targets=(aten.mm.default, aten.bmm.default, aten.addmm.default),
    rewrite=padded_product,
    numerics="rounded",
    examples=(
        Case("all sides", mm, normal((5, 7), (7, 9)), ALWAYS),
        Case("the inner side alone", mm, normal((4, 7), (7, 8)), ALWAYS),
        Case("rows alone", mm, normal((5, 8), (8, 4)), ALWAYS),
        Case("half precision", mm, normal((12, 8), (8, 9), dtype=f16), ALWAYS),
        Case("a side of one", mm, normal((1, 7), (7, 8)), ALWAYS),
        Case("a batch", bmm, normal((2, 5, 7), (2, 7, 9)), ALWAYS),
        Case("a bias for each column", with_bias(), normal((9,), (5, 7), (7, 9)), ALWAYS),
        Case("a bias for each row", with_bias(alpha=2), normal((5, 1), (5, 7), (7, 9)), ALWAYS),
        Case("a bias for each element", with_bias(beta=3), normal((5, 9), (5, 7), (7, 9)), ALWAYS),
        Case("one bias", with_bias(beta=3, alpha=2), normal((), (5, 7), (7, 9)), ALWAYS),
        Case("a bias that does not count", with_bias(beta=0), normal((9,), (5, 7), (7, 9)), ALWAYS),
        Case("large, on an accelerator", mm_on_accelerator, normal((4095, 4095), (4095, 4095), dtype=f16)),
    ),
    near_misses=(
        Case("on a cpu", mm, normal((5, 7), (7, 9))),
        Case("off", mm, normal((5, 7), (7, 9)), {"pad_mm": "off"}),
        Case("aligned", mm, normal((4, 8), (8, 12)), ALWAYS),
        Case("double precision", mm, normal((5, 7), (7, 9), dtype=torch.float64), ALWAYS),
        Case("integers", mm, normal((5, 7), (7, 9), dtype=torch.int64), ALWAYS),
        Case("empty", mm, normal((5, 0), (0, 9)), ALWAYS),
        Case("strict", mm, normal((5, 7), (7, 9)), {"pad_mm": "always", "numerics": "strict"}),
        Case("only rows that are whole", mm_on_accelerator, normal((4095, 4096), (4096, 4096), dtype=f16)),
        Case("single precision on an accelerator", mm_on_accelerator, normal((4095, 4095), (4095, 4095))),
        Case("no longer small, on an accelerator", mm_on_accelerator, normal((2047, 2047), (2047, 2047), dtype=f16)),
        Case("small, on an accelerator", mm_on_accelerator, normal((63, 63), (63, 63), dtype=f16)),
        Case("thin, on an accelerator", mm_on_accelerator, normal((2047, 2047), (2047, 3), dtype=f16)),
    ),
)

PAD_RULES: tuple[AnyRule, ...] = (PAD_MM,)


@graph_pass(stage="joint", rules=PAD_RULES, after="fuse_attention")
def pad_mm(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Products with sides that matrix units do not like are padded, where a cost model shows a win."""
    return apply_rules(gm, PAD_RULES, context)
