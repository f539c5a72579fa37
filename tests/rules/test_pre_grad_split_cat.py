"""The passes about splits and joins, on whole graphs: every axis and dimension, and the mistakes that are easily made.

Each rule's own examples are in `test_pre_grad_rules`; the algebra behind them in `test_pre_grad_pieces`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from ferrite.errors import UserError
from ferrite.graph.verify import count_guards
from ferrite.options import Options, resolve
from ferrite.options.values import Choice
from ferrite.passes import checked_options, pre_grad
from ferrite.passes.pre_grad.split_cat import COVERED_BY, PARTS
from ferrite.pipeline import PassContext, Pipeline, run_pipeline
from tests.torch_level import Captured, assert_same, captured

FAMILY = Pipeline("family", (pre_grad.cancel_split_cat_pass, pre_grad.einsum_to_pointwise_pass))
JOINS = ("cat", "stack")


def cancelled(before: Captured, **options: Any) -> tuple[Captured, dict[str, int]]:
    """A copy of a graph after the whole family, and which rules fired how often."""
    after = before.copy()
    context = PassContext(Options(strict=True, **options))
    run_pipeline(FAMILY, after.gm, context)
    return after, dict(context.rewrites)


def assert_cancelled(fn: Any, make_inputs: Callable[[], list[Any]], form: Any = "dynamo", **options: Any) -> list[str]:
    """Nothing visible changes; the joins that are left."""
    before = captured(fn, make_inputs(), form)
    after, _ = cancelled(before, **options)
    assert_same(before, after, make_inputs)
    again, rewrites = cancelled(after, **options)
    assert not rewrites, "a second run changes something"
    assert str(again.gm.graph) == str(after.gm.graph)
    return joins_in(after)


def joins_in(graph: Captured) -> list[str]:
    names = (str(node.target).split(".")[1] for node in graph.gm.graph.nodes if "aten" in str(node.target))
    return [name for name in names if name in JOINS]


def flat(value: Any) -> Any:
    return value.reshape(-1) * 2


# --- every axis, every dimension --------------------------------------------------------------------------------------

# What is joined, given four pieces of x, four of y, and who makes a foreign value; and how many joins are left of it.
Pick = Callable[[Any, Any, Any], list[Any]]
PICKS: dict[str, tuple[Pick, int]] = {
    "all": (lambda p, q, f: [p[0], p[1], p[2], p[3]], 0),
    "some": (lambda p, q, f: [p[1], p[2], p[3]], 0),
    "shuffled": (lambda p, q, f: [p[1], p[0], p[3], p[2]], 1),
    "reversed": (lambda p, q, f: [p[3], p[2], p[1], p[0]], 1),
    "as many, one twice": (lambda p, q, f: [p[0], p[1], p[1], p[3]], 1),
    "two tensors": (lambda p, q, f: [p[0], p[1], p[2], p[3], q[0], q[1], q[2], q[3]], 1),
    "the last is the next of another": (lambda p, q, f: [p[0], p[1], p[2], q[3]], 1),
    "a foreign one between": (lambda p, q, f: [p[0], p[1], f(), p[2], p[3]], 1),
    "a foreign one at the end": (lambda p, q, f: [p[0], p[1], p[2], p[3], f()], 1),
}


def sweep(rank: int) -> list[Any]:
    found = []
    for axis, taken, join in itertools.product(range(rank), ("split", "unbind"), JOINS):
        piece_rank = rank - (taken == "unbind")
        found += [(rank, axis, taken, join, dim) for dim in range(piece_rank + (join == "stack"))]
    return found


@pytest.mark.parametrize(
    ("rank", "axis", "taken", "join", "dim"),
    [
        *sweep(1),
        *sweep(2),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (*sweep(3), *sweep(4))),
        (3, 0, "unbind", "stack", 2),
        (4, 0, "unbind", "cat", 2),
        (3, 0, "split", "stack", 3),
        (3, 2, "split", "cat", 0),
    ],
)
def test_every_axis_and_dimension(rank, axis, taken, join, dim):
    shape = [2, 3, 2, 3][:rank]
    shape[axis] = 8 if taken == "split" else 4

    def one(pick: Pick, x: Any, y: Any) -> Any:
        cut = (lambda t: torch.split(t, 2, axis)) if taken == "split" else (lambda t: torch.unbind(t, axis))

        def foreign() -> Any:
            item = cut(x.sin())[0]
            return item if join == "stack" else item.repeat_interleave(3, dim)  # of another size along the join

        return flat(getattr(torch, join)(pick(cut(x), cut(y), foreign), dim))

    def fn(x: Any, y: Any) -> Any:
        return [one(pick, x, y) for pick, _ in PICKS.values()]

    def make_inputs() -> list[Any]:
        dense, wide = torch.randn(shape), torch.randn([*shape, 2]).movedim(-1, 0)[1]
        return [dense.requires_grad_(), wide.requires_grad_()]

    before = captured(fn, make_inputs(), "modules")
    after, _ = cancelled(before)
    assert_same(before, after, make_inputs)
    assert len(joins_in(after)) == sum(left for _, left in PICKS.values())


# --- aliasing, writes, modes ------------------------------------------------------------------------------------------


def rejoined(x: Any, dim: int = 1) -> Any:
    p = torch.split(x, [1, 2, 1], dim)
    return torch.cat([p[0], p[1], p[2]], dim)


def rows() -> list[Any]:
    return [torch.rand(4, 4)]


def leaf() -> list[Any]:
    return [torch.rand(4, 4).requires_grad_()]


def after_a_write(x: Any) -> Any:
    y = x * 2
    y.add_(1)
    return rejoined(y) * 3


def before_a_write(x: Any) -> Any:
    joined = rejoined(x)
    x.add_(1)
    return joined * 3


def write_between(x: Any) -> Any:
    y = x * 2
    p = torch.split(y, [1, 2, 1], 1)
    y.add_(1)
    return torch.cat([p[0], p[1], p[2]], 1) * 3


def result_written(x: Any) -> Any:
    joined = rejoined(x)
    joined.add_(1)
    return joined, x * 2


def under_no_grad(x: Any) -> Any:
    with torch.no_grad():
        p = torch.split(x, 2)
        q = (p[0], p[1])
    return torch.cat([q[0], q[1]]) * x


def joined_under_no_grad(x: Any) -> Any:
    p = torch.split(x, 2)
    with torch.no_grad():
        joined = torch.cat([p[0], p[1]])
    return joined * 2


def returned_twice(x: Any) -> Any:
    return rejoined(x), rejoined(x)


@pytest.mark.parametrize(
    "fn",
    [after_a_write, before_a_write, write_between, result_written, rejoined, returned_twice],
    ids=lambda fn: fn.__name__,
)
def test_memory_and_writes_are_eagers(fn):
    assert_cancelled(fn, rows)


@pytest.mark.parametrize("fn", [under_no_grad, joined_under_no_grad], ids=lambda fn: fn.__name__)
def test_gradients_switched_off_between_stay_off(fn):
    assert joins_in(captured(fn, leaf())) == assert_cancelled(fn, leaf) == ["cat"]


def test_a_result_is_memory_of_its_own():
    assert assert_cancelled(rejoined, leaf) == []
    graph, rewrites = cancelled(captured(rejoined, rows()))
    assert rewrites == {"cat_to_copy_pass": 1}
    (x,) = rows()
    (out,) = graph.gm(x)
    out.add_(1)
    assert torch.equal(out, x + 1)


def test_the_one_item_of_a_split_is_another_tensor_on_the_same_memory():
    graph, rewrites = cancelled(captured(lambda x: torch.split(x, 4, 1)[0], rows()))
    assert rewrites == {"remove_split_with_size_one_pass": 1}
    (x,) = rows()
    (out,) = graph.gm(x)
    assert out is not x
    assert out.data_ptr() == x.data_ptr()


# --- conditions that are easily forgotten -----------------------------------------------------------------------------


def test_split_and_joined_along_different_dimensions():
    assert assert_cancelled(lambda x: torch.cat(torch.split(x, 2, 0), 1) * 2, lambda: [torch.rand(4, 4)]) == []


def test_an_operand_of_another_size_along_the_join():
    def fn(x: Any, y: Any) -> Any:
        p = torch.split(x, 1, 0)
        return torch.cat([p[0], y, p[1], p[2]], 1) * 2

    assert assert_cancelled(fn, lambda: [torch.rand(3, 2), torch.rand(1, 7)]) == ["cat"]


def test_items_of_another_kind_keep_their_place():
    def fn(x: Any) -> Any:
        p = torch.split(x, 1, 1)
        return torch.cat([p[0], p[1], torch.max(x, 1, True)[0], p[2], p[3]], 1) * 2

    assert assert_cancelled(fn, rows) == ["cat"]


def test_sections_of_nothing_stay_sections():
    def fn(x: Any) -> Any:
        p = torch.split(x, [1, 0, 2, 0, 1], 1)
        return torch.cat([p[0], p[1]], 1) * 2, p[2] * 3, torch.cat([p[3], p[4]], 1) * 4, p[1].sum()

    assert assert_cancelled(fn, rows) == []


def test_sections_of_nothing_that_are_read_beside():
    def fn(x: Any) -> Any:
        p = torch.split(x, [1, 0, 2, 1], 1)
        return torch.cat([p[0], p[2]], 1) * 2, p[1] * 3, p[3] * 4

    assert_cancelled(fn, rows)


def test_other_dtypes_in_a_join():
    def fn(x: Any, y: Any) -> Any:
        p = torch.split(x, 1, 1)
        return torch.cat([y, p[0], p[1], p[2], p[3]], 1) * 2

    assert assert_cancelled(fn, lambda: [torch.rand(2, 4).half(), torch.rand(2, 4)]) == ["cat"]


def test_old_empty_operands_go_only_where_nobody_can_tell():
    def fn(x: Any, empty: Any) -> Any:
        p = torch.split(x, 1, 1)
        return torch.cat([empty, p[0], p[1]], 1) * 2

    x = [torch.rand(2, 4)]
    assert assert_cancelled(fn, lambda: [x[0].clone(), torch.empty(0)]) == []
    assert assert_cancelled(fn, lambda: [x[0].clone(), torch.empty(0, dtype=torch.float64)]) == ["cat"]
    assert assert_cancelled(fn, lambda: [x[0].clone().requires_grad_(), torch.empty(0).requires_grad_()]) == ["cat"]


def test_widths_that_differ_are_not_stacked_as_one():
    def fn(x: Any) -> Any:
        p = torch.split(x, [2, 1, 1], 0)
        return torch.stack([p[0].sum(0), p[1].sum(0), p[2].sum(0)]) * 2

    assert assert_cancelled(fn, rows) == ["stack"]


def test_a_layout_that_somebody_reads():
    assert_cancelled(lambda x: torch.stack(torch.unbind(x, 1), 0) + 1, rows)
    assert_cancelled(lambda x: torch.stack(torch.unbind(x, 1), 0).view(-1) * 2, rows)
    assert_cancelled(lambda x: torch.as_strided(rejoined(x), (2, 2), (1, 2)) * 2, rows)


ONES: dict[str, tuple[Any, tuple[int, ...]]] = {
    "slices of one": (lambda x: torch.stack(x.split(1, 0), 1) * 2, (4, 3)),
    "items": (lambda x: torch.stack(x.unbind(0), 1) - 1, (4, 1, 3)),
    "items behind": (lambda x: torch.stack(x.unbind(1), 0) < 0.5, (1, 4, 3, 1)),
    "joined": (lambda x: torch.cat(x.split(1, 1), 0) / 2, (1, 4, 1)),
    "a view between": (lambda x: torch.stack(x.split(1, 0), 1).unsqueeze(0) * 2, (4, 3)),
    "copied by the call": (lambda x: torch.stack(x.unbind(0), 2).cos() @ torch.ones(4, 2), (4, 1, 3)),
    "of strides of its own": (lambda x: torch.cat(x.as_strided((4, 1), (1, 7)).split(2, 0)) * 2, (4, 1)),
}


@pytest.mark.parametrize("name", ONES)
def test_strides_along_dimensions_of_one_are_eagers(name):
    """Real tensors lay out results by them where fake ones do not, so that metadata cannot tell."""
    fn, shape = ONES[name]
    assert_cancelled(fn, lambda: [torch.rand(shape)])
    inputs = [torch.rand(shape)]
    gm = captured(fn, inputs).gm
    expected = fn(*inputs)
    (found,) = pre_grad.pre_grad_passes(gm, inputs)(*inputs)
    assert found.stride() == expected.stride()


def test_slices_of_one_are_still_a_view():
    assert assert_cancelled(lambda x: torch.stack(x.split(1, 0), 1) * 2, rows) == []


def test_every_way_to_split():
    ways: Sequence[Callable[[Any], Any]] = (
        lambda x: torch.chunk(x, 2, -1),
        lambda x: torch.tensor_split(x, 2, 1),
        lambda x: torch.tensor_split(x, (1, 3), dim=1),
        lambda x: torch.hsplit(x, 2),
        lambda x: x.split(3, dim=1),
        lambda x: (x[:, :1], x[:, 1:3], x[..., 3:]),
        lambda x: (x.narrow(1, 0, 2), x.narrow(-1, 2, 2)),
    )
    for way in ways:
        assert assert_cancelled(lambda x, way=way: torch.cat(list(way(x)), -1) * 2, rows) == []


def test_a_short_last_chunk():
    assert assert_cancelled(lambda x: torch.cat(torch.chunk(x, 4, 0)) * 2, lambda: [torch.rand(5, 2)]) == []
    assert assert_cancelled(lambda x: torch.cat(torch.chunk(x, 5, 0)) * 2, lambda: [torch.rand(6, 2)]) == []


def test_values_that_are_missing_stop_nothing_half_way():
    graph = captured(lambda x: torch.cat([x.sin(), *torch.split(x, 1, 1)], 1) * 2, rows())
    pieces = [node for node in graph.gm.graph.nodes if "getitem" in node.name]
    for piece in pieces[1:3]:
        piece.meta.pop("val")
        piece.meta.pop("example_value", None)
    text = str(graph.gm.graph)
    for step in FAMILY.passes:
        step.function(graph.gm, PassContext(Options()))
    assert str(graph.gm.graph) == text


# --- symbols ----------------------------------------------------------------------------------------------------------


def symbolic(fn: Any, make_inputs: Callable[[], list[Any]]) -> dict[str, int]:
    before = captured(fn, make_inputs(), symbolic=True)
    guards = count_guards(before.gm.graph)
    after, rewrites = cancelled(before)
    assert count_guards(after.gm.graph) == guards
    assert_same(before, after, make_inputs)
    return rewrites


def test_sizes_that_are_symbols_elsewhere_are_no_obstacle():
    batch = lambda: [torch.rand(5, 4).requires_grad_()]  # noqa: E731
    assert symbolic(lambda x: torch.cat(torch.split(x, [1, 2, 1], 1), 1) * 2, batch)
    assert symbolic(lambda x: flat(torch.stack(torch.split(x, [1, 1, 1, 1], 1), 0)), batch)
    assert symbolic(lambda x: flat(torch.cat(torch.split(x, [1, 1, 1, 1], 1), 0)), batch)
    assert symbolic(lambda x: flat(torch.stack(torch.unbind(x[:, :4], 1), 0)), batch)


def test_sections_that_are_symbols_are_left():
    def fn(x: Any) -> Any:
        half = x.shape[0] // 2
        p = torch.split(x, [half, x.shape[0] - half])
        return torch.cat([p[0], p[1]]) * 2

    assert symbolic(fn, lambda: [torch.rand(6, 3)]) == {}


# --- options and names ------------------------------------------------------------------------------------------------


def test_the_family_can_be_off():
    assert assert_cancelled(lambda x: rejoined(x) * 2, rows, split_cat=False) == ["cat"]


def test_runs_may_be_too_short():
    def fn(x: Any) -> Any:
        p = torch.split(x, 1, 1)
        return torch.cat([p[1], p[2]], 1) * 2

    assert assert_cancelled(fn, rows) == []
    assert assert_cancelled(fn, rows, split_cat_min_run=3) == ["cat"]
    assert assert_cancelled(lambda x: rejoined(x) * 2, rows, split_cat_min_run=9) == [], (
        "all of a tensor is never too short"
    )


def test_passes_by_name_with_settings_of_their_own():
    def fn(x: Any) -> Any:
        p = torch.split(x, 1, 1)
        return torch.cat([p[1], p[2]], 1) * 2, torch.stack(torch.unbind(x, 0), 1).sum(0)

    def left(chosen: Any, **options: Any) -> list[str]:
        return assert_cancelled(fn, rows, split_cat=chosen, **options)

    assert left(True) == left("on") == []
    assert left(False) == left("off") == left({}) == ["cat", "stack"]
    assert left(["mutate_cat_pass"]) == left({"mutate_cat_pass": {"min_run": 2}}) == ["stack"]
    assert left({"mutate_cat_pass": {"min_run": 3}, "unbind_stack_pass": {}}) == ["cat"]
    assert left({"mutate_cat_pass": {}}, split_cat_min_run=3) == ["cat", "stack"]
    assert left({"mutate_cat_pass": {"min_run": 2}}, split_cat_min_run=3) == ["stack"]
    assert left({"mutate_cat_pass": {}}, pre_grad_level="aten") == ["stack"]


@pytest.mark.quick
@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"mutate_cat_passes": {}}, "did you mean *mutate_cat_pass"),
        ({"mutate_cat_pass": {"max_run": 3}}, "did you mean *min_run"),
        ({"mutate_cat_pass": {"min_run": 1}}, "a whole number from 2"),
        ("of", "did you mean *off"),
        (3, "expected"),
    ],
)
def test_wrong_names_and_settings_say_what_is_possible(chosen, message):
    with pytest.raises(UserError, match=message):
        checked_options(Options(split_cat=chosen))


@pytest.mark.quick
def test_the_first_rule_of_a_part_has_its_name():
    assert len(PARTS) == 20
    for name, rules in PARTS.items():
        assert rules[0].name == name
        assert getattr(pre_grad, name).rules == rules


@pytest.mark.quick
def test_the_environment_may_say_it_in_every_way():
    for text, expected in {"1": "on", "on": "on", "off": "off", "false": "off"}.items():
        assert resolve(environ={"FERRITE_SPLIT_CAT": text}).split_cat == expected
    named = resolve(environ={"FERRITE_SPLIT_CAT": "mutate_cat_pass:min_run=3,split_cat_pass"}).split_cat
    assert named == (Choice("mutate_cat_pass", (("min_run", 3),)), Choice("split_cat_pass"))
    assert resolve(environ={"FERRITE_HORIZONTAL": "off"}).horizontal == "off"


def test_one_pass_alone():
    gm = torch.fx.symbolic_trace(lambda x: rejoined(x) * 2)
    pre_grad.mutate_cat_pass(gm, rows())
    assert "cat" not in gm.code


REFERENCE = """
normalization_pass remove_split_with_size_one_pass merge_splits_pass merge_getitem_cat_pass mutate_cat_pass
split_cat_pass unbind_stack_pass split_cat_to_slices_pass unbind_cat_to_view_pass split_stack_to_cats_pass
unbind_stack_to_slices_pass move_reshape_out_of_split_stack_pass merge_stack_tahn_unbind_pass einsum_to_pointwise_pass
stack_to_unsqueeze_pass merge_concats_pass fuse_chunk_reshape_concat_pass fuse_chunk_reshape_unsqueeze_concat_pass
fuse_chunk_squeeze_cat_pass fuse_split_getitem_squeeze_cat normalization_pass_aten merge_splits_pass_aten
split_cat_pass_aten unbind_stack_pass_aten merge_getitem_cat_pass_aten merge_stack_tahn_unbind_pass_aten
mutate_cat_pass_aten remove_split_with_size_one_pass_aten
"""


@pytest.mark.quick
@pytest.mark.parametrize("name", REFERENCE.split())
def test_every_name_is_a_pass_that_runs_alone_and_can_be_left_out(name):
    gm = torch.fx.symbolic_trace(lambda x: x * 2)
    getattr(pre_grad, name)(gm, rows())
    assert checked_options(Options(skip=(name,))).skip == (name.removesuffix("_aten"),)
    assert len(checked_options(Options(extra=(name,))).extra) == 1


@pytest.mark.quick
def test_names_without_a_pass_are_no_attributes():
    for name in ("mutate_cats_pass", "remove_noop_pass_aten"):
        with pytest.raises(AttributeError, match=name):
            getattr(pre_grad, name)


def test_one_part_can_be_left_out():
    before = captured(lambda x: rejoined(x) * 2, rows())
    assert cancelled(before)[1] == cancelled(before, pre_grad_level="aten")[1] == {"mutate_cat_pass": 1}
    assert cancelled(before, skip=("mutate_cat_pass",))[1] == {"split_cat_pass": 1}
    assert cancelled(before, skip=("mutate_cat_pass", "split_cat_pass"))[1] == {"split_cat_to_slices_pass": 1}


@pytest.mark.quick
def test_a_covered_part_runs_where_both_are_chosen_by_name():
    """By name each has settings of its own: a shorter run than the other is content with."""
    for covered, other in COVERED_BY.items():
        assert list(PARTS).index(other) < list(PARTS).index(covered)

    def fn(x: Any) -> Any:
        p = torch.split(x, 1, 1)
        return flat(torch.stack([p[1], p[2]]))

    chosen = {"split_cat_pass": {"min_run": 3}, "split_stack_to_cats_pass": {"min_run": 2}}
    assert cancelled(captured(fn, rows()), split_cat=chosen)[1] == {"split_stack_to_cats_pass": 1}


def test_the_stage_twice_is_the_stage_once():
    def fn(x: Any, y: Any) -> Any:
        p, q = torch.split(x, 1, 1), torch.unbind(y, 0)
        return (
            torch.cat([p[0], p[1], x.sin(), p[2], p[3]], 1),
            flat(torch.stack([q[0], q[1], q[2], q[3]], 1)),
            torch.stack([x, y, x.cos()], 1),
            rejoined(x),
        )

    inputs = [torch.rand(4, 4), torch.rand(4, 4)]
    gm = torch.fx.symbolic_trace(fn)
    expected = gm(*inputs)
    once = pre_grad.pre_grad_passes(gm, inputs).code
    assert once.count("torch.stack(") == 1, "stacks that nothing came of are stacks again"
    for mine, theirs in zip(gm(*inputs), expected, strict=True):
        assert torch.equal(mine, theirs)
        assert mine.stride() == theirs.stride()
    assert pre_grad.pre_grad_passes(gm, inputs).code == once
