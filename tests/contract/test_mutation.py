"""Inputs written to in place: whole, through views, through index operators, and in their shape."""

from __future__ import annotations

import operator
import warnings
from typing import Any

import pytest
import torch

from tests.compare import assert_no_farther, assert_same_as_eager, compile_strict, reset, wide_table

ROWS = torch.tensor([2, 0])


def read_through_older_view(x):
    view = x[0]
    x.add_(1)
    return view * 2


def read_before_and_after(x):
    before = x + 1
    x.mul_(2)
    return before, x + 1


def write_through_two_views(x):
    x[0].add_(1)
    x[:, 0].mul_(3)
    return x.sum(0)


def write_through_view_of_view(x):
    x.t()[1:4][:, 1:3].zero_()
    return x + 1


def swap_rows(x):
    x[[0, 1]] = x[[1, 0]]


def shift_rows(x):
    x[1:] = x[:-1] + 1


def augmented_slice(x):
    x[..., 0] += 2
    x[1:3, 2:5] *= 3


def out_argument(x):
    torch.add(x, 1, out=x)
    return torch.mul(x, 2, out=torch.empty_like(x))


def assign_scalar(x):
    x[1, 2] = 5
    x[:, -1] = x[:, 0]


def assign_by_mask(x):
    x[x > 0] = -1.0


def chain_of_writes(x):
    x.sub_(1)
    y = x.exp()
    x.copy_(y)
    x.clamp_(max=2)
    return y


ONE_INPUT = {
    "add_": lambda x: x.add_(1),
    "mul_and_return_something_else": lambda x: x.mul_(2).amax(),
    "exp_": lambda x: x.exp_(),
    "relu_": lambda x: torch.relu_(x),
    "clamp_": lambda x: x.clamp_(-0.5, 0.5),
    "fill_": lambda x: x.fill_(3),
    "zero_": lambda x: x.zero_(),
    "row": lambda x: x[1].zero_(),
    "strided_columns": lambda x: x[:, ::2].add_(1),
    "transpose": lambda x: x.t().mul_(torch.arange(4.0)),
    "flat_slice": lambda x: x.view(-1)[3:9].fill_(7),
    "diagonal": lambda x: x.diagonal().add_(10),
    "unfold": lambda x: x.unfold(1, 2, 2).mul_(2),
    "split_half": lambda x: x.split(2)[1].neg_(),
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 0.0),
    "index_add_": lambda x: x.index_add_(0, ROWS, x.new_ones(2, 6)),
    "index_copy_": lambda x: x.index_copy_(0, ROWS, x.new_ones(2, 6)),
    "index_fill_": lambda x: x.index_fill_(1, ROWS, 4.0),
    "index_put_": lambda x: x.index_put_((ROWS,), x.new_ones(6)),
    "index_put_accumulate": lambda x: x.index_put_((torch.tensor([1, 1]),), x.new_ones(2, 6), accumulate=True),
    "scatter_": lambda x: x.scatter_(1, torch.zeros(4, 1, dtype=torch.int64), 9.0),
    "scatter_add_": lambda x: x.scatter_add_(0, torch.zeros(3, 6, dtype=torch.int64), x.new_ones(3, 6)),
    "scatter_reduce_": lambda x: x.scatter_reduce_(
        0, torch.ones(3, 6, dtype=torch.int64), x.new_full((3, 6), 0.25), "amax"
    ),
    "cumsum_": lambda x: x.cumsum_(1),
    "tril_": lambda x: x.tril_(),
    "read_through_older_view": read_through_older_view,
    "read_before_and_after": read_before_and_after,
    "write_through_two_views": write_through_two_views,
    "write_through_view_of_view": write_through_view_of_view,
    "swap_rows": swap_rows,
    "shift_rows": shift_rows,
    "augmented_slice": augmented_slice,
    "out_argument": out_argument,
    "assign_scalar": assign_scalar,
    "assign_by_mask": assign_by_mask,
    "chain_of_writes": chain_of_writes,
}
QUICK = ("add_", "strided_columns", "read_before_and_after", "index_put_", "chain_of_writes")


@pytest.mark.parametrize(("name", "dynamic"), wide_table(ONE_INPUT, QUICK))
def test_in_place_on_an_input(name: str, dynamic: bool) -> None:
    assert_same_as_eager(ONE_INPUT[name], lambda: [torch.randn(4, 6)], dynamic=dynamic)


@pytest.mark.parametrize("name", ["add_", "row", "transpose", "index_add_", "chain_of_writes", "diagonal"])
def test_in_place_on_a_view_of_a_larger_tensor(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        ONE_INPUT[name],
        lambda: [torch.randn(6, 12)],
        prepare=lambda base: [base[1:5, ::2]],
        dynamic=rarely_dynamic,
    )


@pytest.mark.parametrize("name", ["add_", "row", "augmented_slice", "swap_rows"])
def test_in_place_on_a_channels_last_input(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        ONE_INPUT[name],
        lambda: [torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)],
        dynamic=rarely_dynamic,
    )


@pytest.mark.parametrize("calls", [1, 3])
def test_writes_accumulate_over_calls(calls: int, dynamic: bool) -> None:
    def step(total: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        total += x.sin()
        return total.mean()

    assert_same_as_eager(step, lambda: [torch.zeros(5, 3), torch.randn(5, 3)], calls=calls, graphs=1, dynamic=dynamic)


@pytest.mark.quick
def test_copy_between_inputs_with_other_dtype_and_layout(dynamic: bool) -> None:
    def assign(x: torch.Tensor, y: torch.Tensor) -> None:
        x.copy_(y.t())
        y.copy_(x.t() * 2)

    assert_same_as_eager(assign, lambda: [torch.zeros(3, 4, dtype=torch.float64), torch.randn(4, 3)], dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.float32, torch.uint8, torch.bool, torch.complex64])
def test_copy_of_a_number(dtype: torch.dtype) -> None:
    """Numbers go through the type of a tensor of their own: 300 is 44 as a byte."""

    def assign(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x[1:].copy_(300)
        return y.clone().copy_(2.5) * x

    assert_same_as_eager(assign, lambda: [torch.zeros(3, 2, dtype=dtype), torch.ones(3, 2).to(dtype)])


def test_swap_the_contents_of_two_inputs(dynamic: bool) -> None:
    def swap(x: torch.Tensor, y: torch.Tensor) -> None:
        held = x.clone()
        x.copy_(y)
        y.copy_(held)

    assert_same_as_eager(swap, lambda: [torch.randn(7), torch.randn(7)], dynamic=dynamic)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8, torch.bool])
def test_in_place_on_integers(dtype: torch.dtype, rarely_dynamic: bool) -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        x.bitwise_xor_(torch.ones_like(x))
        x[1:].copy_(x[:-1].clone())
        return x.sum()

    assert_same_as_eager(change, lambda: [torch.arange(11).remainder(3).to(dtype)], dynamic=rarely_dynamic)


def test_write_of_an_input_with_internal_overlap_raises_as_in_eager() -> None:
    def change(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1)

    with pytest.raises(RuntimeError, match="single memory location"):
        change(torch.zeros(1).expand(3))
    with pytest.raises(RuntimeError, match="single memory location"):
        compile_strict(change)(torch.zeros(1).expand(3))


SHAPE_CHANGES = {
    "t_": lambda x: x.t_() + 1,
    "transpose_": lambda x: x.transpose_(0, 1).add(1),
    "unsqueeze_": lambda x: x.unsqueeze_(0).mul(2),
    "squeeze_": lambda x: (x.squeeze_(0), x + 1),
    "swapdims_and_write": lambda x: x.swapdims_(0, 1).mul_(2),
    "as_strided_": lambda x: x.as_strided_((3, 2), (1, 3)) * 2,
    "write_then_t_": lambda x: (x.mul_(2), x.t_(), x.sum(0))[2],
}


@pytest.mark.parametrize("name", SHAPE_CHANGES)
def test_metadata_of_an_input_changes(name: str, dynamic: bool) -> None:
    assert_same_as_eager(
        SHAPE_CHANGES[name],
        lambda: [torch.randn(1, 6) if name == "squeeze_" else torch.randn(4, 6)],
        dynamic=dynamic,
    )


def test_set_makes_the_input_share_the_other_tensor(dynamic: bool) -> None:
    def rebind(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x.set_(y)
        return x * 2

    assert_same_as_eager(rebind, lambda: [torch.randn(4), torch.randn(4)], dynamic=dynamic)


# A graph that saves an input's old value and then overwrites that input fails in AOTAutograd's own backward;
# so the derivatives below need no old value of the whole of `x`.
TRAINED = {
    "whole": lambda x, w: x.add_(w.sin()),
    "row": lambda x, w: (x[1].mul_(w[0]), x * 2)[1],
    "transpose": lambda x, w: (x.t().add_(w.t().sin()), x.exp())[1],
    "copy_": lambda x, w: x.copy_(w * 3).sum(),
    "index_put_": lambda x, w: x.index_put_((ROWS,), w[:2] * 2),
    "twice": lambda x, w: x.add_(w).sub_(w.cos()).cos(),
    "no_longer_needed": lambda x, w: ((x + w).sum(), x.fill_(3))[0],
}


@pytest.mark.parametrize("name", TRAINED)
@pytest.mark.parametrize("history", [True, False], ids=["with_history", "without_history"])
def test_in_place_in_training(name: str, history: bool, dynamic: bool) -> None:
    """The written tensor must not be a leaf that requires grad, so it is a copy of one, or requires none."""
    assert_same_as_eager(
        TRAINED[name],
        lambda: [torch.randn(4, 6, requires_grad=history), torch.randn(4, 6, requires_grad=True)],
        prepare=lambda x, w: [x.clone() if history else x, w],
        backward=True,
        dynamic=dynamic,
    )


def test_view_with_history_written_in_training(dynamic: bool) -> None:
    def change(base: torch.Tensor, view: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        view.mul_(w)
        return base * 2

    def views(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
        base = x.clone()
        return [base, base[1:3], w]

    assert_same_as_eager(
        change,
        lambda: [torch.randn(4, 6, requires_grad=True), torch.randn(2, 6, requires_grad=True)],
        prepare=views,
        backward=True,
        dynamic=dynamic,
    )


def test_leaf_written_under_no_grad_inside_the_function(dynamic: bool) -> None:
    def step(w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            w.sub_(0.1 * x)
        return (w * x).sum()

    assert_same_as_eager(
        step,
        lambda: [torch.randn(5, requires_grad=True), torch.randn(5)],
        backward=True,
        dynamic=dynamic,
    )


def test_in_place_on_a_leaf_that_requires_grad_raises_as_in_eager() -> None:
    def change(w: torch.Tensor) -> torch.Tensor:
        return w.add_(1)

    def message(call: Any) -> str:
        with pytest.raises(RuntimeError) as caught:
            call(torch.ones(3, requires_grad=True))
        return str(caught.value)

    assert "a leaf Variable that requires grad is being used in an in-place operation" in message(change)
    assert "a leaf Variable that requires grad is being used in an in-place operation" in message(
        compile_strict(change)
    )


def test_input_overwritten_between_forward_and_backward(dynamic: bool) -> None:
    """What forward saved is either protected by the version counter, as in eager, or was a copy."""

    def forward(w: torch.Tensor) -> torch.Tensor:
        return w.sin().sum()

    w = torch.randn(4, requires_grad=True)
    expected = w.detach().cos()
    loss = compile_strict(forward, dynamic=dynamic)(w)
    with torch.no_grad():
        w.add_(1)
    error = None
    try:
        loss.backward()
    except RuntimeError as caught:
        error = str(caught)
    if error is None:
        assert_no_farther(w.grad, expected, expected, "gradient")
    else:
        assert "modified by an inplace operation" in error


def test_a_part_without_its_ends_is_written() -> None:
    """The size of the part may be none, as far as anybody knows: nobody asks."""

    def fn(x):
        x[1:-1] = 0
        return x

    assert_same_as_eager(fn, lambda: [torch.randn(4, 5)], dynamic=True)


def test_as_many_as_there_are_in_the_data_are_written() -> None:
    def fn(x, y):
        part = y[: x.nonzero().shape[0]]
        return part.index_add(0, torch.arange(part.shape[0] - 1, -1, -1), part)

    compiled = compile_strict(fn)
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for x in (torch.tensor([0, 1, 2, 0]), torch.tensor([0, 0, 0, 0]), torch.tensor([1, 1, 1, 1])):
            y = torch.randn(4, 3)
            assert torch.equal(compiled(x, y), fn(x, y))


def test_memory_that_is_given_back_is_read_before():
    """A storage that is made smaller: what was computed of it is in memory by then."""

    def fn(x):
        y = torch.sin(x + 1)
        x.untyped_storage().resize_(0)
        return torch.cos(y)

    reset()
    x = torch.arange(64.0)
    expected = torch.cos(torch.sin(x + 1))
    torch.testing.assert_close(compile_strict(fn, fullgraph=True)(x), expected)
    assert x.untyped_storage().nbytes() == 0


def test_a_written_input_leaves_expanded():
    def fn(x):
        x.sub_(2, alpha=2)
        return x.expand((2, -1, -1)), x.unfold(0, 2, 1)

    for dynamic in (False, True):
        assert_same_as_eager(fn, lambda: [torch.randn(6, 4)], prepare=lambda x: [x[::2]], dynamic=dynamic)


# --- pieces of memory that is written and differentiated --------------------------------------------------------------


def whole_piece(x):
    y = x.neg()
    (piece,) = y.split(4)
    y[1:] = 0.5
    return piece


def whole_chunk_copied_over(x):
    y = x.neg()
    piece = y.chunk(1, 1)[-1]
    y.copy_(piece * 2)
    return y.sum(), piece.sum()


def lone_piece_read(x):
    y = x.neg()
    piece = y.split(2)[1]
    y.mul_(2)
    return piece * 3


def joined_pieces(x):
    y = x.neg()
    first, second, _third = y.split([1, 2, 1])
    y.mul_(2)
    return torch.cat([first, second])


def piece_of_what_requires_a_gradient_later(x):
    y = torch.zeros(4, 4)
    (piece,) = y.split(4)
    y.copy_(x)
    return piece * 2


FORBIDDEN = (
    whole_piece,
    whole_chunk_copied_over,
    lone_piece_read,
    joined_pieces,
    piece_of_what_requires_a_gradient_later,
)


@pytest.mark.parametrize("fn", FORBIDDEN)
def test_a_piece_of_written_memory_has_no_gradient(fn: Any) -> None:
    """Autograd says no in eager, and says so here: no rewrite makes another view of a piece, which it would allow."""

    def problem(compiled: Any) -> Exception | None:
        try:
            sum(result.sum() for result in compiled(torch.randn(4, 4, requires_grad=True))).backward()
        except RuntimeError as error:
            return error
        return None

    reset()
    assert "modified inplace" in str(problem(fn))
    assert "modified inplace" in str(problem(compile_strict(fn)))


@pytest.mark.parametrize("fn", FORBIDDEN)
def test_without_gradients_a_piece_of_written_memory_is_read(fn: Any) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(4, 4)])


def test_a_piece_of_memory_that_nothing_writes_has_a_gradient() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, z = x.neg(), x * 3
        (piece,) = y.split(4)
        z[1:] = 0.5
        return piece * 2, z

    assert_same_as_eager(fn, lambda: [torch.randn(4, 4, requires_grad=True)], backward=True)


WRITES = {
    "masked_fill_": lambda v: v.masked_fill_(v > 0, 1.0),
    "cumsum_": lambda v: v.cumsum_(0),
    "tril_": lambda v: v.tril_(),
    "zero_": lambda v: v.zero_(),
    "scatter_add_": lambda v: v.scatter_add_(0, torch.zeros(v.shape, dtype=torch.long), v * 2),
    "index_add_": lambda v: v.index_add_(0, ROWS, v[:2] * 2),
    "floor_divide_": lambda v: v.floor_divide_(v.contiguous() + 3),
    "//=": lambda v: operator.ifloordiv(v, v.contiguous() + 3),
    "add_": lambda v: v.add_(1),  # torch forecasts this one right
}


@pytest.mark.parametrize("training", [pytest.param(False, marks=pytest.mark.slow), True])
@pytest.mark.parametrize("write", WRITES)
def test_whether_a_reshape_copies_is_decided_by_what_was_written(write: str, training: bool) -> None:
    def fn(x):
        v = x.t() * 2
        WRITES[write](v)
        w = v + 1
        flat = w.reshape(-1)
        w.mul_(3)
        return flat, w, v, v.reshape(-1, 2)

    def make():
        return [torch.arange(-4.0, 8).reshape(3, 4).requires_grad_(has_gradient)]

    has_gradient = training and write not in ("floor_divide_", "//=")
    assert_same_as_eager(fn, make, backward=has_gradient, dynamic=training)


def test_a_reshape_of_what_was_written_where_data_decides_how_it_lies() -> None:
    """The places that nonzero() gives lie in a row only where there is one."""

    def fn(x, y):
        places = x.nonzero()
        places.copy_(places)
        places.mul_(2)
        flat = y.flatten(0, -1)
        return places, flat.reshape(3, -1, 2), places + 1

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for x in (torch.eye(3), torch.eye(3)[:1]):
            assert_same_as_eager(fn, lambda x=x: [x.clone(), torch.arange(12.0).reshape(2, 6)], dynamic=True)


def test_a_write_into_elements_that_share_memory_beside_a_reshape() -> None:
    """Eager allows some writes there, but no copy."""

    def fn(x):
        row = x.t().flatten()
        spread = row.expand(2, -1)
        spread.masked_fill_(spread > 0, 1.0)
        return row, (x + 1).reshape(-1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert_same_as_eager(fn, lambda: [-torch.rand(3, 4)])


def test_a_reshape_of_what_was_written_and_lies_in_a_row_is_a_view() -> None:
    def fn(x):
        v = x * 2
        v.masked_fill_(v > 0, 1.0)
        w = v + 1
        flat = w.reshape(-1)
        w.zero_()
        return flat, w

    assert_same_as_eager(fn, lambda: [torch.randn(3, 4)])
