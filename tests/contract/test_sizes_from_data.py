"""What is known of sizes: by guards, from the first line on; of numbers that data decides, once it has been checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo.config
import torch.nn.functional as F

import ferrite
from tests.compare import assert_same_as_eager, compile_strict, reset


@pytest.fixture(autouse=True)
def data_may_decide() -> Iterator[None]:
    reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def assert_as_eager(compiled: Any, fn: Any, *args: Any) -> None:
    try:
        expected = fn(*args)
    except Exception as problem:
        with pytest.raises(type(problem)):
            compiled(*args)
    else:
        torch.testing.assert_close(compiled(*args), expected, check_stride=True)


# --- guards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("one", "other"), [(4, 8), (8, 4), (8, 8), (4, 4), (12, 4)])
def test_a_size_that_a_guard_has_found_to_be_one_is_broadcast(one, other):
    def fn(x, y):
        return x.view(-1, 4) * y.view(-1, 4)

    compiled = compile_strict(fn, dynamic=True)
    for times in (1, 2):
        assert_as_eager(compiled, fn, torch.randn(one if one == 4 else one * times), torch.randn(other))


def test_sizes_that_a_guard_has_found_equal():
    def fn(x, y):
        return x.view(-1, 2) + y.view(-1, 3)[:, :2], x.view(2, -1).sum(0)

    compiled = compile_strict(fn, dynamic=True)
    for rows in (4, 6, 2):
        assert_as_eager(compiled, fn, torch.randn(2 * rows), torch.randn(3 * rows))


# --- assertions -------------------------------------------------------------------------------------------------------


def test_a_size_that_is_asserted_is_checked():
    def fn(x):
        found = x.nonzero()
        torch._check(found.size(0) == 4)
        return found.t() + 3

    compiled = compile_strict(fn, fullgraph=True)
    for row in ([1, 1, 1, 1, 0, 0], [0, 1, 1, 1, 1, 0], [1, 0, 0, 0, 0, 0], [1] * 6, [0] * 6):
        assert_as_eager(compiled, fn, torch.tensor(row))


@pytest.mark.parametrize("condition", ["n == 6", "n > 2", "n < 7", "n % 3 == 0", "n == k", "n == 2 * k", "n <= k + 3"])
def test_a_number_that_is_asserted_is_checked(condition):
    namespace: dict[str, Any] = {"torch": torch}
    text = f"""
def fn(x, y, v):
    n, k = x.item(), y.item()
    torch._check(n >= 0)
    torch._check(k >= 0)
    torch._check({condition})
    return torch.zeros(n) + 1, torch.arange(k) * 2, v * n
"""
    exec(text, namespace)
    fn = namespace["fn"]
    compiled = compile_strict(fn, fullgraph=True)
    for n, k in ((6, 3), (6, 6), (7, 3), (2, 1), (9, 2), (3, 9)):
        assert_as_eager(compiled, fn, torch.tensor(n), torch.tensor(k), torch.randn(5))


def test_what_a_function_of_the_user_says_of_sizes_is_checked():
    @torch.library.custom_op("ferrite_tests::first_rows", mutates_args=())
    def first_rows(x: torch.Tensor, count: int) -> torch.Tensor:
        return x[:count].clone()

    @first_rows.register_fake
    def _(x, count):
        return x.new_empty(4, x.shape[1])  # right for a count of 4 alone

    def fn(x, count: int):
        return first_rows(x, count) * 2 + 1

    compiled = compile_strict(fn, fullgraph=True, dynamic=False)
    x = torch.randn(8, 3)
    torch.testing.assert_close(compiled(x, 4), fn(x, 4))
    with pytest.raises(RuntimeError, match=r"ferrite_tests\.first_rows\.default gave has not the size 4"):
        compiled(x, 2)


# --- sizes from data --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dynamic", [None, True])
def test_sizes_of_a_result_decide_how_it_lies(dynamic):
    def fn(x, y):
        found = torch.nonzero(x)
        return found.expand([-1, 128]), y.expand([-1, found.size(0)]), found.t() + 1

    compiled = compile_strict(fn, fullgraph=True, dynamic=dynamic)
    for row in ([1, 0, 1], [1, 1, 1], [1, 1, 0]):
        assert_as_eager(compiled, fn, torch.tensor(row), torch.randn(3, 1))


@pytest.mark.parametrize("dynamic", [None, True])
def test_an_output_has_strides_by_a_number_from_data(dynamic):
    def fn(x, w, count):
        n = count.item()
        torch._check(n > 1)
        return x.expand(n, 32) @ w.expand(32, n)

    compiled = compile_strict(fn, fullgraph=True, dynamic=dynamic)
    for n in (5, 3, 1):
        assert_as_eager(compiled, fn, torch.randn(1, 32), torch.randn(32, 1), torch.tensor(n))


def test_selected_elements_in_loops():
    def fn(x):
        chosen = torch.masked_select(x, x > 0)
        return chosen * 2 + 1, torch.cat([chosen, x])[:3].sin(), chosen.sum()

    compiled = compile_strict(fn, fullgraph=True, dynamic=True)
    for size in (6, 9, 4):
        assert_as_eager(compiled, fn, torch.randn(size))


# --- numbers from data that nothing carries on ------------------------------------------------------------------------


def unread_places(x):
    x.nonzero()
    return x.cos()


def unread_choice(x):
    x[x > 0].unique()
    return x.sin() @ x


def branch_on_a_checked_number(x):
    first = x[0].long().item()
    torch._check(first >= -9)
    return x * 2 if first >= -9 else x * 3


def filled_with_a_number(x):
    filled = torch.tanh(x).clone()
    filled.fill_(x[1].item())
    return F.embedding(torch.clamp(filled, 0, x.size(0) - 1).long(), x.unsqueeze(1))


def filled_by_a_count(x):
    filled = torch.zeros_like(x)
    filled.add_((x > 0).sum().item())
    return filled


@pytest.mark.parametrize("dynamic", [None, True])
@pytest.mark.parametrize(
    "fn", [unread_places, unread_choice, branch_on_a_checked_number, filled_with_a_number, filled_by_a_count]
)
def test_a_number_from_data_that_leads_to_no_result(fn, dynamic):
    compiled = compile_strict(fn, fullgraph=True, dynamic=dynamic)
    for size in (6, 9):
        assert_as_eager(compiled, fn, torch.randn(size))


def test_random_numbers_at_unread_places_are_drawn():
    def fn(x):
        torch.rand(x.nonzero().size(0))  # how far the generator moves is decided by data, and nothing else is left
        return x + torch.rand(4)

    compiled = compile_strict(fn, fullgraph=True)
    for row in ([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]):
        torch.manual_seed(5)
        expected = fn(torch.tensor(row))
        torch.manual_seed(5)
        torch.testing.assert_close(compiled(torch.tensor(row)), expected)


def test_sizes_are_found_where_a_call_is_kept_and_where_it_is_dropped():
    def fn(x):
        x.nonzero()
        kept = x.nonzero()
        return kept, kept.sum(0), x[: kept.size(0)]

    compiled = compile_strict(fn, fullgraph=True)
    for row in ([1.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0]):
        assert_as_eager(compiled, fn, torch.tensor(row))


# --- fractions from data on the host ----------------------------------------------------------------------------------


def test_fractions_and_truths_from_data_are_results():
    def fn(x):
        number = (x + 1).item()
        truths = number > 2, number <= 2, number != number, number == number, number + 1 > number
        return *truths, number, number * 0.1, x * 2 if number > 2 else x * 3

    compiled = compile_strict(fn)
    for value in (3.0, 0.5, -1.0, float("inf"), float("nan"), 1e300, -0.0):
        x = torch.tensor(value, dtype=torch.float64)
        found, expected = compiled(x), fn(x)
        assert list(map(type, found)) == list(map(type, expected))
        assert str(found) == str(expected)


def test_a_call_is_given_a_fraction_from_data():
    def fn(x, y):
        high = (x * 0.5).item()
        return torch.histc(y, 4, 0.0, high), y * high

    compiled = compile_strict(fn, fullgraph=True)
    for value in (3.0, 0.7):
        assert_as_eager(compiled, fn, torch.tensor(value), torch.rand(9))


def test_a_whole_number_out_of_a_fraction_is_a_size_and_a_result():
    def fn(x):
        number = (x + 1).item()
        return torch.ones(int(number)), int(number), int(number) + 1

    compiled = compile_strict(fn)
    for value in (3.5, 2.0, 6.9):
        assert_as_eager(compiled, fn, torch.tensor(value))


# --- sizes of nothing -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(0, 0, 2), (0, 3, 2), (3, 0, 2), (3, 2, 0), (0, 0, 0)], ids=str)
def test_one_reduction_after_another_over_nothing(sizes):
    def fn(x):
        return (x > 0).any(-1).sum(), x.sum(-1).sum(0), (x * 2).sum()

    assert_as_eager(compile_strict(fn, fullgraph=True), fn, torch.randn(sizes))


def test_a_size_that_torch_only_assumes_is_never_taken_for_true():
    """`expand(2, 2)` leaves no size but 2 for the part, says torch while it traces; with one element eager expands."""

    def fn(x, count):
        part = x[: count.item()]
        return part.expand((2, 2)) + 1, part * 2

    compiled = compile_strict(fn, fullgraph=True)
    x = torch.randn(5)
    torch.testing.assert_close(compiled(x, torch.tensor(2)), fn(x, torch.tensor(2)))
    with pytest.raises(RuntimeError, match="has not the size 2"):
        compiled(x, torch.tensor(1))


@pytest.mark.parametrize("dynamic", [False, True])
def test_an_expanded_result_without_elements(dynamic):
    def fn(x, y):
        x.add_(1)
        return x.expand(-1, 0), y.transpose(0, 1)

    assert_same_as_eager(
        fn, lambda: [torch.ones(17, 1), torch.ones(0, 3)], dynamic=dynamic, options={"check_bounds": True}
    )


@pytest.mark.parametrize(
    "write",
    [
        lambda found: found.sub_(found),
        lambda found: found[1:-1].add_(-1),
        lambda found: found.add_(found, alpha=2).mul_(3),
    ],
)
@pytest.mark.parametrize(
    "find", [lambda x: x.nonzero()[:, 0], lambda x: x.unique(), lambda x: x.repeat_interleave(torch.arange(len(x)))]
)
def test_writes_into_as_many_elements_as_data_say(find: Any, write: Any) -> None:
    """Whether the sizes of a write fit is decided by data; what it returns is what it wrote into."""

    def fn(x: torch.Tensor) -> torch.Tensor:
        found = find(x) + 0
        write(found)
        return found

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = compile_strict(fn)
        for x in (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([3, 1, 0, 0, 7])):
            assert torch.equal(compiled(x), fn(x))


@pytest.mark.parametrize(
    "shaped", [torch.squeeze, lambda found: found.squeeze(0), lambda found: found, lambda found: found.expand(3)]
)
def test_a_size_that_can_only_be_one_is_squeezed_and_broadcast(shaped):
    """torch knows the number of different elements only as a range, from 1 to 1, once `reshape` has said so."""

    def fn(x, scale):
        return shaped(torch.unique(x).reshape([1])) * scale

    compiled = compile_strict(fn, fullgraph=True)
    scale = torch.randn(3, requires_grad=True)
    assert_as_eager(compiled, fn, torch.ones(4), scale)
    assert_as_eager(compiled, fn, torch.full((4,), 2.0), scale)
    assert_as_eager(compiled, fn, torch.arange(4.0), scale)  # an error: more than one is different


@pytest.mark.parametrize(
    "reshaped", [lambda z: z.reshape(1).squeeze(), lambda z: z.view(1).squeeze(0), lambda z: z.view(1, 1)[0]]
)
def test_a_reshape_that_asserts_a_size_is_kept_where_it_changes_nothing(reshaped):
    """Without it nobody knows the size to be one when the graph is differentiated, and what was squeezed is not."""

    def fn(x, scale):
        return reshaped(torch.unique(x) + 1) * scale

    compiled = compile_strict(fn, fullgraph=True)
    scale = torch.randn(3, requires_grad=True)
    assert_as_eager(compiled, fn, torch.ones(4), scale)
    assert_as_eager(compiled, fn, torch.arange(4.0), scale)  # an error: more than one is different


# --- numbers that are lists -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("indices", [[1, 2, 3], [4], [0, 10], []])
def test_a_tensor_in_the_place_of_a_list_of_numbers(indices):
    """Looking for the overload that is meant reads its elements, and each would leave a symbol that nothing carries."""

    def fn(x, places):
        return [part.sum() + 1 for part in torch.tensor_split(x * 2, places)]

    compiled = compile_strict(fn, dynamic=False)
    for x in (torch.randn(10, 5), torch.randn(10, 5)):
        assert_as_eager(compiled, fn, x, torch.tensor(indices, dtype=torch.int64))


def test_a_tensor_in_the_place_of_a_list_of_numbers_along_another_dimension():
    def fn(x, places):
        return torch.tensor_split(x.sin(), places, dim=1)

    assert_as_eager(compile_strict(fn), fn, torch.randn(3, 6), torch.tensor([2, 5]))


# --- names of sizes ---------------------------------------------------------------------------------------------------


def narrowed(x):
    count = (x > 0).any(-1).sum().item()
    head = x[:count]
    return count, x.narrow(0, 0, count), head.sum()


def narrowed_further_on(x):
    count = (x > 0).any(-1).sum().item()
    head = x[:count]
    return count, x.narrow(0, 1, count) * 2, head


@pytest.mark.parametrize("fn", [narrowed, narrowed_further_on])
def test_a_size_that_data_decides_keeps_its_name(fn):
    """The end of the slice becomes a plain number after it was captured, and torch knows then that it fits."""
    compiled = compile_strict(fn, dynamic=True)
    for x in (torch.tensor([0, 3, 4]), torch.tensor([-1, -1]), torch.ones(7, dtype=torch.int64)):
        assert_as_eager(compiled, fn, x)


# --- numbers that torch takes for sizes -------------------------------------------------------------------------------


def start(x, count):
    return x.narrow(0, 0, count) * 2 + x


def both_parts(x, count):
    first, second = x.split([count, x.size(0) - count])
    return first * 2 + x, second


def sliced(x, count):
    return x[:count] - x, x[:count] + 1


def of_three(x, count):
    part = x[count:]
    torch._check(part.size(0) == 3)
    return part * 2


@pytest.mark.parametrize("fn", [start, both_parts, sliced, of_three])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_where_data_say_another_number_than_torch_takes_it_for_that_is_an_error(fn, count):
    """To add the part and the whole, torch takes the count for the size of the whole. It asserts that while tracing,
    and drops the assertion in what is compiled: the whole, then, would be taken for the part."""

    def counted(x):
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count <= x.size(0))
        return fn(x, count)

    x = torch.arange(1.0, 7.0) * torch.tensor([1] * count + [-1] * (6 - count))
    reset()
    traced = torch.compile(counted, backend="eager", dynamic=True, fullgraph=True)
    assert_as_eager(compile_strict(counted, dynamic=True), traced, x)


def test_a_number_that_is_no_size_is_not_asserted_to_be_one():
    def fn(x):
        count = (x > 0).sum().item()
        torch._check(count >= 0)
        torch._check(count <= x.size(0))
        return x.narrow(0, 0, count) * 2, x[count:]

    compiled = compile_strict(fn, dynamic=True)
    for count in (1, 3, 6):
        assert_as_eager(compiled, fn, torch.arange(1.0, 7.0) * torch.tensor([1] * count + [-1] * (6 - count)))


# --- kernels over sizes from data -------------------------------------------------------------------------------------


def test_padding_of_few_elements_from_data():
    """At most four: there is one block of them, and what is stored after the block is stored once."""

    def fn(x):
        return F.pad((F.pad(x, (2, 1), value=2) > 0).nonzero()[:, 0], (-1, 1), value=2)

    compiled = compile_strict(fn, dynamic=True)
    for x in (torch.tensor([3]), torch.tensor([-3]), torch.tensor([0])):
        assert_as_eager(compiled, fn, x)


def test_strides_that_are_computed_before_a_call_have_memory_of_their_own():
    def fn(x):
        part = x.split(4, 1)[-1].to(torch.float32)
        return part.split(4, 1)[0], part.reshape((-1, 1, 8))

    assert_same_as_eager(fn, lambda: [torch.randn(4, 16, requires_grad=True)], dynamic=True, backward=True)


def inner_part_written(x):
    found = x[x > 0]
    found[1:-1] *= 0
    return found, found[1:-1]


@pytest.mark.parametrize("count", [1, 5])
@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
def test_parts_that_begin_where_data_decides(count: int) -> None:
    """Of one element at most, both ends of the part are the end of the whole."""
    assert_same_as_eager(inner_part_written, lambda: [torch.arange(1.0, count + 1)])


def test_a_number_that_views_of_a_written_input_need_and_that_is_returned():
    def fn(x):
        count = (x > 0).sum().item()
        part = x.narrow(0, 0, count)
        x.zero_()
        return part, count, x[:count]

    assert_same_as_eager(fn, lambda: [torch.tensor([1.0, 2.0, -1.0, 3.0])])


# --- what guards say of sums ------------------------------------------------------------------------------------------


def test_a_sum_of_sizes_that_guards_hold_to_be_a_number() -> None:
    """Each part is a result of its own, so that their number is guarded: `2 * n + n // 2` is 20, and n is 8."""

    def fn(x):
        first, _ = x.tensor_split(2, 1)
        return first, torch.cat([x, x, first], 1).split(1, -1)[-1]

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for size in (8, 4, 5):
        ours = torch.randn(size, 4, requires_grad=True)
        theirs = ours.detach().clone().requires_grad_()
        for leaf, run in ((ours, compiled), (theirs, fn)):
            sum(each.sum() for each in run(leaf.t())).backward()
        assert torch.equal(ours.grad, theirs.grad)


def test_a_quotient_of_sizes_that_guards_hold_to_be_a_number() -> None:
    def fn(x):
        parts = torch.cat([x, x[: x.shape[0] // 4]]).split(x.shape[0])
        return parts[-1] * 2, x.view(4, -1).sum(0) + parts[0][: x.shape[0] // 4]

    reset()
    compiled = compile_strict(fn, dynamic=True)
    for size in (4, 8, 12, 8):
        assert_as_eager(compiled, fn, torch.randn(size))


# --- memory whose size data decides -----------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [0, 3])
def test_memory_is_not_written_before_its_size_is_known(value: int) -> None:
    """The first part of the concatenation needs no size itself, only the memory that it is written into does."""

    def fn(x):
        turned = x.flip(0)
        found = torch.masked_select(turned, turned > 0)
        joined = torch.cat([turned, found, found], 0)
        x.relu_()
        return joined, torch.cat([x * 2, found])

    assert_same_as_eager(fn, lambda: [torch.tensor([value])], dynamic=True)


@pytest.mark.parametrize("begin", [0, 8])
def test_memory_is_not_read_before_it_is_known_where_it_begins(begin: int) -> None:
    def fn(x, places, flat):
        total = places.scatter_reduce(0, torch.zeros_like(places), places, reduce="sum")
        flat.index_add_(0, places, flat[places] * 2)
        return total, total - flat, x @ x.transpose(-1, -2)

    def prepare(whole, places):
        x = whole[begin:].view(2, 3, 4)
        return [x, places, x.view(-1)]

    assert_same_as_eager(fn, lambda: [torch.arange(24.0 + begin), torch.tensor([5])], prepare=prepare)


def beside_ones(x: torch.Tensor, n: torch.Tensor) -> Any:
    y = x.sin()
    return torch.cat([y, x.new_ones(int(n.item()), 3)]), y


def above_places(x: torch.Tensor, mask: torch.Tensor) -> Any:
    y = x * 2
    places = mask.nonzero().float()
    return torch.cat([y[:, :1], places]), torch.cat([places, y[:, 2:]]), y


def into_zeros(x: torch.Tensor, mask: torch.Tensor) -> Any:
    y = x * 2
    out = x.new_zeros(mask.nonzero().shape[0] + 4, 3)
    out[:4] = y
    return out, y


def after_the_size(x: torch.Tensor, mask: torch.Tensor) -> Any:
    """A near miss: all that is fused comes after the size."""
    places = mask.nonzero().float()
    y = x * places.sum()
    return torch.cat([y[:, :1], places]), y


@pytest.mark.parametrize("fn", [beside_ones, above_places, into_zeros, after_the_size])
def test_a_row_of_a_tensor_is_written_once_its_length_is_known(fn: Any) -> None:
    """What is computed before the size, and written into a part of a tensor that has it, waits for the size."""

    def make() -> list[torch.Tensor]:
        return [torch.randn(4, 3), torch.tensor(2) if fn is beside_ones else torch.tensor([True, False, True])]

    assert_same_as_eager(fn, make, fullgraph=True)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, n: torch.cat([x.new_zeros(n, 4), x.sin()]),
        lambda x, n: F.pad(x.sin()[:n], (0, 0, 2, 1)).cos(),
        lambda x, n: x.exp()[:n].repeat(2, 1) * 3,
        lambda x, n: x.sin()[:n] + 1,
    ],
    ids=["added", "padded", "repeated", "the_number_itself"],
)
def test_gradients_whose_size_is_computed_from_a_number(fn: Any) -> None:
    """torch has a name of its own for the number in the size of the incoming gradient."""

    def bounded(x: torch.Tensor, n: torch.Tensor) -> torch.Tensor:
        rows = n.item()
        torch._check(rows >= 1)
        torch._check(rows <= 6)
        return fn(x, rows)

    def make() -> list[torch.Tensor]:
        return [torch.randn(6, 4, requires_grad=True), torch.tensor(2)]

    assert_same_as_eager(bounded, make, backward=True, fullgraph=True)


@pytest.mark.parametrize("padding", [(1, 1, 0, 2), (0, 0, 1, 1), (0, 2), (-1, 0, 0, 1)])
def test_strides_that_are_computed_from_numbers(padding: tuple[int, ...]) -> None:
    """A result that was padded has eager's strides, in which the number has another name than in the graph."""

    def fn(x: torch.Tensor, n: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
        rows, columns = n.item(), m.item()
        for each in (rows, columns):
            torch._check(each >= 2)
            torch._check(each <= 4)
        return F.pad(x[:rows, :columns], padding)

    assert_same_as_eager(fn, lambda: [torch.randn(6, 4), torch.tensor(2), torch.tensor(3)], fullgraph=True)


# --- views that begin where data says ---------------------------------------------------------------------------------

CUT_BY_TENSORS = {
    "step": lambda x, a, b, s: (x[a:b:s], x[a:b:s] * 2),
    "step_of_rows": lambda x, a, b, s: x.reshape(4, 5).t()[a:b:s],
    "part_of_a_step": lambda x, a, b, s: x[a:b:s][1:],
    "nothing": lambda x, a, b, s: (x.narrow(0, a, 0), x.narrow(0, a, 0).sum() + x),
    "three": lambda x, a, b, s: (x.narrow(0, a, 3), x.narrow(0, a, 3)[1:] + 1),
    "three_of_a_result": lambda x, a, b, s: (x + 1)[1:].narrow(0, a, 3)[1:] * 2,
    "written": lambda x, a, b, s: (x.narrow(0, a, 3).mul_(2), x + 0),
}


@pytest.mark.parametrize("name", CUT_BY_TENSORS)
def test_slices_between_numbers_of_tensors(name, dynamic):
    """Data decides where they begin and how far apart their elements lie; `x` itself begins anywhere in its memory."""
    fn = CUT_BY_TENSORS[name]
    compiled = compile_strict(fn, fullgraph=True, dynamic=dynamic)
    for offset, numbers in ((0, (1, 5, 2)), (3, (2, 4, 1))):
        ours, eager = (torch.arange(24.0)[offset : offset + 20] for _ in range(2))
        cuts = list(map(torch.tensor, numbers))
        found, expected = compiled(ours, *cuts), fn(eager, *cuts)
        torch.testing.assert_close(found, expected, check_stride=True)
        assert torch.equal(ours, eager)
        first, other = (each if isinstance(each, torch.Tensor) else each[0] for each in (found, expected))
        if other.untyped_storage().data_ptr() == eager.untyped_storage().data_ptr():
            assert first.untyped_storage().data_ptr() == ours.untyped_storage().data_ptr()
            assert first.storage_offset() == other.storage_offset()


def test_results_that_nobody_asked_for_are_not_looked_at():
    """On a GPU torch gives None for the counts and places that `unique` was not asked for."""
    assert_same_as_eager(lambda x: (x.unique(), x * 2), lambda: [torch.tensor([3, 1, 3])])
    (graph,) = ferrite.last_compile().graphs
    assert graph.source.count(".size(") == 1, graph.source


# --- dimensions -------------------------------------------------------------------------------------------------------


def reasons_for_eager() -> set[str]:
    return {call.reason for graph in ferrite.last_compile().graphs for call in graph.eager_calls}


def test_a_dimension_that_goes_where_data_make_its_size_one():
    """Torch's fake value of the squeezed result has one dimension; eager's has none where there is one element."""

    def fn(x):
        found = x.unique()
        few = found.squeeze(0)
        return found, few, few * 2

    compiled = torch.compile(fn, backend="ferrite", dynamic=True)
    for x in ([1, 2, 3], [1, 1], [5]):
        assert_as_eager(compiled, fn, torch.tensor(x))
    assert reasons_for_eager() == {"data decide how many dimensions there are"}


def test_what_is_saved_of_such_a_dimension():
    def fn(x):
        few = x[x > 0].squeeze()
        return (few * few.exp()).sum()

    compiled = torch.compile(fn, backend="ferrite", dynamic=True)
    for values in ([1.0, 2.0, -1.0], [1.0, -1.0], [-1.0]):
        one, other = (torch.tensor(values, requires_grad=True) for _ in range(2))
        compiled(one).backward()
        fn(other).backward()
        torch.testing.assert_close(one.grad, other.grad)


def test_dimensions_that_guards_know_are_compiled():
    """Near misses: another dimension goes, or the number of elements is asserted."""

    def fn(x):
        found = x.unique().unsqueeze(1)
        torch._check(found.size(0) > 1)
        return found.squeeze(0), found.squeeze(1) + 1

    compiled = compile_strict(fn, dynamic=True)
    for x in ([1, 2, 3], [1, 2]):
        assert_as_eager(compiled, fn, torch.tensor(x))
    assert "data decide how many dimensions there are" not in reasons_for_eager()


MADE_OF_ONE_AT_MOST = {
    "roll": lambda v: (v.roll(2, 0), v.roll(2), v.flip(0)),
    "sum": lambda v: (v.sum(), v.cumsum(0), v.softmax(0), v - v.mean()),
    "view": lambda v: ((v * 2).view(1, -1), v[:, None] + v, v[v.shape[0] // 2 :]),
    "index": lambda v: (v[torch.arange(v.shape[0])], v.gather(0, torch.zeros(1, dtype=torch.int64)), v.repeat(3)),
}


@pytest.mark.parametrize("name", MADE_OF_ONE_AT_MOST)
def test_a_size_from_data_that_can_only_be_one(name: str) -> None:
    """`narrow` says that there is one, and no more than one can be found. torch writes 1 for some of such sizes."""

    def fn(x):
        found = x.unique()
        return *MADE_OF_ONE_AT_MOST[name](found), found.narrow(0, 0, 1)

    assert_as_eager(compile_strict(fn), fn, torch.tensor(3.0))


def test_a_size_from_data_that_may_be_more_is_none_of_these() -> None:
    """Near miss."""

    def fn(x):
        found = x.unique()
        return found.roll(2, 0), found.flip(0), found.narrow(0, 0, 1)

    compiled = compile_strict(fn)
    for x in (torch.tensor([3.0, 3.0]), torch.tensor([3.0, 2.0])):
        assert_as_eager(compiled, fn, x)


def test_what_was_written_lies_as_what_was_found() -> None:
    """Places lie side by side: (u0, 1) with strides (1, u0), whether there are any or not."""

    def fn(x):
        places = x.nonzero()
        places.sub_(1, alpha=2)
        return places >= 0, places

    for x in (torch.randn(3), torch.tensor([0.0, 1.0, 0.0])):
        assert_as_eager(compile_strict(fn), fn, x)
