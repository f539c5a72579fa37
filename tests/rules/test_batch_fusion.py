"""Batch fusions: each on its examples and near misses, then what all of them must keep.

After a fusion the graph computes the same: values, dtype, shape, strides, what inputs and outputs share; its nodes
stand in a valid order and have true metadata; no guard was added; a second run changes nothing.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.errors import FerriteWarning, UserError
from ferrite.graph.verify import Snapshot, count_guards, verify_graph
from ferrite.options import Options
from ferrite.passes.post_grad.batch_fusion import BY_NAME, RULES
from ferrite.passes.post_grad.opt_in_rules import group_batch_fusion_passes
from ferrite.pipeline import Fuel, PassContext, PassFailure, Pipeline, run_pipeline
from ferrite.rewrite import why
from tests.graphs import assert_metadata_is_true, assert_same_computation, operators

aten = torch.ops.aten
UNARY = ("tanh", "sigmoid", "relu")
BINARY = ("add", "sub", "mul", "div")


def context(fusions: Any, fuel: int | None = None, strict: bool = True) -> PassContext:
    return PassContext(Options(strict=strict, post_grad_fusions=fusions), fuel=Fuel(fuel))


def fuse(gm: torch.fx.GraphModule, *names: str, fuel: int | None = None, **settings: Any) -> dict[str, int]:
    own = context(dict.fromkeys(names, settings), fuel)
    total = group_batch_fusion_passes.function(gm, own)
    assert total == sum(own.rewrites.values())
    return dict(own.rewrites)


def trace(function: Any, inputs: list[torch.Tensor], mode: str = "fake") -> torch.fx.GraphModule:
    return make_fx(function, tracing_mode=mode)(*inputs)


def assert_same(
    before: torch.fx.GraphModule, after: torch.fx.GraphModule, inputs: list[Any], exact: bool = True
) -> None:
    assert_same_computation(before, after, lambda: [x.clone() for x in inputs], exact=exact)


def assert_fused(function: Any, inputs: list[Any], names: Any, count: int, mode: str = "fake", **settings: Any) -> Any:
    """The whole procedure: trace, fuse, compare, fuse again."""
    names = [names] if isinstance(names, str) else names
    before = trace(function, inputs, mode)
    after = copy.deepcopy(before)
    snapshot, guards = Snapshot.of(after), count_guards(after.graph)
    text = str(after.graph)
    assert sum(fuse(after, *names, **settings).values()) == count
    assert (str(after.graph) == text) == (count == 0)
    verify_graph(after, snapshot)
    assert count_guards(after.graph) == guards
    assert_metadata_is_true(after)
    assert_same(before, after, inputs, exact=all(BY_NAME[name].numerics == "exact" for name in names))
    assert fuse(after, *names, **settings) == {}, "a second run changes something"
    return after


def operator(name: str) -> Any:
    return getattr(aten, name).Tensor if name in BINARY else getattr(aten, name).default


def several(name: str, **kwargs: Any) -> Any:
    """A function of as many members as inputs; nothing of it is returned as it is."""
    takes = 2 if name in BINARY else 1
    return lambda *xs: [operator(name)(*xs[i : i + takes], **kwargs).neg() for i in range(0, len(xs), takes)]


def numbers(name: str, members: int, *shape: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [(torch.rand(shape or (2, 3)) * 9 + 1).to(dtype) for _ in range(members * (2 if name in BINARY else 1))]


# --- every fusion -----------------------------------------------------------------------------------------------------


def example(name: str, case: Any, mode: str) -> Any:
    return pytest.param(name, case, mode, id=f"{name}: {case.label}, {mode}")


EXAMPLES = [example(fusion.name, case, "fake") for fusion in RULES for case in fusion.examples]
SYMBOLIC = [example(fusion.name, fusion.examples[0], "symbolic") for fusion in RULES]


@pytest.mark.parametrize(("name", "case", "mode"), EXAMPLES + SYMBOLIC)
def test_an_example_is_fused_and_computes_the_same(name, case, mode):
    torch.manual_seed(0)
    count = 0 if mode == "symbolic" and name == "batch_linear_post_grad" else 1
    assert_fused(case.function, case.make_inputs(), name, count, mode)


@pytest.mark.parametrize("name", UNARY + BINARY)
@pytest.mark.parametrize(("members", "fires"), [(4, False), (5, True), (6, True)])
def test_five_members_or_more(name, members, fires):
    gm = assert_fused(several(name), numbers(name, members), f"batch_aten_{name}", int(fires))
    assert operators(gm).count(str(operator(name)).removeprefix("aten.")) == (1 if fires else members)
    assert operators(gm).count("select.int") == (members if fires else 0)


@pytest.mark.parametrize("name", UNARY + BINARY)
def test_dtypes_are_not_mixed(name):
    inputs = numbers(name, 5, dtype=torch.float32) + numbers(name, 4, dtype=torch.float64)
    gm = assert_fused(several(name), inputs, f"batch_aten_{name}", 1)
    assert operators(gm).count(str(operator(name)).removeprefix("aten.")) == 1 + 4
    gm = assert_fused(several(name), numbers(name, 5) + numbers(name, 5, dtype=torch.bfloat16), f"batch_aten_{name}", 2)
    assert_fused(several(name), numbers(name, 3) + numbers(name, 3, dtype=torch.bfloat16), f"batch_aten_{name}", 0)


@pytest.mark.parametrize("name", BINARY)
def test_operands_of_two_dtypes_promote_as_they_did(name):
    inputs = [x.to(torch.int32 if i % 2 else torch.float32) for i, x in enumerate(numbers(name, 5))]
    assert_fused(several(name), inputs, f"batch_aten_{name}", 1)
    swapped = [x.to(torch.float32 if i % 2 else torch.int32) for i, x in enumerate(numbers(name, 3))]
    assert_fused(several(name), [*inputs[:6], *swapped], f"batch_aten_{name}", 0)


@pytest.mark.parametrize("name", ["add", "sub"])
def test_a_factor_reaches_the_fused_call(name):
    gm = assert_fused(several(name, alpha=3), numbers(name, 6), f"batch_aten_{name}", 1)
    (call,) = [node for node in gm.graph.nodes if node.target is operator(name)]
    assert call.kwargs == {"alpha": 3}


@pytest.mark.parametrize("name", ["add", "sub"])
def test_calls_with_different_factors_are_different(name):
    def function(*xs):
        factors = [3, 3, 3, 1, 1, 1]
        pairs = zip(xs[::2], xs[1::2], factors, strict=True)
        return [operator(name)(a, b, alpha=factor).neg() for a, b, factor in pairs]

    assert_fused(function, numbers(name, 6), f"batch_aten_{name}", 0)
    gm = assert_fused(function, numbers(name, 6), f"batch_aten_{name}", 2, min_members=3)
    assert sorted(n.kwargs.get("alpha", 1) for n in gm.graph.nodes if n.target is operator(name)) == [1, 3]


def test_rounding_reaches_the_fused_call_and_is_not_mixed():
    def function(*xs):
        modes = [None, "floor", "trunc"] * 5
        pairs = zip(xs[::2], xs[1::2], modes, strict=True)
        return [aten.div.Tensor_mode(a, b, rounding_mode=mode).neg() for a, b, mode in pairs]

    gm = assert_fused(function, numbers("div", 15), "batch_aten_div", 3)
    assert [n.kwargs["rounding_mode"] for n in gm.graph.nodes if n.target is aten.div.Tensor_mode] != ["floor"] * 3


@pytest.mark.parametrize("name", BINARY)
def test_numbers_and_broadcasts_are_no_members(name):
    assert_fused(lambda *xs: [operator(name)(x, 2).neg() for x in xs], numbers("tanh", 6), f"batch_aten_{name}", 0)
    assert_fused(
        lambda *xs: [operator(name)(x, xs[0][0]).neg() for x in xs], numbers("tanh", 6), f"batch_aten_{name}", 0
    )


@pytest.mark.parametrize("name", UNARY)
def test_shapes_are_not_mixed(name):
    assert_fused(several(name), numbers(name, 3, 2, 3) + numbers(name, 3, 3, 2), f"batch_aten_{name}", 0)


@pytest.mark.quick
def test_devices_are_not_mixed():
    inputs = [torch.rand(2, 3, device="meta" if i % 2 else "cpu") for i in range(8)]
    gm = trace(several("tanh"), inputs)
    assert fuse(gm, "batch_aten_tanh") == {}
    assert fuse(gm, "batch_aten_tanh", min_members=4) == {"batch_aten_tanh": 2}
    verify_graph(gm, deep=True)


def test_strides_stay():
    assert_fused(lambda *xs: [x.t().tanh().neg() for x in xs], numbers("tanh", 6), "batch_aten_tanh", 0)
    assert_fused(lambda *xs: [x[:, :2].tanh().neg() for x in xs], numbers("tanh", 6), "batch_aten_tanh", 1)


# --- why not ----------------------------------------------------------------------------------------------------------


def reasons(function: Any, inputs: list[Any], name: str, **settings: Any) -> list[str]:
    gm = trace(function, inputs)
    text = str(gm.graph)
    found = why(gm, BY_NAME[name], Options(post_grad_fusions={name: settings}))
    assert str(gm.graph) == text, "asking changed the graph"
    assert [miss.node for miss in found] == [n.name for n in gm.graph.nodes if n.target in BY_NAME[name].targets]
    return [miss.reason for miss in found]


@pytest.mark.quick
def test_a_refused_call_has_a_reason():
    with_numbers = lambda *xs: [aten.add.Tensor(x, 2).neg() for x in xs]  # noqa: E731
    assert set(reasons(with_numbers, numbers("tanh", 5), "batch_aten_add")) == {
        "an operand is no tensor, or has no metadata"
    }
    returned = reasons(lambda *xs: [x.tanh() for x in xs], numbers("tanh", 5), "batch_aten_tanh")
    assert all("the caller gets it" in reason for reason in returned)
    strided = lambda *xs: [aten.as_strided.default(x.tanh(), [2], [1]).neg() for x in xs]  # noqa: E731
    assert set(reasons(strided, numbers("tanh", 5), "batch_aten_tanh")) == {"its memory is read as it lies"}


@pytest.mark.quick
def test_where_it_fires_there_is_no_reason():
    assert reasons(several("tanh"), numbers("tanh", 5), "batch_aten_tanh") == [""] * 5
    assert reasons(several("tanh"), numbers("tanh", 3), "batch_aten_tanh", min_members=3) == [""] * 3


@pytest.mark.parametrize(
    ("more", "differ_in"),
    [
        ([torch.rand(2, 3, dtype=torch.float64)] * 4, "dtypes"),
        ([torch.rand(3, 2)] * 4, "shapes"),
        ([torch.rand(2, 3, device="meta")] * 4, "device"),
    ],
    ids=["dtypes", "shapes", "device"],
)
def test_too_few_are_told_what_others_differ_in(more, differ_in):
    found = reasons(several("tanh"), numbers("tanh", 3) + more, "batch_aten_tanh")
    assert found[:3] == [f"3 calls look like it, 5 are wanted; 4 others differ in {differ_in}"] * 3
    assert found[3:] == [f"4 calls look like it, 5 are wanted; 3 others differ in {differ_in}"] * 4
    assert reasons(several("tanh"), numbers("tanh", 1), "batch_aten_tanh") == ["1 calls look like it, 5 are wanted"]


def test_members_that_stay_out_are_told_why():
    found = reasons(chained, numbers("tanh", 5), "batch_aten_tanh")
    assert set(found) == {
        "of those near it only 4 do not depend on each other, 5 are wanted",
        "of those near it only 1 do not depend on each other, 5 are wanted",
    }
    deep = lambda *xs: torch.cat([x.tanh().neg().neg().neg().neg().neg() for x in xs])  # noqa: E731
    found = reasons(deep, numbers("tanh", 5), "batch_aten_tanh")
    assert set(found) == {"no 5 like it are read within 5 steps of one node"}
    many = lambda *xs: torch.cat([x.tanh().neg() for x in xs])  # noqa: E731
    found = reasons(many, numbers("tanh", 10), "batch_aten_tanh", max_members=6)
    assert found == [""] * 6 + ["4 calls look like it, 5 are wanted"] * 4
    found = reasons(many, numbers("tanh", 6), "batch_aten_tanh", max_members=3)
    assert set(found) == {"at most 3 may be fused, of these 3; 5 are wanted"}
    transposed = reasons(lambda *xs: [x.t().tanh().neg() for x in xs], numbers("tanh", 6), "batch_aten_tanh")
    assert all("the strides would be" in reason for reason in transposed)


@pytest.mark.quick
def test_random_draws_between_members_are_the_reason():
    def function(*xs):
        return torch.cat([torch.bernoulli(x.neg().tanh().abs()) for x in xs])

    found = reasons(function, numbers("tanh", 6), "batch_aten_tanh")
    assert set(found) == {"a write, a random draw or the like stands between it and the others"}


@pytest.mark.quick
def test_memory_that_is_read_as_it_lies_is_not_moved():
    """What the fusion makes lies somewhere in a larger storage."""

    def function(*xs):
        ys = [x.tanh() for x in xs]
        return torch.cat([aten.as_strided.default(y.t() if i else y, [2], [1], 0).neg() for i, y in enumerate(ys)])

    assert_fused(function, numbers("tanh", 6), "batch_aten_tanh", 0)


# --- products ---------------------------------------------------------------------------------------------------------


def products(count: int, dtype: torch.dtype = torch.float32, m: int = 2, k: int = 3, n: int = 4) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(size, dtype=dtype) for size in [(m, k), (k, n)] * count]


def mms(*xs):
    return [torch.mm(a, b).neg() for a, b in zip(xs[::2], xs[1::2], strict=True)]


@pytest.mark.parametrize(("members", "fires"), [(4, False), (5, True), (6, True)])
def test_products_become_one(members, fires):
    gm = assert_fused(mms, products(members), "batch_linear_post_grad", int(fires))
    assert operators(gm).count("bmm.default") == int(fires)
    assert operators(gm).count("mm.default") == (0 if fires else members)


def test_products_of_two_dtypes_or_sizes_are_apart():
    assert_fused(mms, products(3) + products(3, torch.float64), "batch_linear_post_grad", 0)
    assert_fused(mms, products(3) + products(3, k=5), "batch_linear_post_grad", 0)
    assert_fused(mms, products(5) + products(5, torch.float64), "batch_linear_post_grad", 2)


@pytest.mark.quick
def test_products_of_integers_stay():
    assert_fused(mms, [(x * 9).to(torch.int64) for x in products(5)], "batch_linear_post_grad", 0)


@pytest.mark.parametrize("spread", [False, True])
def test_biases_may_have_any_shape_that_spreads(spread):
    shapes = [(4,), (1,), (2, 1), (2, 4), ()]
    inputs = products(5) + [torch.rand(shape) for shape in shapes]

    def function(*xs):
        return [torch.addmm(b, x, w).neg() for x, w, b in zip(xs[:10:2], xs[1:10:2], xs[10:], strict=True)]

    gm = assert_fused(function, inputs, "batch_linear_post_grad", 1, broadcast_bias=spread)
    assert operators(gm).count("expand.default") == (5 if spread else 0)
    assert operators(gm).count("add.Tensor") == 5


def test_with_and_without_bias_and_scaled_are_apart():
    def mixed(*xs):
        pairs = list(zip(xs[:12:2], xs[1:12:2], strict=True))
        return [torch.mm(a, b).neg() if i % 2 else torch.addmm(xs[12], a, b).neg() for i, (a, b) in enumerate(pairs)]

    def scaled(*xs):
        pairs = zip(xs[:12:2], xs[1:12:2], strict=True)
        return [torch.addmm(xs[12], a, b, alpha=2, beta=3).neg() for a, b in pairs]

    inputs = [*products(6), torch.rand(4)]
    assert_fused(mixed, inputs, "batch_linear_post_grad", 0)
    assert_fused(scaled, inputs, "batch_linear_post_grad", 0)


# --- what the caller gets ---------------------------------------------------------------------------------------------


def test_results_do_not_come_to_share_memory():
    assert_fused(lambda *xs: [x.tanh() for x in xs], numbers("tanh", 6), "batch_aten_tanh", 0)
    assert_fused(lambda *xs: [x.tanh().view(3, 2) for x in xs], numbers("tanh", 6), "batch_aten_tanh", 0)
    assert_fused(mms_returned, products(6), "batch_linear_post_grad", 0)


def mms_returned(*xs):
    return [torch.mm(a, b) for a, b in zip(xs[::2], xs[1::2], strict=True)]


@pytest.mark.quick
def test_members_that_are_not_returned_fuse_beside_one_that_is():
    def function(*xs):
        ys = [x.tanh() for x in xs]
        return [ys[0], ys[1].view(3, 2), *(y.neg() for y in ys)]

    assert_fused(function, numbers("tanh", 6), "batch_aten_tanh", 0)
    gm = assert_fused(function, numbers("tanh", 7), "batch_aten_tanh", 1)
    assert operators(gm).count("tanh.default") == 3


# --- order and dependence ---------------------------------------------------------------------------------------------


def chained(*xs):
    """The third member depends on the first, through other calls."""
    ys = [xs[0].tanh(), xs[1].tanh()]
    ys.append((ys[0].neg() + xs[2]).tanh())
    ys += [x.tanh() for x in xs[3:]]
    return torch.cat([y.neg() for y in ys])


@pytest.mark.quick
def test_a_member_that_depends_on_another_is_left_out():
    gm = assert_fused(chained, numbers("tanh", 6), "batch_aten_tanh", 1)
    assert operators(gm).count("tanh.default") == 2
    assert_fused(chained, numbers("tanh", 5), "batch_aten_tanh", 0)


@pytest.mark.quick
def test_levels_of_a_tower_fuse_level_by_level():
    def towers(*xs):
        for _ in range(3):
            xs = [x.tanh().neg() for x in xs]
        return torch.cat(xs)

    gm = assert_fused(towers, numbers("tanh", 5), "batch_aten_tanh", 3)
    assert operators(gm).count("tanh.default") == 3


@pytest.mark.quick
def test_towers_of_different_heights_fuse_where_they_meet():
    def towers(*xs):
        return torch.cat([xs[0].tanh().neg().tanh(), *(x.tanh() for x in xs[1:])])

    gm = assert_fused(towers, numbers("tanh", 5), "batch_aten_tanh", 1)
    assert operators(gm).count("tanh.default") == 2


def test_fusions_that_would_depend_on_each_other_do_not_both_happen():
    """Half of the tanh feed half of the sigmoid and the other way round: one fusion makes the other impossible."""

    def crossed(*xs):
        first = [x.tanh().neg().sigmoid() for x in xs[:3]]
        second = [x.sigmoid().neg().tanh() for x in xs[3:]]
        return torch.cat([y.neg() for y in first + second])

    gm = assert_fused(crossed, numbers("tanh", 6), ["batch_aten_tanh", "batch_aten_sigmoid"], 1)
    assert operators(gm).count("tanh.default") == 1
    assert_fused(crossed, numbers("tanh", 6), ["batch_aten_tanh", "batch_aten_sigmoid"], 3, min_members=3)


def test_what_reads_a_member_early_moves_behind_the_fused_call():
    def interleaved(*xs):
        total = xs[0].neg()
        for x in xs:
            total = torch.cat([total, x.neg().tanh().abs()])
        return total

    assert_fused(interleaved, numbers("tanh", 6), "batch_aten_tanh", 0)
    gm = assert_fused(interleaved, numbers("tanh", 6), "batch_aten_tanh", 1, depth=9)
    assert operators(gm).index("tanh.default") < operators(gm).index("cat.default")
    side_by_side = lambda *xs: torch.cat([x.neg().tanh().abs() for x in xs])  # noqa: E731
    gm = assert_fused(side_by_side, numbers("tanh", 6), "batch_aten_tanh", 1)
    assert operators(gm).index("tanh.default") < operators(gm).index("abs.default")


@pytest.mark.quick
def test_random_draws_keep_their_order():
    def function(*xs):
        ys = []
        for x in xs:
            y = x.neg().tanh()
            ys += [torch.bernoulli(y.abs()), torch.rand(2, 3)]
        return torch.cat(ys)

    gm = trace(function, numbers("tanh", 6))
    draws = [node.name for node in gm.graph.nodes if "rand" in node.name or "bernoulli" in node.name]
    assert fuse(gm, "batch_aten_tanh") == {}
    assert [node.name for node in gm.graph.nodes if "rand" in node.name or "bernoulli" in node.name] == draws


@pytest.mark.quick
def test_nothing_is_read_across_a_write():
    def function(x, *xs):
        early = [y.tanh().neg() for y in (x, *xs[:2])]
        x.mul_(2)
        return torch.cat(early + [y.tanh().neg() for y in (x, *xs[2:])])

    inputs = numbers("tanh", 6)
    gm = trace(function, inputs)
    before = copy.deepcopy(gm)
    assert fuse(gm, "batch_aten_tanh") == {}
    assert_same(before, gm, inputs)
    assert fuse(gm, "batch_aten_tanh", min_members=3) == {"batch_aten_tanh": 2}
    assert_same(before, gm, inputs)


@pytest.mark.quick
def test_work_of_two_streams_is_apart():
    gm = trace(several("tanh"), numbers("tanh", 6))
    for number, node in enumerate(n for n in gm.graph.nodes if n.target is aten.tanh.default):
        node.meta["custom"] = {"stream": number % 2}
    assert fuse(gm, "batch_aten_tanh") == {}


@pytest.mark.quick
def test_tuple_items_are_no_starting_point_but_are_passed():
    def function(x):
        parts = torch.split(x, 1)
        return torch.cat([part.tanh().neg() for part in parts])

    assert_fused(function, [torch.rand(6, 3)], "batch_aten_tanh", 1)


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.quick
def test_nothing_happens_unless_asked_for():
    gm = trace(several("tanh"), numbers("tanh", 6))
    assert group_batch_fusion_passes.function(gm, PassContext(Options())) == 0


def test_at_most_so_many_members():
    gm = assert_fused(several("tanh"), numbers("tanh", 7), "batch_aten_tanh", 0, max_members=3)
    many = lambda *xs: torch.cat([x.tanh().neg() for x in xs])  # noqa: E731
    gm = assert_fused(many, numbers("tanh", 12), "batch_aten_tanh", 2, max_members=6)
    assert operators(gm).count("tanh.default") == 2
    gm = assert_fused(many, numbers("tanh", 10), "batch_aten_tanh", 1, max_members=6)
    assert operators(gm).count("tanh.default") == 1 + 4


def test_the_depth_of_the_search():
    def deep(*xs):
        return torch.cat([x.tanh().neg().neg().neg().neg().neg() for x in xs])

    assert_fused(deep, numbers("tanh", 5), "batch_aten_tanh", 0)
    assert_fused(deep, numbers("tanh", 5), "batch_aten_tanh", 1, depth=6)


def test_parents_and_users_can_be_asked_to_be_alike():
    def parents(*xs):
        return torch.cat([(x.neg() if i % 2 else x.abs()).tanh().exp() for i, x in enumerate(xs)])

    def users(*xs):
        return torch.cat([(x.tanh().neg() if i % 2 else x.tanh().abs()) for i, x in enumerate(xs)])

    for function, setting in ((parents, "same_parent"), (users, "same_users")):
        assert_fused(function, numbers("tanh", 6), "batch_aten_tanh", 1)
        assert_fused(function, numbers("tanh", 6), "batch_aten_tanh", 0, **{setting: True})
        assert_fused(function, numbers("tanh", 10), "batch_aten_tanh", 2, **{setting: True})


@pytest.mark.quick
def test_names_alone_ask_for_the_usual_settings():
    own = context(("batch_aten_tanh", "batch_aten_relu"))
    assert group_batch_fusion_passes.function(trace(several("tanh"), numbers("tanh", 6)), own) == 1


@pytest.mark.quick
def test_what_a_fusion_brings_near_is_fused_too():
    def function(*xs):
        return torch.cat([x.tanh().neg().neg().neg().sigmoid().neg().neg() for x in xs])

    gm = assert_fused(function, numbers("tanh", 5), ["batch_aten_tanh", "batch_aten_sigmoid"], 2)
    assert operators(gm).count("tanh.default") == operators(gm).count("sigmoid.default") == 1


def test_fusions_run_in_the_users_order():
    def function(*xs):
        return torch.cat([x.tanh().neg().sigmoid().neg() for x in xs])

    for names in (("batch_aten_tanh", "batch_aten_sigmoid"), ("batch_aten_sigmoid", "batch_aten_tanh")):
        gm = trace(function, numbers("tanh", 5))
        assert list(fuse(gm, *names)) == list(names)
        assert list(fuse(trace(function, numbers("tanh", 5)), *names, fuel=1)) == [names[0]]


@pytest.mark.parametrize("name", ["batch_aten_tahn", "batch_tanh", "no such thing"])
def test_an_unknown_name_is_the_users_error(name):
    gm = trace(several("tanh"), numbers("tanh", 6))
    with pytest.raises(UserError, match=f"unknown fusion {name!r}") as caught:
        fuse(gm, name)
    assert "batch_aten_tanh" in str(caught.value)
    if name != "no such thing":
        assert "did you mean    batch_aten_tanh" in str(caught.value)


@pytest.mark.parametrize("given", [{"min_member": 3}, {"min_members": "3"}, {"min_members": 0}, {"same_users": 1}])
def test_an_unknown_or_ill_typed_setting_is_the_users_error(given):
    with pytest.raises(UserError, match=next(iter(given))):
        fuse(trace(several("tanh"), numbers("tanh", 6)), "batch_aten_tanh", **given)


@pytest.mark.quick
def test_names_of_later_patterns_are_left_to_them():
    gm = trace(several("tanh"), numbers("tanh", 6))
    assert fuse(gm, "normalization_aten_pass") == {}


@pytest.mark.quick
def test_a_fusion_without_its_library_says_so():
    gm = trace(mms, products(6))
    with pytest.warns(FerriteWarning, match=r"'group_linear' does nothing: the library fbgemm_gpu is not installed"):
        assert fuse(gm, "group_linear") == {}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fuse(gm, "group_linear", external_lib=True) == {}
        assert fuse(gm, "batch_linear_post_grad", external_lib=True) == {}


# --- the pass in the pipeline -----------------------------------------------------------------------------------------


def test_as_a_pass_it_leaves_a_lawful_graph_and_says_where_nodes_came_from():
    def function(*xs):
        return [x.tanh().view(3, 2).neg() for x in xs]

    gm = trace(function, numbers("tanh", 6))
    for number, node in enumerate(gm.graph.nodes):
        node.meta["stack_trace"] = f'File "model.py", line {number}, in forward'
    members = [node.meta["stack_trace"] for node in gm.graph.nodes if node.target is aten.tanh.default]
    own = context({"batch_aten_tanh": {}})
    (record,) = run_pipeline(Pipeline("alone", (group_batch_fusion_passes,)), gm, own)
    assert record.rewrites == {"batch_aten_tanh": 1}
    verify_graph(gm, deep=True)
    selected = [node for node in gm.graph.nodes if node.target is aten.select.int]
    assert [node.meta["stack_trace"] for node in selected] == members
    assert all(node.meta["rewritten"][0] == "batch_aten_tanh" for node in selected)


@pytest.mark.quick
def test_in_the_pipeline_an_unknown_name_fails_the_pass():
    gm = trace(several("tanh"), numbers("tanh", 6))
    with pytest.raises(PassFailure) as caught:
        run_pipeline(Pipeline("alone", (group_batch_fusion_passes,)), gm, context({"nothing": {}}))
    assert isinstance(caught.value.__cause__, UserError)


def test_the_order_is_valid_whenever_somebody_looks():
    class Looking(Fuel):
        def spend(self):
            gm.graph.lint()
            verify_graph(gm)
            super().spend()

    def function(*xs):
        parts = []
        for group in range(0, 20, 5):
            parts.append(torch.cat([x.neg().tanh().abs() for x in xs[group : group + 5]]))
        return parts

    gm = trace(function, numbers("tanh", 20))
    own = context({"batch_aten_tanh": {"max_members": 5}})
    own.fuel = Looking(None)
    assert group_batch_fusion_passes.function(gm, own) == 4


def test_equal_symbols_fuse_and_unknown_ones_do_not():
    inputs = [torch.rand(4, 3) for _ in range(3)] + [torch.rand(5, 3) for _ in range(3)]
    assert_fused(several("tanh"), inputs, "batch_aten_tanh", 0, "symbolic")
    assert_fused(several("tanh"), inputs, "batch_aten_tanh", 2, "symbolic", min_members=3)


@pytest.mark.parametrize("shape", ["groups", "chain", "dense"])
def test_the_cost_is_near_linear(shape):
    def function(size, x):
        if shape == "groups":  # many small groups side by side
            return [torch.cat([(x + i + j).tanh().neg() for j in range(5)]) for i in range(size)]
        if shape == "chain":  # every member depends on the one before
            for _ in range(5 * size):
                x = x.tanh()
            return x.neg()
        for _ in range(size):  # every layer reads several before it
            x = torch.cat([x[:2].tanh().neg() for _ in range(5)])
        return x

    steps = []
    for size in (6, 12, 24):
        gm = trace(functools.partial(function, size), [torch.rand(2, 3)])
        own = context({"batch_aten_tanh": {}})
        group_batch_fusion_passes.function(gm, own)
        steps.append(own.steps / len(gm.graph.nodes))
    assert steps[-1] < 1.5 * steps[0] + 1
