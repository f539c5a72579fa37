"""Concats whose operands were taken apart shortly before: a run of pieces becomes one operand, or the whole result.

    cat([a, p[2], p[3], p[4], b], d), p = split(x, .., d)      =>      cat([a, x[m:n], b], d)

`pieces` says what a run is and what it becomes. Here is when that is done: a rule says which runs it takes, and none is
taken unless something is gained. What is copied is counted, in elements, and calls are: neither may grow, one must
shrink. A piece that somebody else reads stays, and counts as not gained.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import torch_api
from ferrite.errors import NotApplied, Refusal
from ferrite.graph import fake_value, no_guards, storages_in, storages_of
from ferrite.passes.pre_grad.pieces import (
    ConcatOperand,
    Form,
    Moves,
    Stretch,
    has_plain_value,
    operands_of,
    stretches_of,
)
from ferrite.passes.pre_grad.predicates import concat_view, requires_grad
from ferrite.rewrite import Site

aten = torch.ops.aten
CONCATS = (aten.cat.default, aten.stack.default)
FORMATS = (torch.contiguous_format, torch.channels_last, torch.channels_last_3d)


@dataclass(frozen=True)
class Wanted:
    """Which runs a rule takes. `alone`: only where the concat holds nothing else. `copied`: as a copy of its own."""

    forms: frozenset[Form]
    accepts: Callable[[Stretch], bool] = lambda stretch: True
    alone: bool = False
    copied: bool = False

    def __call__(self, site: Site) -> Any:
        """The concat written anew, or why not."""
        concat = concat_view(site.node)
        if concat is None or not all(has_plain_value(operand) for operand in concat.operands):
            return Refusal("its operands are not written out as ordinary tensors")
        value = site.value(site.node)
        operands = without_old_empties(operands_of(concat, value.dim()), value)
        stretches = stretches_of(operands, concat.dim)
        least = site.options.split_cat_min_run
        chosen = [each for each in stretches if self.takes(each, concat.dim, least)]
        if len(stretches) > 1:
            chosen = [each for each in chosen if not copies(each, concat.dim)]
        if not chosen:
            return Refusal(f"it holds no {least} neighbours that are such pieces of one tensor, in its order")
        if self.alone and len(stretches) > 1:
            return Refusal("it holds other operands too")
        moves = Moves(site.call)
        try:
            items = [part for each in stretches for part in self.parts(moves, each, each in chosen, concat)]
        except NotApplied:
            return Refusal("whether it copies depends on sizes that are not known")
        result = self.finished(moves, items, concat.dim, value)
        return result if isinstance(result, Refusal) else worth_it(site, moves, chosen) or result

    def takes(self, stretch: Stretch, dim: int, least: int) -> bool:
        run = stretch.run
        if run is None or run.form(dim) not in self.forms or not self.accepts(stretch):
            return False
        return run.count >= least or run.whole

    def parts(self, moves: Moves, stretch: Stretch, chosen: bool, concat: Any) -> list[Any]:
        """What stands for neighbouring operands in a concat by `cat`."""
        if chosen and stretch.run is not None:
            return [moves.run(stretch.base, stretch.run, concat.dim)]
        nodes = [operand.node for operand in stretch.operands]
        return (
            nodes if concat.kind == "cat" else [moves.write(aten.unsqueeze.default, node, concat.dim) for node in nodes]
        )

    def finished(self, moves: Moves, items: list[Any], dim: int, value: torch.Tensor) -> Any:
        if len(items) > 1 or fake_value(items[0]).dtype != value.dtype:
            return moves.write(aten.cat.default, items, dim) if dim else moves.write(aten.cat.default, items)
        if not self.copied:
            return moves.strided_like(items[0], value)
        if moves.made and copied_elements(moves.made):
            return Refusal("it is a copy without that")
        return moves.write(aten.clone.default, items[0], memory_format=format_of(value))


def copies(stretch: Stretch, dim: int) -> bool:
    """Whether a run would be copied once before it is joined with others. Tried on the base's fake value."""
    base, run = fake_value(stretch.base), stretch.run
    assert run is not None
    if run.shape is not None:
        return False  # its pieces may be copied as it is: counted later
    moves = Moves(lambda target, *args: target(*args), lambda value: value)
    try:
        with base.fake_mode, torch.no_grad(), no_guards(base.fake_mode):
            return storages_in(moves.run(base, run, dim)) != storages_in(base)
    except NotApplied:
        return True


def without_old_empties(operands: list[ConcatOperand], value: torch.Tensor) -> list[ConcatOperand]:
    """Operands of shape [0] may stand in any concat. They say nothing, unless by their dtype or to autograd."""
    if any(fake_value(operand.node).dtype != value.dtype for operand in operands):
        return operands

    def says_nothing(operand: ConcatOperand) -> bool:
        own = fake_value(operand.node)
        return not operand.lifted and own.dim() == 1 < value.dim() and requires_grad(operand.node) is False

    return [operand for operand in operands if not says_nothing(operand)] or operands


def format_of(value: torch.Tensor) -> torch.memory_format:
    """The memory format that a concat has given its result; which the engine compares stride by stride."""
    if not all(type(number) is int for number in (*value.shape, *value.stride())):
        return torch.contiguous_format
    fitting = (each for each in FORMATS if has_format(value, each))
    return next(fitting, torch.contiguous_format)


def has_format(value: torch.Tensor, format: torch.memory_format) -> bool:
    rank = {torch.channels_last: 4, torch.channels_last_3d: 5}.get(format, value.dim())
    return value.dim() == rank and value.is_contiguous(memory_format=format)


# --- what is gained ---------------------------------------------------------------------------------------------------


def worth_it(site: Site, moves: Moves, chosen: Sequence[Stretch]) -> Refusal | None:
    """Nothing if something is gained: then the engine is told what became unnecessary."""
    inside = list(dict.fromkeys(node for stretch in chosen for node in stretch.nodes()))
    items = (user for node in inside for user in node.users if user.target is operator.getitem)
    inside += [item for item in items if not item.users]
    gone = dying(inside, {site.node})
    before, after = copied_elements(gone), copied_elements(moves.made)
    if after > before:
        return Refusal("more would be copied")
    if len(moves.made) > len(gone):
        return Refusal("it would take more calls: pieces that are read elsewhere stay")
    if (after, len(moves.made)) == (before, len(gone)):
        return Refusal("nothing would be gained")
    site.through(*inside)
    return None


def dying(nodes: Iterable[torch.fx.Node], gone: set[torch.fx.Node]) -> set[torch.fx.Node]:
    """What nobody reads any more once some nodes are gone; those included."""
    gone = set(gone)
    for node in sorted(set(nodes), reverse=True):
        if gone.issuperset(node.users):
            gone.add(node)
    return gone


def copied_elements(nodes: Iterable[torch.fx.Node]) -> int:
    """How many elements these calls write; where a size is not known, how many there are likely to be."""
    found = 0
    for node in nodes:
        memory = frozenset().union(*map(storages_of, node.all_input_nodes))
        value = fake_value(node)
        if isinstance(value, torch.Tensor) and storages_of(node).isdisjoint(memory):
            found += torch_api.size_hint(value.numel())
    return found
