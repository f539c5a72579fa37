"""What may stand between the two products, in the words of programs. A new spelling is one more pair:

    AttentionSpelling(lambda x, m, c: aten.masked_fill.Scalar(x, m, c), lambda m, c: Fill(m, c, when=True))

what is called, and what it does to `x`, where the way back goes on. Arguments that a spelling does not mention must
hold their defaults; sums and products are read both ways.

    SCORES      from the softmax back to the first product: scales, masks, fills
    WEIGHTS     from the second product back to the softmax: dropout
    SOFTMAXES   the softmax itself
    PRODUCTS    the two products

Other shapes, copies and casts may stand everywhere: they are sets of operators.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied
from ferrite.graph import fake_value
from ferrite.passes.shared.attention.found import (
    Add,
    Dropout,
    Fill,
    FoundStep,
    Meaning,
    Node,
    Nothing,
    Scale,
    ScoreProduct,
    Softmax,
    TensorFactor,
    is_tensor,
    source_of,
)
from ferrite.rewrite import Match, Matcher, Pattern, trace_pattern

aten, prims = torch.ops.aten, torch.ops.prims


@dataclass(frozen=True)
class AttentionSpelling:
    before: Callable[..., Any]
    after: Callable[..., Meaning]

    @functools.cached_property
    def pattern(self) -> Pattern:
        return trace_pattern(self.before)

    def read(self, node: Node) -> Iterator[FoundStep]:
        """The ways to read a node so: two for a product of two tensors."""
        for match in Matcher(self.pattern).call(self.pattern.anchor, node, Match(self.pattern)):
            others = [match[name] for name in self.pattern.variables if name != "x"]
            if is_tensor(match["x"]):
                yield FoundStep(match["x"], self.after(*others), tuple(sorted(match.nodes.values(), reverse=True)))


class SpellingTable:
    """Spellings by the operator they end with. Where there are `casts`, those may stand in between."""

    def __init__(
        self, *spellings: AttentionSpelling, casts: Callable[[torch.Tensor, torch.Tensor], bool] | None = None
    ) -> None:
        self.spellings, self.casts = spellings, casts

    @functools.cached_property
    def by_target(self) -> Mapping[Any, list[AttentionSpelling]]:
        found: dict[Any, list[AttentionSpelling]] = {}
        for spelling in self.spellings:
            found.setdefault(spelling.pattern.anchor.target, []).append(spelling)
        return found

    def steps(self, node: Node) -> Iterator[FoundStep]:
        inner = source_of(node) if self.casts is not None and node.target in KEPT else None
        if inner is not None and self.is_nothing(node, fake_value(inner), fake_value(node)):
            yield FoundStep(inner, Nothing(), (node,))
        for spelling in self.by_target.get(node.target, ()):
            yield from spelling.read(node)

    def is_nothing(self, node: Node, old: torch.Tensor, new: torch.Tensor) -> bool:
        if node.target in SHAPES:
            return same_matrices(old, new)
        real = old.is_floating_point() and new.is_floating_point() and old.device == new.device
        return real and self.casts is not None and self.casts(old, new)


def same_matrices(old: torch.Tensor, new: torch.Tensor) -> bool:
    """The same elements in the same order, rows and columns as they were: only the batch is spelled otherwise."""
    if old.dim() < 2 or new.dim() < 2 or not torch_api.known_equal(old.numel(), new.numel()):
        return False
    return all(map(torch_api.known_equal, old.shape[-2:], new.shape[-2:]))


def any_type(old: torch.Tensor, new: torch.Tensor) -> bool:
    return True


def wider_type(old: torch.Tensor, new: torch.Tensor) -> bool:
    return old.dtype.itemsize <= new.dtype.itemsize


SHAPES = frozenset(
    {
        *(aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten._reshape_alias.default),
        *(aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
        *(aten.clone.default, aten.contiguous.default, aten.alias.default, aten.flatten.using_ints),
        *(aten.unflatten.int, aten.lift_fresh_copy.default),
    }
)
CASTS = frozenset(
    {
        *(aten.to.dtype, aten.to.other, aten.to.device, aten.to.dtype_layout, aten.type_as.default),
        *(aten._to_copy.default, prims.convert_element_type.default),
    }
)

KEPT = SHAPES | CASTS

SCORES = SpellingTable(
    AttentionSpelling(lambda x, c: aten.mul.Tensor(x, c), Scale),
    AttentionSpelling(lambda x, c: aten.mul.Scalar(x, c), Scale),
    AttentionSpelling(lambda x, c: aten.div.Tensor(x, c), lambda c: Scale(c, divides=True)),
    AttentionSpelling(lambda x, c: aten.div.Scalar(x, c), lambda c: Scale(c, divides=True)),
    AttentionSpelling(lambda x, m: aten.add.Tensor(x, m), Add),
    AttentionSpelling(lambda x, m: aten.sub.Tensor(x, m), lambda m: Add(m, times=-1)),
    AttentionSpelling(lambda x, m, c: aten.masked_fill.Scalar(x, m, c), lambda m, c: Fill(m, c, when=True)),
    AttentionSpelling(lambda x, m, c: aten.masked_fill.Tensor(x, m, c), lambda m, c: Fill(m, c, when=True)),
    AttentionSpelling(lambda x, m, c: aten.where.self(m, x, c), lambda m, c: Fill(m, c, when=False)),
    AttentionSpelling(lambda x, m, c: aten.where.self(m, c, x), lambda m, c: Fill(m, c, when=True)),
    AttentionSpelling(lambda x, m, c: aten.where.ScalarOther(m, x, c), lambda m, c: Fill(m, c, when=False)),
    AttentionSpelling(lambda x, m, c: aten.where.ScalarSelf(m, c, x), lambda m, c: Fill(m, c, when=True)),
    casts=wider_type,
)
WEIGHTS = SpellingTable(
    AttentionSpelling(lambda x, p, train: aten.dropout.default(x, p, train), Dropout),
    AttentionSpelling(lambda x, p, train: aten.native_dropout.default(x, p, train)[0], Dropout),
    casts=any_type,
)


def softmax_in_parts(x: Any, dims: Any, same: Any) -> Any:
    powers = aten.exp.default(aten.sub.Tensor(x, aten.amax.default(x, dims, True)))
    return aten.div.Tensor(powers, aten.sum.dim_IntList(powers, same, True))


def only(dims: Any) -> Any:
    return dims[0] if isinstance(dims, (list, tuple)) and len(dims) == 1 else None


SOFTMAXES = SpellingTable(
    AttentionSpelling(lambda x, dim, dtype: aten.softmax.int(x, dim, dtype), lambda dim, dtype: Softmax((dim,))),
    AttentionSpelling(lambda x, dim, wide: aten._softmax.default(x, dim, wide), lambda dim, wide: Softmax((dim,))),
    AttentionSpelling(
        lambda x, d, dtype: aten._safe_softmax.default(x, d, dtype), lambda d, dtype: Softmax((d,), safe=True)
    ),
    AttentionSpelling(softmax_in_parts, lambda dims, same: Softmax((only(dims), only(same)))),
)
PRODUCTS = SpellingTable(
    AttentionSpelling(lambda x, y: aten.matmul.default(x, y), TensorFactor),
    AttentionSpelling(lambda x, y: aten.bmm.default(x, y), TensorFactor),
    AttentionSpelling(lambda x, y: aten.mm.default(x, y), TensorFactor),
    AttentionSpelling(
        lambda x, y, m, a, b: aten.baddbmm.default(m, x, y, beta=b, alpha=a),
        lambda y, m, a, b: TensorFactor(y, then=(Scale(a), Add(m, times=b))),
    ),
    AttentionSpelling(lambda x, y, e: aten.einsum.default(e, [x, y]), lambda y, e: TensorFactor(y, equation=e)),
)


def softmax_at(node: Node) -> FoundStep | None:
    """A softmax along the rows; half precision may be cast up in it."""
    for step in SOFTMAXES.steps(node):
        old, new = fake_value(step.inner), fake_value(node)
        last = {-1, new.dim() - 1}
        if new.dim() >= 2 and last.issuperset(step.meaning.dims) and wider_type(old, new):
            return step
    return None


def product_at(node: Node) -> ScoreProduct | None:
    for step in PRODUCTS.steps(node):
        times, left = step.meaning, step.inner
        if not is_tensor(times.right):
            continue
        if not (fake_value(left).is_floating_point() and fake_value(times.right).is_floating_point()):
            raise NotApplied("the product is not of floating-point numbers")
        if times.equation is not None:
            return by_labels(node, left, times.right, times.equation)
        ranks = [fake_value(item).dim() for item in (left, times.right, node)]
        if min(ranks) >= 2:
            orders = [tuple(range(rank)) for rank in ranks]
            return ScoreProduct(node, left, times.right, orders[0], orders[1], orders[2], times.then)
    return None


def by_labels(node: Node, left: Node, right: Node, equation: str) -> ScoreProduct | None:
    """einsum("b i h d, b j h d -> b h i j", q, k): labels say which dimension goes where."""
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    ours, comma, theirs = inputs.partition(",")
    if not arrow or not comma:
        return None
    if any(not each.isalpha() or len(set(each)) != len(each) for each in (ours, theirs, result)):
        return None
    batch = [label for label in result if label in ours and label in theirs]
    rows, columns = ([label for label in result if label in side and label not in batch] for side in (ours, theirs))
    summed = [label for label in ours if label in theirs and label not in result]
    if (len(rows), len(columns), len(summed)) != (1, 1, 1) or set(ours + theirs) != {*result, *summed}:
        return None
    (i,), (j,), (d,) = rows, columns, summed
    return ScoreProduct(
        node,
        left,
        right,
        tuple(map(ours.index, (*batch, i, d))),
        tuple(map(theirs.index, (*batch, d, j))),
        tuple(map([*batch, i, j].index, result)),
    )
