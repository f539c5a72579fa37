"""Inputs that share memory, and outputs that are inputs, views of inputs, or views of each other."""

from __future__ import annotations

import warnings

import pytest
import torch

import ferrite
from tests.compare import assert_same_as_eager, compile_strict, wide_table

SHARED_INPUTS = {
    "same_tensor": lambda base: [base, base],
    "two_objects_same_memory": lambda base: [base, base.view_as(base)],
    "overlapping_slices": lambda base: [base[:-1], base[1:]],
    "disjoint_slices": lambda base: [base[:2], base[2:]],
    "transposed": lambda base: [base, base.t()],
    "view_before_base": lambda base: [base.t(), base],
    "flattened": lambda base: [base.view(2, 8), base.view(2, 8).flip(0)],
}


def write_first_read_second(x, y):
    x.add_(1)
    return y * 2


def write_both(x, y):
    x.mul_(2)
    y.add_(3)
    return x + 1


def write_second_after_reading(x, y):
    total = (x.sin() + y.cos()).sum()
    y.copy_(y + total)
    return x - 1


@pytest.mark.parametrize("fn", [write_first_read_second, write_both, write_second_after_reading])
@pytest.mark.parametrize("sharing", SHARED_INPUTS)
def test_inputs_that_share_memory(fn, sharing: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(4, 4)], prepare=SHARED_INPUTS[sharing], dynamic=rarely_dynamic)


@pytest.mark.parametrize("fn", [write_first_read_second, write_both, write_second_after_reading])
def test_inputs_that_interleave_in_memory(fn) -> None:
    """With static sizes only: AOTAutograd cannot rebuild such views of symbolic size from their common base."""
    assert_same_as_eager(
        fn,
        lambda: [torch.randn(4, 4)],
        prepare=lambda base: [base[:, ::2], base[:, 1::2]],
        dynamic=False,
    )


@pytest.mark.parametrize("sharing", ["same_tensor", "overlapping_slices", "disjoint_slices"])
def test_inputs_that_share_memory_in_training(sharing: str, dynamic: bool) -> None:
    assert_same_as_eager(
        write_first_read_second,
        lambda: [torch.randn(4, 4, requires_grad=True)],
        prepare=lambda leaf: SHARED_INPUTS[sharing](leaf.clone()),
        backward=True,
        dynamic=dynamic,
    )


@pytest.mark.quick
def test_same_leaf_passed_twice_collects_both_gradients(dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x, y: x.sin() * y.exp(),
        lambda: [torch.randn(5, requires_grad=True)],
        prepare=lambda x: [x, x],
        backward=True,
        dynamic=dynamic,
    )


def test_sharing_that_changes_between_calls() -> None:
    """What was compiled for separate inputs must not be used for shared ones, nor the reverse."""
    compiled = compile_strict(write_both)
    for shared in (False, True, False, True):
        base, ours = torch.arange(6.0), torch.arange(6.0)
        expected = write_both(base, base if shared else torch.ones(6))
        actual = compiled(ours, ours if shared else torch.ones(6))
        assert torch.equal(actual, expected)
        assert torch.equal(ours, base)


def two_views_of_an_intermediate(x):
    y = x.sin()
    return y[0], y.t(), y[:, 1:]


def an_intermediate_and_its_view(x):
    y = x.exp()
    return y.view(-1), y


def view_of_a_written_input(x):
    x.add_(1)
    return x[1:], x


def view_taken_before_the_write(x):
    view = x.t()
    x.mul_(3)
    return view


def unequal_copies(x):
    return x.clone(), x.contiguous(), x + 0


PRESERVED = torch.preserve_format
VIEWS = {
    "itself": lambda x: (x, x + 1),
    "itself_twice": lambda x: (x, x, x * 2),
    "result_twice": lambda x: [x.sin()] * 2,
    "slice": lambda x: (x[1:, ::2], x * 2),
    "select": lambda x: (x[2], x.amax()),
    "transpose": lambda x: (x.t(), x + 1),
    "view": lambda x: (x.view(-1), x + 1),
    "view_of_view": lambda x: (x.view(2, -1).t()[1], x + 1),
    "expand": lambda x: (x[:, :1].expand(4, 9), x + 1),
    "as_strided": lambda x: (x.as_strided((2, 2), (1, 6), 3), x + 1),
    "diagonal": lambda x: (x.diagonal(), x + 1),
    "unbind": lambda x: (x.unbind(0), x + 1),
    "split": lambda x: (x.split(2, dim=1), x + 1),
    "chunk_of_result": lambda x: x.mul(2).chunk(2),
    "unfold": lambda x: (x.unfold(1, 3, 1), x + 1),
    "movedim_unsqueeze": lambda x: (x[None].movedim(0, 2), x + 1),
    "detach": lambda x: (x.detach(), x + 1),
    "reshape_that_views": lambda x: (x.reshape(6, 4), x + 1),
    "reshape_that_copies": lambda x: (x.t().reshape(-1), x + 1),
    "contiguous_is_itself": lambda x: (x.contiguous(), x + 1),
    "to_same_dtype_is_itself": lambda x: (x.to(torch.float32), x.float(), x + 1),
    "flatten": lambda x: (x.flatten(), x.ravel(), x + 1),
    "copy_with_every_argument": lambda x: (x.to("cpu", torch.float32, True, True, memory_format=PRESERVED), x + 1),
    "narrow_from_a_tensor": lambda x: (x.narrow(1, torch.tensor(2), 3), torch.narrow(x, 0, torch.tensor(1), 2), x + 1),
    "flatten_of_every_second": lambda x: (x[:, ::2].flatten(), x + 1),
    "ravel_copies_every_second": lambda x: (x[:, ::2].ravel(), torch.ravel(x.t()), x + 1),
    "flip_copies": lambda x: (x.flip(0), x + 1),
    "two_views_of_an_intermediate": two_views_of_an_intermediate,
    "an_intermediate_and_its_view": an_intermediate_and_its_view,
    "unequal_copies": unequal_copies,
}
QUICK = (
    "itself",
    "slice",
    "ravel_copies_every_second",
    "two_views_of_an_intermediate",
    "unequal_copies",
    "reshape_that_copies",
)


@pytest.mark.parametrize(("name", "dynamic"), wide_table(VIEWS, QUICK))
def test_outputs_that_alias(name: str, dynamic: bool) -> None:
    assert_same_as_eager(VIEWS[name], lambda: [torch.randn(4, 6)], dynamic=dynamic)


@pytest.mark.parametrize("name", VIEWS)
def test_outputs_that_alias_in_training(name: str, rarely_dynamic: bool) -> None:
    assert_same_as_eager(
        VIEWS[name],
        lambda: [torch.randn(4, 6, requires_grad=True)],
        prepare=lambda leaf: [leaf * 1],
        backward=True,
        dynamic=rarely_dynamic,
    )


@pytest.mark.parametrize("fn", [view_of_a_written_input, view_taken_before_the_write])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_views_of_written_inputs(fn, training: bool, dynamic: bool) -> None:
    assert_same_as_eager(
        fn,
        lambda: [torch.randn(4, 6, requires_grad=training)],
        prepare=lambda leaf: [leaf.clone()],
        backward=training,
        dynamic=dynamic,
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (x.real, x.imag * 2),
        lambda x: (torch.view_as_real(x), x + 1),
        lambda x: (x.conj(), x + 1),
        lambda x: (x.conj().imag, x + 1),
    ],
    ids=["real", "view_as_real", "conj", "conj_imag"],
)
def test_views_of_complex_inputs(fn, rarely_dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(3, 4, dtype=torch.complex64)], dynamic=rarely_dynamic)


def conjugates(x):
    y = x.exp()
    return y, y.conj(), y[1:].conj().t(), y.conj()[:, :1], y.conj() * y, y.conj_physical()


def conjugates_alone(x):
    y = x.exp()
    return y.mH, y.conj().imag, y.imag


def turned_twice(x):
    y = x.exp()
    return torch._neg_view(y.conj()), torch._neg_view(y).conj().conj(), y.conj().conj()


def conjugate_before_the_write(x):
    y = x.exp()
    z = y.conj()
    y.mul_(2j)
    return y, z, y.conj() + 1j


@pytest.mark.parametrize("fn", [conjugates, conjugates_alone, turned_twice, conjugate_before_the_write])
def test_conjugates_and_negatives_of_an_intermediate_share_its_memory(fn, rarely_dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(3, 4, dtype=torch.complex64)], dynamic=rarely_dynamic)


def test_conjugates_of_an_intermediate_in_training() -> None:
    make = lambda: [torch.randn(3, 4, dtype=torch.complex64, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(conjugates, make, backward=True)


def test_view_as_another_dtype() -> None:
    assert_same_as_eager(lambda x: (x.view(torch.int32), x + 1), lambda: [torch.randn(4, 6)], dynamic=False)
    assert_same_as_eager(lambda x: (x.view(torch.uint8), x + 1), lambda: [torch.randn(4, 6)], dynamic=False)


class ReturnsItsState(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(3, 4))
        self.register_buffer("mean", torch.randn(3, 4))

    def forward(self, x):
        return x * self.weight, self.weight.t(), self.mean[0], self.mean


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_outputs_that_are_or_view_parameters_and_buffers(training: bool, dynamic: bool) -> None:
    assert_same_as_eager(ReturnsItsState(), lambda: [torch.randn(3, 4)], backward=training, dynamic=dynamic)


@pytest.mark.quick
def test_results_of_two_calls_are_separate(dynamic: bool) -> None:
    """Memory of a result the caller still holds must not be reused by the next call."""
    compiled = compile_strict(lambda x: (x * 2, (x + 1).sum(0)), dynamic=dynamic)
    first = compiled(torch.ones(8, 4))
    second = compiled(torch.full((8, 4), 5.0))
    assert torch.equal(first[0], torch.full((8, 4), 2.0))
    assert torch.equal(first[1], torch.full((4,), 16.0))
    assert torch.equal(second[0], torch.full((8, 4), 10.0))


def test_writing_to_an_output_view_reaches_the_input(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: (x[1:], x + 1), dynamic=dynamic)
    x = torch.zeros(4, 3)
    view, fresh = compiled(x)
    view.fill_(7)
    fresh.fill_(9)
    assert torch.equal(x, torch.tensor([0.0, 7, 7, 7])[:, None].expand(4, 3))


def test_outputs_stay_correct_when_an_input_view_is_written_after_the_call(dynamic: bool) -> None:
    compiled = compile_strict(lambda x: x.t() + 0, dynamic=dynamic)
    x = torch.zeros(2, 3)
    out = compiled(x)
    x.fill_(1)
    assert torch.equal(out, torch.zeros(3, 2))


def part_in_other_sizes(x):
    part = x.select(2, 6)
    part.clamp_(min=-1)
    rows = part.reshape(-1, 2)
    return rows @ rows.t(), rows


def result_in_other_sizes(x):
    result = x.exp()
    return result, result.reshape(-1, 3), result.reshape(-1, 3)[1:]


@pytest.mark.parametrize(("fn", "shape"), [(part_in_other_sizes, (8, 1, 8, 1)), (result_in_other_sizes, (6, 4))])
def test_views_whose_sizes_are_quotients_of_unknown_ones(fn, shape) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(shape)], dynamic=True)


def returned_after_a_write(x):
    y = x.narrow(0, 0, x.shape[0])
    y += x
    return (y,)


def whole_part_after_a_write(x):
    y = x.sin()
    z = y[:9]
    z += z
    return y, z


def beside_itself(x):
    y = torch.nn.functional.pad(x, (-1, 0))
    return y.to(torch.float32), y.narrow(0, 0, y.shape[0])


def view_twice(x):
    y = x.sin()
    z = y.unsqueeze(1)
    return y, z, z.to(torch.float32)


def two_equal_views(x):
    y = x.sin()
    return y[:1], y[:1]


def nothing_of_one(x):
    y = x.sin()[:1]
    return y, *y.tensor_split(2, 0)


@pytest.mark.parametrize(
    "fn",
    [returned_after_a_write, whole_part_after_a_write, beside_itself, view_twice, two_equal_views, nothing_of_one],
)
def test_which_results_are_one_tensor(fn) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(3)])


# --- views of written inputs, with symbolic sizes ---------------------------------------------------------------------


def second_half(x):
    x.add_(1)
    return x[x.shape[0] // 2 :], x.sum()


def written_through_the_view(x):
    y = x.expand_as(x)
    y.neg_()
    return y


def several_views(x):
    y = x[x.shape[0] // 2 :]
    y.mul_(2)
    return y.t(), y, x, y.mul_(2), x.shape[0], y


def pieces_of_unknown_size(x):
    first, second = x.split(x.shape[1] // 2 + 1, 1)
    first.mul_(2)
    return second, first, second[:, :1]


def beside_a_view_of_a_result(x):
    x.mul_(2)
    y = x.sin()
    y[y.shape[0] // 2 :] += 1
    return x[:, x.shape[1] // 2 :], y[y.shape[0] // 2 :], y


def view_without_gradients(x):
    x.mul_(2)
    with torch.no_grad():
        y = x[:, x.shape[1] // 2 :]
    return y, x * 2


def only_the_number_is_computed(x):
    x.add_(1)
    return x[: (x > 1e9).sum().item()], x[x.shape[0] // 2 :]


LAID = {"from_the_second_column": lambda x: [x[:, 1:]], "transposed": lambda x: [x.t()], "whole": lambda x: [x]}
HALVES = [second_half, written_through_the_view, several_views, beside_a_view_of_a_result]


@pytest.mark.parametrize("fn", [*HALVES, pieces_of_unknown_size])
@pytest.mark.parametrize("laid", LAID)
def test_views_of_written_inputs_begin_where_they_do_in_eager(fn, laid: str) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(5, 4)], prepare=LAID[laid], dynamic=True)


@pytest.mark.parametrize("fn", [*HALVES, view_without_gradients])
def test_views_of_written_inputs_begin_where_they_do_in_eager_in_training(fn) -> None:
    assert_same_as_eager(
        fn,
        lambda: [torch.randn(5, 4, requires_grad=True)],
        prepare=lambda leaf: [(leaf * 1)[:, 1:]],
        backward=True,
        dynamic=True,
    )


def known_part_of_an_unknown_part(x):
    y = x[: x.shape[0] // 2]
    y.neg_()
    return y[0:1:1], y[1], x.sum()


def known_part_of_an_unknown_input(x):
    x.neg_()
    return x[1:3], x[0]


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("fn", [known_part_of_an_unknown_part, known_part_of_an_unknown_input])
def test_known_parts_of_written_inputs_begin_where_they_do_in_eager(fn, training: bool) -> None:
    """Their sizes, strides and offsets are numbers; what they are views of has symbolic ones."""
    assert_same_as_eager(
        fn,
        lambda: [torch.randn(7, requires_grad=training)],
        prepare=lambda leaf: [(leaf * 1)[1:]],
        backward=training,
        dynamic=True,
    )


def test_views_of_written_inputs_up_to_a_number_that_data_decides() -> None:
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        assert_same_as_eager(
            only_the_number_is_computed, lambda: [torch.randn(5, 4)], prepare=LAID["transposed"], dynamic=True
        )


def test_views_of_a_written_input_that_shares_memory_with_another() -> None:
    def fn(x, y):
        x.add_(1)
        return y[y.shape[0] // 2 :], x[:, x.shape[1] // 2 :], y.sum()

    assert_same_as_eager(fn, lambda: [torch.randn(4, 4)], prepare=lambda base: [base[1:], base[:, 1:]], dynamic=True)


def test_sizes_that_change_after_views_of_written_inputs_were_compiled() -> None:
    compiled = compile_strict(second_half, fullgraph=True, dynamic=True)
    for rows, columns in ((5, 4), (7, 3), (2, 9)):
        x, y = torch.arange(rows * columns * 1.0).view(rows, columns).repeat(2, 1, 1)
        ours, eager = compiled(x[:, 1:])[0], second_half(y[:, 1:])[0]
        assert torch.equal(ours, eager)
        assert (ours.stride(), ours._base is not None) == (eager.stride(), True)
        assert ours.data_ptr() - x.data_ptr() == eager.data_ptr() - y.data_ptr()


def rows_of_nothing(x):
    y = x.roll(-1, 2)
    z = y.view(8, -1, 4).reshape(1, -1)
    z.mul_(3)
    return y, z


@pytest.mark.parametrize("dynamic", [False, True])
def test_results_without_elements_share_memory_too(dynamic: bool) -> None:
    assert_same_as_eager(
        rows_of_nothing, lambda: [torch.randn(17, 2, 5, 0)], prepare=lambda x: [x[:, ::2]], dynamic=dynamic
    )


def views_of_nothing_at_the_end(x):
    """Where torch has drawn one of these before, its picture of another begins at 0."""
    y = x.add(x)
    end = y[y.shape[0] : 0]
    return end.view(-1), end.view(-1, 1), end.view(0, 1), end.reshape(0, 2), end.view(0, 1).view(-1), end[:, None]


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_views_without_elements_begin_where_they_do_in_eager(count: int, training: bool) -> None:
    assert_same_as_eager(
        views_of_nothing_at_the_end, lambda: [torch.randn(count, requires_grad=training)], backward=training
    )


def detached(x):
    y = torch.nn.functional.elu(x)
    return y, y.detach().reshape(-1, y.shape[0]), y[1:]


def detached_first(x):
    y = x.exp()
    return y.detach()[1:], y.detach(), y


def detached_part(x):
    """A near miss: what is detached is memory of its own."""
    y = x.sin()
    return y, y.detach() + 1


@pytest.mark.parametrize("fn", [detached, detached_first, detached_part])
def test_detached_views_of_results_have_no_gradients(fn, dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(4, requires_grad=True)], backward=True, dynamic=dynamic)


# --- writing to views that autograd watches ---------------------------------------------------------------------------


def written_part(split):
    def fn(x):
        y = x.sin()
        first, second = split(y)
        second.mul_(2)
        first[:1] += 1
        return y, first

    return fn


WRITABLE = {
    "tensor_split": lambda y: y.tensor_split(2),
    "tensor_split_at": lambda y: torch.tensor_split(y, (1,), dim=1),
    "hsplit": lambda y: y.hsplit(2),
    "vsplit": lambda y: torch.vsplit(y, 2),
}


@pytest.mark.parametrize("split", WRITABLE.values(), ids=WRITABLE)
def test_parts_that_may_be_written_in_training(split) -> None:
    leaf = lambda: [torch.randn(4, 4, requires_grad=True)]  # noqa: E731
    assert_same_as_eager(written_part(split), leaf, backward=True, fullgraph=True)


@pytest.mark.parametrize("split", [lambda y: y.split(2), lambda y: y.chunk(2), lambda y: y.unbind(0)[:2]])
def test_parts_that_must_not_be_written_in_training(split) -> None:
    fn = written_part(split)
    for each in (fn, compile_strict(fn)):
        with pytest.raises(RuntimeError, match="returns multiple views"):
            each(torch.randn(4, 4, requires_grad=True))


def result_and_itself(x):
    y = x.sin()
    return y.view(-1), y


def itself_and_result(x):
    y = x.sin()
    return y, y.view(-1)


def parts_of_a_result(x):
    return x.sin().tensor_split(2)


def parts_of_an_input(x):
    return *x.tensor_split(2), x * 2


@pytest.mark.parametrize("fn", [result_and_itself, itself_and_result, parts_of_a_result, parts_of_an_input])
@pytest.mark.parametrize("place", [0, 1])
def test_results_that_are_written_after_the_call_in_training(fn, place: int) -> None:
    gradients = []
    for run in (fn, compile_strict(fn, fullgraph=True)):
        torch.manual_seed(0)
        leaf = torch.randn(4, requires_grad=True)
        results = run(leaf * 1)
        results[place].mul_(3)
        sum(result.sum() for result in results).backward()
        gradients.append((leaf.grad, *(result.detach() for result in results)))
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: ((y := x * 2).view(-1), y),
        lambda x: (y := x * 2, y.view(-1)),
        lambda x: ((y := x * 2).view(4), y.view(-1), y),
        lambda x: ((y := x * 2)[:], y, y.view(2, 2)),
    ],
)
def test_results_that_are_the_same_elements_may_be_written(fn, trains):
    """The value itself is no view, whichever of the two comes first; so autograd lets both be written."""
    compiled = compile_strict(fn, fullgraph=True)
    for place in range(len(fn(torch.ones(4)))):
        x = torch.randn(4, requires_grad=trains)
        found, expected = compiled(x), fn(x)
        found[place].mul_(3)
        expected[place].mul_(3)
        torch.testing.assert_close(found, expected)


def unmatched_sizes(x):
    """Torch knows that eight times s // 24 is s // 3 where it makes the view: nothing but guards tells."""
    total = x + 1
    return total, total.view(3, -1, 8), total.view(2, -1, 3).permute(2, 0, 1)


def half_as_many(x):
    total = x + 1
    return total.view(-1, 2), total[: x.shape[0] // 2].view(-1, 4)


def a_view_of_a_result_twice(x):
    total = x.softmax(0)
    view = total.squeeze(-1)
    return view, view.contiguous(), total, total.view(-1)


@pytest.mark.parametrize("fn", [unmatched_sizes, half_as_many, a_view_of_a_result_twice])
@pytest.mark.parametrize("dynamic", [True, False])
def test_views_of_results_are_views(fn, dynamic: bool) -> None:
    assert_same_as_eager(fn, lambda: [torch.randn(48)], dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_view_of_the_memory_behind_nothing(dynamic):
    """A tensor without elements has no address in torch; the memory that it is a part of has one."""

    def fn(x):
        view = x.as_strided((2,), (1,))
        return view.floor() + 1, view[1:].exp()

    assert_same_as_eager(fn, lambda: [torch.randn(5, 2, 2)], prepare=lambda leaf: [leaf[:, 2:]], dynamic=dynamic)


# --- results computed of what was written in place --------------------------------------------------------------------

WRITES = {
    "masked_fill_": lambda x: x.masked_fill_(x > 0, 3),
    "index_put_": lambda x: x.index_put_((torch.tensor([0, 2]),), torch.ones((), dtype=x.dtype)),
    "clamp_": lambda x: x.clamp_(-1, 2),
    "nothing": lambda x: x,
}


def views_of_a_choice(write):
    def fn(x):
        write(x)
        chosen = torch.where(x > 0, x, x)
        turned = chosen.transpose(0, 1)
        return chosen, turned, chosen.select(0, 2), turned.unfold(0, 2, 2), torch.minimum(chosen, x)

    return fn


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", WRITES)
def test_views_of_what_is_computed_after_a_write_share_memory(name: str, dynamic: bool) -> None:
    """What is written keeps its strides, so what is computed of it has them, and its views are views of that."""
    for prepare in (lambda x: [x.t()], lambda x: [x]):
        make = lambda: [torch.arange(-30, 30, dtype=torch.int32).reshape(5, 12)]  # noqa: E731
        assert_same_as_eager(views_of_a_choice(WRITES[name]), make, prepare=prepare, dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("begin", [0, 1])
def test_a_part_of_a_written_input_that_another_input_shares(begin: int, dynamic: bool) -> None:
    """The part begins where it does in the input it was taken of, not in the storage behind both."""

    def fn(x, y):
        part = y.split(5, 0)[-1]
        part.add_(y, alpha=2)
        return part, x[1:] * 2, y[2:4], y.reshape(-1)

    def prepare(whole):
        x = whole[begin:]
        return [x, x.view(-1)]

    assert_same_as_eager(fn, lambda: [torch.arange(6.0)[: 5 + begin]], prepare=prepare, dynamic=dynamic)


def test_a_part_of_an_input_that_another_input_shares_is_written_in_training() -> None:
    def fn(x, y):
        y.mul_(2)
        return y[1:3], x.sum()

    def prepare(whole):
        base = whole * 1
        return [base[1:], base[1:].view(-1)]

    assert_same_as_eager(fn, lambda: [torch.randn(6, requires_grad=True)], prepare=prepare, backward=True)


PAIRS = {
    "overlap": lambda base: [base[:4], base[2:6]],
    "overlap by one": lambda base: [base[:4], base[3:7]],
    "in the other order": lambda base: [base[2:6], base[:4]],
    "lie apart in one": lambda base: [base[:4], base[4:8]],
    "are the same part": lambda base: [base[:4], base[:4]],
    "overlap in a smaller one": lambda base: (lambda small: [small[:4], small[2:]])(base[:6].clone()),
    "have memory of their own": lambda base: [base[:4].clone(), base[2:6].clone()],
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("first", ["overlap", "lie apart in one", "are the same part"])
def test_inputs_may_lie_otherwise_in_the_memory_they_share(first: str, dynamic: bool) -> None:
    """AOTAutograd goes by the offsets of the first call, and no guard sees them: such calls are eager's."""

    def call(fn, pair):
        base = torch.arange(10.0)
        given = PAIRS[pair](base)
        return fn(*given), given, base

    compiled = compile_strict(write_both, dynamic=dynamic)
    torch.testing.assert_close(call(compiled, first), call(write_both, first), rtol=0, atol=0)
    for pair in PAIRS:
        with warnings.catch_warnings():
            if pair != first:
                warnings.simplefilter("ignore", ferrite.FerriteWarning)
            torch.testing.assert_close(call(compiled, pair), call(write_both, pair), rtol=0, atol=0)


def test_inputs_that_are_only_read_may_lie_anywhere() -> None:
    compiled = compile_strict(lambda x, y: x * 2 + y, fullgraph=True)
    for pair in PAIRS.values():  # a warning would be an error
        x, y = pair(torch.arange(10.0))
        torch.testing.assert_close(compiled(x, y), x * 2 + y, rtol=0, atol=0)


def test_inputs_that_lie_otherwise_have_gradients_of_eager() -> None:
    def step(x, y, weight):
        x.add_(1)
        return (y * weight).sum()

    def gradient(fn, pair):
        weight = torch.arange(4.0, requires_grad=True)
        fn(*PAIRS[pair](torch.arange(10.0)), weight).backward()
        return weight.grad

    compiled = compile_strict(step, fullgraph=True)
    assert torch.equal(gradient(compiled, "overlap"), gradient(step, "overlap"))
    with pytest.warns(ferrite.FerriteWarning, match="lie otherwise"):
        assert torch.equal(gradient(compiled, "lie apart in one"), gradient(step, "lie apart in one"))


def piece_and_itself(x):
    piece = x.split(1, 0)[0]
    return piece, piece.flatten(1, -1)


def piece_and_a_view(x):
    piece = x.split(1, 0)[0]
    return piece, piece[None]


@pytest.mark.parametrize("fn", [piece_and_itself, piece_and_a_view])
def test_a_piece_of_an_input_is_one_tensor_in_training(fn) -> None:
    """Whatever it is called: the whole of the input, as a view of it."""
    for sizes in ((1, 1), (1, 3)):
        x = torch.randn(sizes, requires_grad=True)
        torch.compiler.reset()
        one, other = compile_strict(fn)(x)
        first, second = fn(x)
        assert (one is other) is (first is second)
        assert one is not x
