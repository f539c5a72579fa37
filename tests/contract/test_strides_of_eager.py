"""Strides that torch's forecast has otherwise than eager: along dimensions of one, of nothing, and of unknown size."""

from __future__ import annotations

import pytest
import torch

import ferrite
from tests.cases import seldom
from tests.compare import assert_same_as_eager, compile_strict, reset


def made_from(x):
    """Results by every rule: iterations over one operand, over one and a number, and tensors like another."""
    return (
        torch.eq(x, x),
        x + 1,
        x.abs(),
        x.to(torch.float64),
        x.clone(),
        torch.zeros_like(x),
        torch.full_like(x, 3),
        x.flip(0),
        torch.where(x > 0, x, 2),
        torch.nn.functional.hardtanh(x),
        *torch.frexp(x),
    )


LAID_OUT = {
    "a dimension of one outside": lambda: torch.randn(1, 4, 7, 5).permute(1, 2, 3, 0),
    "one dimension of several": lambda: torch.randn(5, 1, 1, 1).permute(3, 1, 0, 2),
    "a column": lambda: torch.randn(1, 6).t(),
    "a part of one": lambda: torch.randn(6, 5)[::2, 3:4],
    "one of many": lambda: torch.randn(12)[::2][:1],
    "nothing": lambda: torch.randn(5, 0, 9, 4)[:, :, 1:].permute(2, 0, 1, 3),
    "channels last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "contiguous": lambda: torch.randn(3, 4, 5),
}


@pytest.mark.parametrize("layout", LAID_OUT)
def test_results_of_every_rule(layout: str) -> None:
    assert_same_as_eager(made_from, lambda: [LAID_OUT[layout]()], dynamic=True)


@pytest.mark.parametrize("layout", ["a dimension of one outside", "nothing"])
def test_results_of_every_rule_with_sizes_that_are_numbers(layout: str) -> None:
    assert_same_as_eager(made_from, lambda: [LAID_OUT[layout]()])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["one dimension of several", "a part of one", "nothing", "channels last"])
def test_absolutes_and_angles_of_complex_numbers(layout: str, dynamic: bool) -> None:
    def fn(x):
        return x.abs(), x.angle(), x.real.abs(), x.real.angle()

    assert_same_as_eager(fn, lambda: [torch.complex(x := LAID_OUT[layout](), x)], dynamic=dynamic)


@pytest.mark.parametrize("layout", ["one dimension of several", "a column", "channels last"])
def test_results_and_gradients_in_training(layout: str) -> None:
    def fn(x):
        return x * 2, x.narrow(1, 0, 1).abs(), torch.zeros_like(x) + x, x.relu()

    assert_same_as_eager(fn, lambda: [LAID_OUT[layout]().requires_grad_()], backward=True, dynamic=True)


def test_two_operands_of_which_one_is_broadcast() -> None:
    def make(size):
        return [torch.randn(size, 6, size, size).permute(1, 0, 2, 3), torch.randn(6, size, 1, size)]

    for size in (4, 0, 1):
        assert_same_as_eager(lambda x, y: (torch.div(y, x), y + x, x / 2), lambda size=size: make(size), dynamic=True)


def test_what_is_made_of_sorted_values_lies_as_they_do() -> None:
    def fn(x):
        first, second = x.sort(1)[0].chunk(2)
        return first[:, :, :, -2:], torch.full_like(first, 2), torch.where(second > 0, second, first - 0.25)

    for sizes in ((2, 17, 9, 2), (6, 0, 9, 5)):
        assert_same_as_eager(fn, lambda sizes=sizes: [torch.randn(sizes)[:, :, 1:]], dynamic=True)


@pytest.mark.parametrize("count", [0, 1, 4])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_places_that_data_decides(count: int) -> None:
    def fn(x):
        places = x.nonzero()
        return torch.zeros_like(places), places.to(torch.bool), places + 1, places.clone(), places > 2

    def viewed(x):
        after = x.reshape(1, -1, 1).nonzero() > torch.arange(1)
        return after.select(-1, 0), after.sigmoid().t(), after.unsqueeze(1)[..., 1:]

    def checked(x):
        places = x.nonzero()
        torch._check(places.size(0) == count)
        return places + 3, torch.zeros_like(places)

    x = torch.zeros(5)
    x[:count] = 1
    for function in (fn, checked, viewed):
        reset()
        wanted, found = function(x), compile_strict(function, fullgraph=True)(x)
        assert [each.stride() for each in found] == [each.stride() for each in wanted]
        assert all(map(torch.equal, found, wanted))


def test_one_call_with_another_order_of_strides_than_the_next() -> None:
    """The same symbols, sizes of one among them: which of two strides is larger is asked of each."""
    reset()
    compiled = compile_strict(lambda x: (x + 1, x.abs(), torch.ones_like(x)), dynamic=True)
    for x in (torch.randn(4, 3, 1), torch.randn(3, 4, 1).transpose(0, 1), torch.randn(1, 4, 3).permute(1, 2, 0)):
        wanted = (x + 1, x.abs(), torch.ones_like(x))
        assert [each.stride() for each in compiled(x)] == [each.stride() for each in wanted]


def test_sorted_values_without_elements() -> None:
    for make in (lambda: torch.randn(6, 5, 1, 0).expand(-1, -1, 8, -1), lambda: torch.randn(1, 0, 2).transpose(1, 2)):
        assert_same_as_eager(lambda x: (*x.sort(0), x.sort(-1)[0]), lambda make=make: [make()])
        assert_same_as_eager(lambda x: (*x.sort(0), x.sort(-1)[0]), lambda make=make: [make()], dynamic=True)


def reshaped(x):
    """Views and reductions, and the ones that have been wrong for them: one dimension more, or the same sizes."""
    flat = x.abs().reshape(-1)
    return (
        (x < 1).reshape(1, -1, 1),
        (x + 1).unsqueeze(0).flatten(0, 1),
        (x + 1).expand(1, 2, *x.shape),
        flat.unsqueeze(0).expand(1, 1, -1),
        x.sum(0, keepdim=True),
        x.amax(-1, keepdim=True) if x.numel() else x.sum(-1),
        x.masked_fill(x > 0, 2),
        torch.nn.functional.layer_norm(x, x.shape[-1:]),
    )


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize(
    "layout", ["one dimension of several", "a column", "a part of one", "nothing", "channels last"]
)
def test_views_and_reductions(layout: str, dynamic: bool) -> None:
    assert_same_as_eager(reshaped, lambda: [LAID_OUT[layout]()], dynamic=dynamic)


def test_normalised_values_in_training() -> None:
    def fn(x):
        return torch.nn.functional.layer_norm(x, x.shape[-1:]), x.exp().expand(1, *x.shape)

    for size in (12, 1):
        assert_same_as_eager(fn, lambda size=size: [torch.randn(size, 1).t().requires_grad_()], backward=True)
        assert_same_as_eager(
            fn, lambda size=size: [torch.randn(1, size).t().requires_grad_()], backward=True, dynamic=True
        )


def written(x, y):
    """Writes to an operand, which keeps its strides, and what is made of it: then a call that is none."""
    x.relu_()
    first = x >= 0.5
    y[y > 0] = 2
    second = y * 2
    z = x + 1
    z.masked_fill_(z > 2, 1)
    z *= z.double()
    x.fill_(0.5)
    y[:, :1] = 3
    return first, second, z, torch.minimum(x, y), z.masked_fill(z > 1, 0), y.relu()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["a dimension of one outside", "one dimension of several", "a column", "contiguous"])
def test_what_is_written_in_place_keeps_its_strides(layout: str, dynamic: bool) -> None:
    assert_same_as_eager(written, lambda: [LAID_OUT[layout](), LAID_OUT[layout]()], dynamic=dynamic)


def test_a_result_written_in_training_keeps_its_strides() -> None:
    def fn(x):
        ordered = x[1:2:2].sort(1)[0]
        ordered.fill_(2)
        ordered[0] = -1
        return x * 2, ordered

    for size in (2, 6):
        assert_same_as_eager(
            fn, lambda size=size: [torch.randn(size, size).requires_grad_()], backward=True, dynamic=True
        )


@pytest.mark.parametrize("layout", ["a column", "one dimension of several", "contiguous"])
def test_copies_with_elements_replaced(layout: str) -> None:
    def fn(x, places):
        return x.index_fill(0, places, 2) > 1, torch.index_put(x, (x > 0,), x.sum()) + 1, torch.fill(x, 3)

    def of_numbers(x, places):
        return *fn(x, places), x.tril(), x.log_softmax(0), x.renorm(2, 0, 1)

    def make():
        return [LAID_OUT[layout](), torch.tensor([0])]

    assert_same_as_eager(fn, make, dynamic=True)
    assert_same_as_eager(of_numbers, make)


def moved_and_cut(x):
    """Concatenations that are clones of nothing, and pads that cut; the last ones are near misses, which pad."""
    return (
        x.roll(1, 0),
        x.roll(1),
        x.roll((1, 2), (0, -1)),
        torch.nn.functional.pad(x, (0, 0)),
        torch.nn.functional.pad(x, (-1, 0)) if x.shape[-1] else x,
        torch.nn.functional.pad(x, (1, 0)),
        torch.nn.functional.pad(x, (-1, 2)) if x.shape[-1] else x,
    )


def reduced_and_activated(x):
    """Reductions of every kind, and activations that torch does not tag as elementwise."""
    return (
        x.var(0, keepdim=True, correction=0),
        x.std(-1, keepdim=True, correction=0),
        *torch.var_mean(x, 0, keepdim=True, correction=0),
        x.norm(dim=0, keepdim=True),
        x.isinf(),
        x**3,
        torch.nn.functional.hardswish(x),
        torch.nn.functional.logsigmoid(x),
        torch.nn.functional.prelu(x, x.new_ones(())),
    )


def turned(x):
    return *(x.rot90(turns) for turns in range(-1, 3)), x.rot90(1, (-1, 0)), x.renorm(2, 0, 1)


MOVED = {
    **{layout: LAID_OUT[layout] for layout in ("one dimension of several", "a column", "one of many", "nothing")},
    "a row of a column": lambda: torch.randn(5, 3).t()[:1],
    "nothing of many": lambda: torch.randn(8)[::2][:0],
    "contiguous": lambda: torch.randn(3, 4),
}


@pytest.mark.filterwarnings("ignore:var:UserWarning", "ignore:std:UserWarning")
@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])  # rules are for the latter
@pytest.mark.parametrize("layout", MOVED)
def test_copies_reductions_and_activations(layout: str, dynamic: bool) -> None:
    for function in (moved_and_cut, reduced_and_activated, turned):
        if function is not turned or MOVED[layout]().ndim > 1:
            assert_same_as_eager(function, lambda: [MOVED[layout]()], dynamic=dynamic)


@pytest.mark.parametrize("size", [0, 1, 4])
def test_copies_of_a_part_that_may_be_nothing(size: int) -> None:
    def fn(x):
        part = x[1:4:2][-2:]
        return part.roll(1, 0), torch.nn.functional.pad(part, (-1, 0)), part.roll(1), part.roll(1, 0) + 1

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for length in (8, size + 2):
        x = torch.randn(length * 2)[::2]
        assert [each.stride() for each in compiled(x)] == [each.stride() for each in fn(x)]


def test_nothing_by_indices() -> None:
    def fn(x, places):
        found = x[:, :, places]
        return found, torch.sub(found, places, alpha=2), x[places], x[:, places, places], x[:, :, :0]

    def by_sizes(x):
        places = torch.arange(x.shape[0] - 1, -1, -1)
        return x[:, places], x[places], x[places].abs()

    nothing = torch.zeros(0, dtype=torch.long)
    for sizes in ((0, 1, 8), (2, 1, 8)):
        for dynamic in (False, True):
            assert_same_as_eager(fn, lambda sizes=sizes: [torch.randn(sizes), nothing.clone()], dynamic=dynamic)
    for sizes in ((5, 5, 0, 1), (5, 6, 0, 3), (5, 6, 2, 3)):
        assert_same_as_eager(by_sizes, lambda sizes=sizes: [torch.randn(sizes)], dynamic=True)


def test_arithmetic_that_changes_only_strides() -> None:
    """A result by a number that changes nothing lies otherwise than its operand does."""

    def fn(x):
        zeros = torch.zeros_like(x)
        return zeros * zeros.shape[0], x.softmax(-1) - 0, (x.to(torch.int32) + 0).abs(), x.clone() / 1

    for make in (lambda: torch.randn(1, 5)[:, 1:], lambda: torch.randn(0, 1, 6, 5), lambda: torch.randn(1, 3, 2)):
        assert_same_as_eager(fn, lambda make=make: [make()])
        assert_same_as_eager(fn, lambda make=make: [make().requires_grad_()], backward=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_views_that_were_written_lie_as_before(dynamic: bool) -> None:
    """What torch forecasts for the view before the write is wrong; what is known of it after the write is not."""

    def of_one(x):
        sine = x.sin()
        spread = sine.expand((1,))
        spread.relu_()
        return spread, sine.expand(1, 1) * 2, sine

    def of_nothing(x):
        whole = x.new_zeros(x.shape[0] + x.shape[0])
        part = whole[0:1:2]
        view = part.reshape((-1,))
        view[:2].copy_(view[:2] + 1)
        return view, part / 3, whole

    assert_same_as_eager(of_one, lambda: [torch.randn(())], dynamic=dynamic)
    for size in (0, 3):
        assert_same_as_eager(of_nothing, lambda size=size: [torch.randn(size)], dynamic=dynamic)


@pytest.mark.parametrize("shape", [(1, 0), (0, 3), (1, 1), (3, 1)])
def test_what_was_written_through_a_view_lies_as_before(shape: tuple[int, ...]) -> None:
    """Torch forecasts other strides for what is reduced, and goes the way back through the view with those."""

    def fn(x):
        reduced, added, turned = x.amax(0, keepdim=True), x.cumsum(0), x.amin(1, keepdim=True)
        reduced[None] = 0.5
        added.sub_(x)
        added.unsqueeze(1).fill_(2.0)
        turned.t().neg_()
        return reduced, added, turned, turned.t()

    usable = [size or 1 for size in shape]  # amin of nothing is an error
    assert_same_as_eager(fn, lambda: [torch.randn(usable)])

    def of_nothing(x, y):
        sums = x.sum(0, keepdim=True)
        sums.sub_(y)
        sums[None] = 0.5
        turned = x.sum(0, keepdim=True)
        turned.t().unsqueeze(0).fill_(1.0)
        return sums, turned

    assert_same_as_eager(of_nothing, lambda: [torch.randn(shape), torch.randn(1, shape[1])])


def test_one_element_spread_over_sizes_of_one_and_of_any() -> None:
    def fn(x, y):
        spread = x.expand_as(y)
        return spread, spread.unsqueeze(1), x.expand(1, 1), x.expand(y.shape[0], 2, 1), y.expand(1, *y.shape)

    assert_same_as_eager(fn, lambda: [torch.randn(()), torch.randn(3, 1, 1)], dynamic=True)


def concatenated(x):
    """With the channels last, if the parts lie so, also along dimensions of one; the last two are near misses."""
    return (
        torch.stack([x, x], 2),
        torch.stack([x, x * 2], 0),
        torch.stack([x, x], -1),
        torch.cat([x, x + 1], 1),
        (x * 2).roll(1, 0),
        (x * 2).roll((1, 1), (2, 0)),
        torch.stack([x, x.contiguous()], 2),
        (x * 2).roll(x.shape[0], 0),
    )


WITH_CHANNELS = {
    "a batch of one": lambda: torch.randn(1, 5, 6, 7).permute(0, 3, 1, 2),
    "one channel": lambda: torch.randn(8, 5, 6, 1).permute(0, 3, 1, 2),
    "one channel, contiguous": lambda: torch.randn(8, 1, 5, 6),
    "a row of one channel": lambda: torch.randn(1, 1, 6, 1).permute(0, 3, 1, 2),
    "channels last": LAID_OUT["channels last"],
    "volumes": lambda: torch.randn(1, 2, 5, 6, 3).permute(0, 4, 1, 2, 3),
}


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("layout", WITH_CHANNELS)
def test_concatenations(layout: str, dynamic: bool) -> None:
    assert_same_as_eager(concatenated, lambda: [WITH_CHANNELS[layout]()], dynamic=dynamic)


ACTIVATIONS = [torch.nn.functional.elu, torch.nn.functional.leaky_relu, torch.nn.functional.softplus, torch.sigmoid]


@pytest.mark.parametrize("dynamic", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("activation", seldom(ACTIVATIONS, torch.nn.functional.leaky_relu, torch.sigmoid))
def test_gradients_of_activations(activation, dynamic: bool) -> None:
    """All but the last are elementwise, but torch does not tag them as such."""

    def fn(x, y):
        return (activation(torch.where(y > 0, x, y).swapaxes(1, -1)).prod(),)

    def make(*shape):
        return [torch.rand(shape).requires_grad_(), torch.randn(shape).requires_grad_()]

    for shape in ((3, 4, 1, 1), (3, 4, 2, 2)):
        assert_same_as_eager(fn, lambda shape=shape: make(*shape), backward=True, dynamic=dynamic)


def test_what_is_added_up_by_index_is_contiguous() -> None:
    def fn(places, x):
        zeros = torch.zeros_like(x)
        added = zeros.index_add(0, places, x[places], alpha=2)
        return added, added.relu(), zeros.index_copy(0, places, x[places])

    for sizes in ((2, 1, 1, 3), (4, 5, 1, 3), (2, 1, 6, 1)):
        assert_same_as_eager(
            fn,
            lambda sizes=sizes: [torch.tensor([0, 1, 1]), torch.randn(sizes)],
            prepare=lambda places, x: [places, x.permute(0, 2, 3, 1)],
            dynamic=True,
        )


def normalised_then_written(x):
    v = torch.nn.functional.layer_norm(x, x.shape[-1:])
    v.sub_(x)
    return v, v.transpose(0, 1), v + 1


def normalised_then_written_through_a_view(x):
    v = torch.nn.functional.layer_norm(x, x.shape[-1:])
    v.transpose(1, 2).sub_(x.transpose(1, 2))
    return v


def one_of_several_results_written(x):
    values, places = x.sort(-1)
    values.add_(x)
    return values, places, values.mT


@pytest.mark.parametrize(
    "fn", [normalised_then_written, normalised_then_written_through_a_view, one_of_several_results_written]
)
def test_a_result_of_several_that_is_written_lies_as_it_did(fn):
    assert_same_as_eager(fn, lambda: [torch.randn(1, 5, 1)], prepare=lambda x: [x.permute(0, 2, 1)])


# --- what a pass drops ------------------------------------------------------------------------------------------------

NOTHING_DONE = {
    "times one": lambda v: v * 1,
    "minus nothing": lambda v: v - 0,
    "a concat of one": lambda v: torch.cat([v]),
    "negated twice": lambda v: v.neg().neg(),
    "repeated once": lambda v: v.repeat(*[1] * v.ndim),
}


@pytest.mark.parametrize("name", seldom(list(NOTHING_DONE), "times one", "a concat of one"))
def test_a_number_expanded_to_a_dimension_of_one(name: str) -> None:
    """Its stride is 0 in eager, and 1 as Dynamo sees it; that of what is made of it is 1."""
    for sizes in ((1,), (1, 1)):
        assert_same_as_eager(
            lambda x, sizes=sizes: (v := (2 - x).expand(sizes), NOTHING_DONE[name](v)), lambda: [torch.tensor(3.0)]
        )


def test_an_expanded_row_lies_around_itself() -> None:
    """Near misses: a dimension in front of a row, and of one that is repeated."""
    for sizes, to in (((4,), (1, 4)), ((1,), (1, 3, 1)), ((1, 4), (1, 1, 4))):
        assert_same_as_eager(
            lambda x, to=to: (v := (2 - x).expand(to), v * 1, v.clone()), lambda sizes=sizes: [torch.randn(sizes)]
        )


def part_viewed(x):
    part = x[: x.shape[0] - 1]
    return part.view(part.shape[0], -1)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_view_to_the_same_sizes_one_of_which_may_be_one(rows: int) -> None:
    assert_same_as_eager(part_viewed, lambda: [torch.randn(rows, 1)], prepare=lambda x: [x.expand(-1, 4)], dynamic=True)


def test_a_view_to_the_same_sizes_goes_where_strides_stay() -> None:
    """Near miss: what is contiguous is viewed as it is, whatever its sizes."""
    assert_same_as_eager(part_viewed, lambda: [torch.randn(3, 4)], dynamic=True)
    (graph,) = ferrite.last_compile().graphs
    assert any("view_default_noop" in record.rewrites for record in graph.passes)


# --- writes, and what is returned of them -----------------------------------------------------------------------------


def filled_through_a_view(x):
    v = torch.add(x, x).mT
    v.masked_fill_(v > 0, 0)
    return v


@pytest.mark.parametrize("sizes", [(2, 1, 2), (2, 3, 1), (2, 3, 4)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_that_is_the_only_result_keeps_its_strides_in_training(sizes: tuple[int, ...], dynamic: bool) -> None:
    """AOTAutograd passes it on as a view to the same sizes, which forgets strides along dimensions of one."""
    assert_same_as_eager(
        filled_through_a_view, lambda: [torch.randn(sizes).requires_grad_()], backward=True, dynamic=dynamic
    )


def test_such_a_view_is_as_good_as_eagers() -> None:
    """It has one history, can be written, and a second call has strides of its own."""

    def fn(x):
        return filled_through_a_view(x) if x.ndim == 3 else x

    compiled = compile_strict(fn)
    for sizes in ((2, 1, 2), (3, 1, 2)):
        x = torch.randn(sizes, requires_grad=True)
        found, expected = compiled(x), fn(x)
        assert found.stride() == expected.stride()
        for each in (found, expected):
            each.mul_(2)
        (one,) = torch.autograd.grad(found.sum(), x)
        (other,) = torch.autograd.grad(expected.sum(), x)
        torch.testing.assert_close(one, other)
        torch.testing.assert_close(found, expected)


def test_what_was_written_lies_as_the_operand_that_a_pass_took_away() -> None:
    def fn(x):
        v = x.expand(-1, -1, 0, -1) / 1
        v.add_(v, alpha=2)
        return v

    assert_same_as_eager(fn, lambda: [torch.randn(1, 1, 1, 1).requires_grad_()], backward=True)


# --- gradients --------------------------------------------------------------------------------------------------------

F = torch.nn.functional
GRADIENTS_OF_ONES = {
    "layer_norm": lambda x: F.layer_norm(x.permute(0, 3, 2, 1), x.shape[1:2]),
    "softmax": lambda x: F.softmax(x.permute(0, 2, 3, 1), 1),
    "log_softmax": lambda x: F.log_softmax(x.permute(0, 2, 3, 1), -1),
    "mse_loss": lambda x: F.mse_loss(x.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2).detach() + 1, reduction="none"),
    "a piece that is padded": lambda x: F.pad(x.split(1)[0], (1, 0)),
    "a concat of one that is padded": lambda x: F.pad(torch.cat([x]), (1, 0)),
}


@pytest.mark.parametrize("name", seldom(list(GRADIENTS_OF_ONES), "layer_norm", "softmax", "a piece that is padded"))
def test_gradients_along_dimensions_of_one(name: str) -> None:
    for sizes in ((1, 1, 2, 1), (1, 2, 1, 1), (1, 2, 3, 2)):
        assert_same_as_eager(
            GRADIENTS_OF_ONES[name], lambda sizes=sizes: [torch.randn(sizes).requires_grad_()], backward=True
        )
