"""Joins and splits: rules together, sizes that only a symbol knows, and shapes drawn at random."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.graph.verify import count_guards
from ferrite.options import Options
from ferrite.passes.post_grad.concats import CAT_SLICE_CAT, CAT_SPLIT, part_of_split
from ferrite.passes.post_grad.opt_in_rules import post_grad_fusions
from ferrite.passes.post_grad.split_cat import SPLIT_CAT_GROUPS
from ferrite.pipeline import Fuel, PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import since
from tests.graphs import targets

pytestmark = pytest.mark.quick
aten = torch.ops.aten
GROUP_NAMES = ("normalization_aten_pass", "split_cat_aten_pass")
ALL = (CAT_SLICE_CAT, CAT_SPLIT, *(rule for rules in SPLIT_CAT_GROUPS.values() for rule in rules))


def rewritten(function, *inputs, rules, mode="fake"):
    before = make_fx(function, tracing_mode=mode)(*inputs)
    after = copy.deepcopy(before)
    guards = count_guards(after.graph)
    count = apply_rules(after, rules, PassContext(Options()))
    after.graph.lint()
    assert count_guards(after.graph) == guards
    return before, after, count


def assert_same(before, after, *inputs):
    for ours, theirs in zip(
        torch.utils._pytree.tree_leaves(after(*inputs)), torch.utils._pytree.tree_leaves(before(*inputs)), strict=True
    ):
        assert torch.equal(ours, theirs)
        assert (ours.dtype, ours.stride()) == (theirs.dtype, theirs.stride())


def test_the_groups_have_the_names_that_users_give():
    assert list(SPLIT_CAT_GROUPS) == [
        "normalization_aten_pass",
        "split_cat_aten_pass",
        "select_cat_aten_pass",
        "unbind_stack_aten_pass",
        "move_view_after_cat_aten_pass",
    ]


@pytest.mark.parametrize("spell", ["split", "split_with_sizes"])
def test_a_part_is_known_in_every_spelling(spell):
    def function(x):
        cut = aten.split.Tensor(x, 3, -1) if spell == "split" else aten.split_with_sizes.default(x, [3, 3, 3, 1], 1)
        return cut[-1] + 1

    gm = make_fx(function, tracing_mode="fake")(torch.rand(2, 10))
    item = next(node for node in gm.graph.nodes if node.target is operator.getitem and node.users)
    part = part_of_split(item)
    assert (part.dim, part.index, part.sizes) == (1, 3, (3, 3, 3, 1))
    assert part.source.op == "placeholder"
    assert part_of_split(part.source) is None


def test_the_beginning_of_a_join_up_to_a_symbol():
    def function(a, b):
        joined = torch.cat([a, b], 1)
        return torch.cat([joined, aten.slice.Tensor(joined, 1, 0, a.shape[1])], 1)

    inputs = [torch.rand(2, 3), torch.rand(2, 4)]
    before, after, count = rewritten(function, *inputs, rules=(CAT_SLICE_CAT,), mode="symbolic")
    assert count == 1
    assert_same(before, after, *inputs)
    assert_same(before, after, torch.rand(3, 5), torch.rand(3, 2))  # the graph holds no size of the first call


@pytest.mark.lengthy
def test_an_end_of_unknown_range_is_left_alone():
    def function(a, b):
        joined = torch.cat([a, b], 1)
        return torch.cat([joined, aten.slice.Tensor(joined, 1, 0, b.shape[1])], 1)

    inputs = [torch.rand(2, 3), torch.rand(2, 4)]
    _, after, count = rewritten(function, *inputs, rules=(CAT_SLICE_CAT,), mode="symbolic")
    assert count == 0
    assert any("beyond the first" in miss.reason for miss in why(after, CAT_SLICE_CAT))


def test_a_join_widens_what_it_joins():
    """The first operand is single, the result double: so is the piece of it, in the same bits."""

    def function(a, b):
        joined = torch.cat([a, b], 1)
        return torch.cat([joined, joined.narrow(1, 0, 2)], 1)

    inputs = [torch.rand(2, 3), torch.rand(2, 4, dtype=torch.float64)]
    before, after, count = rewritten(function, *inputs, rules=(CAT_SLICE_CAT,))
    assert count == 1
    assert_same(before, after, *inputs)


def test_a_split_join_of_other_dtypes_keeps_the_wider():
    def function(a, b):
        first, second = torch.cat([a, b]).split([2, 3])
        return first * 2, second * 2

    inputs = [torch.rand(2), torch.rand(3, dtype=torch.float64)]
    before, after, count = rewritten(function, *inputs, rules=(CAT_SPLIT,))
    assert count == 0
    assert [item.dtype for item in after(*inputs)] == [torch.float64] * 2
    assert_same(before, after, *inputs)


def test_parts_that_are_returned_share_no_memory_with_what_was_joined():
    def function(a, b):
        return torch.cat([a, b]).split([2, 3])

    inputs = [torch.rand(2), torch.rand(3)]
    _, after, _ = rewritten(function, *inputs, rules=ALL)
    first, second = after(*inputs)
    assert first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
    assert first.untyped_storage().data_ptr() != inputs[0].untyped_storage().data_ptr()


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.cat(x.split([1, 2], 1), 1),
        lambda x: torch.cat(x.unbind(0), 0),
        lambda x: torch.stack(x.unbind(1), 1),
        lambda x: torch.cat([part.squeeze(0) for part in x.split(1)]),
    ],
    ids=["split", "unbind", "stack", "squeeze"],
)
def test_what_is_put_together_again_and_returned_is_not_the_input(function):
    x = torch.rand(2, 3)
    before, after, _ = rewritten(function, x, rules=ALL)
    assert_same(before, after, x)
    assert after(x).untyped_storage().data_ptr() != x.untyped_storage().data_ptr()


def test_uneven_chunks_keep_their_sizes():
    x = torch.rand(2, 10)
    before, after, _ = rewritten(
        lambda x: [part * 2 for part in x.split(3, 1)], x, rules=SPLIT_CAT_GROUPS["normalization_aten_pass"]
    )
    assert [item.shape[1] for item in after(x)] == [3, 3, 3, 1]
    assert_same(before, after, x)


@since(2, 13)
def test_chunks_of_nothing_are_one_of_size_nothing():
    x = torch.rand(0, 2)
    before, after, count = rewritten(
        lambda x: [part * 2 for part in x.split(3)], x, rules=SPLIT_CAT_GROUPS["normalization_aten_pass"]
    )
    assert count == 1
    assert [item.shape for item in after(x)] == [(0, 2)]
    assert_same(before, after, x)


def test_an_operand_of_another_dimension_does_not_change_the_slices():
    def function(x, y):
        rows, columns = x.split([1] * 12), y.split([1] * 12, 1)
        return torch.cat([*rows[:10], *columns[:10]], 0)

    inputs = [torch.rand(12, 1), torch.rand(1, 12)]
    before, after, count = rewritten(function, *inputs, rules=SPLIT_CAT_GROUPS["split_cat_aten_pass"])
    assert count == 1
    assert targets(after).count(aten.slice.Tensor) == 1
    assert_same(before, after, *inputs)


def test_channels_last_stays():
    def function(x):
        first, second = x.split([1, 2], 1)
        return torch.cat([first, second], 1) + 1

    x = torch.rand(2, 3, 4, 5).to(memory_format=torch.channels_last)
    before, after, count = rewritten(function, x, rules=ALL)
    assert count >= 1
    assert_same(before, after, x)


@pytest.mark.lengthy
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_pieces_put_together_in_any_way(data):
    """Whatever is split, picked, reordered and joined, every rule together leaves the values."""
    rank = data.draw(st.integers(1, 3), "rank")
    shape = [data.draw(st.integers(1, 4), "size") for _ in range(rank)]
    dim, join_dim = data.draw(st.integers(-rank, rank - 1), "split"), data.draw(st.integers(-rank, rank - 1), "join")
    chunk = data.draw(st.integers(1, 5), "chunk")
    kind = data.draw(st.sampled_from(["split", "unbind", "stack", "view"]), "kind")
    size = shape[dim]
    count = -(-size // chunk) if kind == "split" else size
    order = data.draw(st.one_of(st.just(list(range(count))), st.lists(st.integers(0, count - 1), min_size=1)), "order")
    foreign = data.draw(st.booleans(), "foreign")

    def function(x):
        if kind == "split":
            items = x.split(chunk, dim)
            picked = [items[i] for i in order]
            if join_dim % rank != dim % rank:
                picked = [items[0]] * len(picked)  # only equal sizes join along another dimension
        elif kind == "view":
            items = x.split(1, dim)
            picked = [items[i].squeeze(dim) if rank > 1 else items[i] for i in order]
        else:
            items = x.unbind(dim)
            picked = [items[i].unsqueeze(join_dim) if kind == "stack" or rank == 1 else items[i] for i in order]
        to = join_dim % picked[0].ndim
        picked = [*picked, picked[0].sin()] if foreign else picked
        return torch.cat(picked, to) + 1

    x = torch.rand(shape)
    before, after, _ = rewritten(function, x, rules=ALL)
    assert_same(before, after, x)
    assert apply_rules(after, ALL, PassContext(Options())) == 0


def test_a_join_is_not_read_across_a_write():
    def function(a, b):
        joined = aten.cat.default([a, b], 1)
        piece = aten.slice.Tensor(joined, 1, 0, 2)
        aten.copy_.default(a, b[:, :3] * 9)
        return aten.cat.default([joined, piece], 1)

    gm = make_fx(function, tracing_mode="fake")(torch.rand(2, 3), torch.rand(2, 4))
    assert apply_rules(gm, (CAT_SLICE_CAT,), PassContext(Options())) == 0
    assert any("a write lies between" in miss.reason for miss in why(gm, CAT_SLICE_CAT))


def test_what_a_rewrite_looked_through_is_gone():
    function = lambda x: torch.cat([x.sin(), *x.split(1)]) + 1  # noqa: E731
    _, after, count = rewritten(function, torch.rand(3, 2), rules=SPLIT_CAT_GROUPS["split_cat_aten_pass"])
    assert count == 1
    assert targets(after) == [aten.sin.default, aten.cat.default, aten.add.Tensor]


@pytest.mark.parametrize("names", [GROUP_NAMES, GROUP_NAMES[::-1]])
def test_groups_run_in_the_users_order(names):
    """With fuel for one rewrite the first group named has it."""
    gm = make_fx(lambda x: torch.cat(x.split(2, -1), 1) + 1, tracing_mode="fake")(torch.rand(2, 4))
    context = PassContext(Options(post_grad_fusions=names), fuel=Fuel(1))
    assert post_grad_fusions.function(gm, context) == 1
    first = "normalize_split_default_aten" if names[0] == "normalization_aten_pass" else "split_cat_aten"
    assert dict(context.rewrites) == {first: 1}
