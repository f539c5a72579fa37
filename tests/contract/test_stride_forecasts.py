"""Operators that give other strides than torch forecasts: the numbers are right whatever lies where."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

import ferrite
import ferrite.backend
from ferrite.lower import lower_graph
from tests.compare import assert_same_as_eager, compile_strict
from tests.custom_operators import by_columns


@pytest.mark.usefixtures("llvm_kernels")
def test_what_kernels_read_is_where_they_expect_it():
    x = torch.randn(5, 7)
    for function in (lambda x: by_columns(x) * 2, lambda x: by_columns(x)[1:, ::2] + 1):
        compiled = compile_strict(function)
        assert torch.equal(compiled(x), function(x))
        assert ferrite.last_compile().kernels


def test_a_result_that_no_kernel_reads_has_the_strides_of_eager():
    assert_same_as_eager(lambda x: (by_columns(x), x + 1), lambda: [torch.randn(5, 7)])


def gradient(function):
    torch.manual_seed(0)
    x, w = torch.randn(5, 7), torch.randn(5, 7, requires_grad=True)
    function(x, w).sum().backward()
    return w.grad


def scaled(x, w):
    return by_columns(x) * w * 3


@pytest.mark.usefixtures("llvm_kernels")
def test_what_is_kept_for_the_backward_graph_is_where_it_expects_it():
    assert torch.equal(gradient(compile_strict(scaled)), gradient(scaled))
    assert [bool(graph.kernels) for graph in ferrite.last_compile().graphs] == [True, True]


@pytest.mark.usefixtures("llvm_kernels")
def test_so_it_is_where_the_forward_graph_runs_in_eager(monkeypatch, tmp_path):
    def only_backward(graph, *about):
        if graph.kind.value == "forward":
            raise ValueError("forward only")
        return lower_graph(graph, *about)

    monkeypatch.setattr(ferrite.backend, "lower_graph", only_backward)
    compiled = torch.compile(scaled, backend="ferrite", options={"repro_dir": str(tmp_path)})
    with pytest.warns(ferrite.FerriteWarning, match="forward only"):
        ours = gradient(compiled)
    assert torch.equal(ours, gradient(scaled))
    forward, backward = ferrite.last_compile().graphs
    assert forward.failure
    assert backward.kernels


@torch.library.custom_op("ferrite_forecasts::halved", mutates_args=())
def halved(x: torch.Tensor) -> torch.Tensor:
    return (x / 2).to(torch.float16)


@halved.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@pytest.mark.parametrize("function", [lambda x, w: halved(x) * w * 3, lambda x, w: halved(x)[1:] * w[1:] * 3])
def test_what_kernels_read_has_the_type_that_they_expect(function):
    """Elements of another size would be read beyond the end of their memory, in either direction."""
    compiled = compile_strict(function, options={"check_bounds": True})
    with torch.no_grad():
        x, w = torch.ones(5, 7), torch.ones(5, 7)
        assert torch.equal(compiled(x, w), function(x, w))
    whole = torch.round(torch.randn(5, 7) * 8)
    grads = []
    for each in (compiled, function):
        w = torch.ones(5, 7, requires_grad=True)
        each(whole, w).sum().backward()
        grads.append(w.grad)
    assert torch.equal(*grads)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("training", [True, False])
def test_running_statistics_of_a_batch_that_has_gaps(dtype, training):
    """Without numbers for sizes torch forecasts statistics in single precision, whatever they were before."""

    def fn(x, mean, variance, weight):
        return F.batch_norm(x, mean, variance, weight, None, training, 0.5, 0.6)

    def inputs():
        values = [torch.randn(5, 4, 6), *(torch.rand(4) + 1 for _ in range(3))]
        return [each.to(dtype).repeat_interleave(2, -1)[..., ::2] for each in values]

    assert_same_as_eager(fn, inputs, dynamic=True, options={"check_bounds": True})


def by_rows_and_columns(shape):
    return lambda: [torch.randn(shape), torch.randn(shape).transpose(-1, -2).contiguous().transpose(-1, -2)]


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.copysign(y, x),
        lambda x, y: torch.div(y, x, rounding_mode="floor"),
        lambda x, y: torch.special.xlog1py(y, x.abs()),
        lambda x, y: y.roll(1, 1),
        lambda x, y: F.logsigmoid(y),
    ],
    ids=["copysign", "div", "xlog1py", "roll", "logsigmoid"],
)
def test_operators_that_are_forecast_wrong(function, dynamic):
    assert_same_as_eager(function, by_rows_and_columns((4, 6, 5)), dynamic=dynamic)


@pytest.mark.parametrize("operator", [torch.mul, torch.add, torch.maximum])
def test_one_element_spread_over_a_transposed_tensor_in_half_precision(operator):
    """Its strides say nothing, so the result lies as the other operand does, and so do views of it."""

    def fn(one, x):
        result = operator(one.expand(3, 5), x.t())
        return result, result.unsqueeze(0)

    assert_same_as_eager(fn, lambda: [torch.randn(1, 1, dtype=torch.bfloat16), torch.randn(5, 3, dtype=torch.bfloat16)])


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_repeated_over_a_transposed_tensor(dtype, training, rarely_dynamic):
    """Strides of 0 say nothing about the order of dimensions. The forecast in half precision is made of copies, whose
    strides do; the next result and the gradients lie as the first result does."""

    def fn(rows, x):
        first = rows.unsqueeze(1).expand(5, 3) * x.t()
        second = first + rows[:, None].expand(5, 3)
        return first, second, torch.maximum(rows[:3].expand(5, 3), x.t()).unsqueeze(0), (first * x.t()).sum(1)

    def inputs():
        return [torch.randn(size, dtype=dtype, requires_grad=training) for size in ((5,), (3, 5))]

    assert_same_as_eager(fn, inputs, backward=training, dynamic=rarely_dynamic)


def test_gradients_of_a_loss_of_angles_lie_as_eagers():
    """They are sums of products with repeated rows, in half precision."""

    def inputs():
        signs = torch.tensor([1, -1, 1, 1, -1]).bfloat16()
        return [*(torch.randn(5, 5).bfloat16().t().requires_grad_() for _ in range(2)), signs]

    assert_same_as_eager(F.cosine_embedding_loss, inputs, backward=True)


def stepped():
    return [torch.randn(4, 16), torch.randn(16, 16).t().unsqueeze(1)]


@pytest.mark.parametrize("training", [False, True])
def test_a_scaled_sum_of_operands_in_different_order(training):
    """With symbolic sizes it is forecast as two calls; the result, and what is made of it, lies as eager has it."""

    def fn(x, y):
        result = torch.add(y, x, alpha=2)
        part = result[:8]
        result.clamp_(min=-1)
        return part, result, torch.sub(result * 2, x, alpha=3).exp()

    assert_same_as_eager(
        fn, lambda: [each.requires_grad_(training) for each in stepped()], backward=training, dynamic=True
    )
    assert_same_as_eager(lambda x, y: y + x, stepped, dynamic=True)


@pytest.mark.parametrize("dynamic", [False, True])
def test_scaled_sums_one_after_the_other(dynamic):
    """A sum with a factor, of a difference with one, written through and returned with a part of it."""

    def fn(x, y):
        difference = torch.sub(y, y, alpha=2)
        result = torch.add(difference, x, alpha=2)
        part = result[:8]
        result.clamp_(min=-1)
        return difference, part, result

    def inputs():
        return [torch.randn(4, 16), torch.randn(256).as_strided((16, 1, 16), (1, 16, 16))]

    assert_same_as_eager(fn, inputs, dynamic=dynamic)


@pytest.mark.parametrize(
    ("matrix", "vector"),
    [
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float64),
        (torch.float32, torch.float32),
    ],
)
def test_a_product_without_elements_has_the_type_that_eager_gives_it(matrix, vector):
    """Some versions of torch let the types of a matrix and a vector differ then, and forecast the matrix's."""

    def fn(x, y):
        product = x @ y
        total = product.sum(0, keepdim=True).cumsum(0)
        return product, product * 2, torch.stack([total, total], 0)

    x, y = torch.zeros(2, 0, dtype=matrix), torch.zeros(0, dtype=vector)
    compiled = compile_strict(fn, fullgraph=True, options={"check_bounds": True})
    try:
        expected = fn(x, y)
    except RuntimeError:
        with pytest.raises(RuntimeError):
            compiled(x, y)
        return
    torch.testing.assert_close(compiled(x, y), expected, rtol=0, atol=0)
    found = compiled(x.requires_grad_(), y.requires_grad_())  # the gradients that come in have the result's type, too
    sum(each.sum() for each in found).backward()
    assert (x.grad.dtype, y.grad.dtype) == (matrix, vector)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: torch.select_scatter(x, y[0], 0, 1) + 1,
        lambda x, y: torch.slice_scatter(x, y[:3], 0, 1, 4),
        lambda x, y: torch.diagonal_scatter(x, y[0]),
        lambda x, y: torch.select_scatter(y, x[0], 0, 1),
    ],
)
def test_writing_into_a_tensor_of_one_row_at_many_places(function, dynamic):
    """Eager copies it first, row by row."""
    assert_same_as_eager(function, lambda: [torch.randn(1, 5).expand(5, 5), torch.randn(5, 5)], dynamic=dynamic)


@pytest.mark.parametrize(("training", "dynamic"), [(False, True), (True, False)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5), (2, 3, 4, 5, 6)], ids=str)
@pytest.mark.parametrize("channels_last", [False, True])
def test_a_normalised_batch_has_its_channels_last_or_is_contiguous(shape, channels_last, training, dynamic):
    """The forecast is that it lies as it did before."""

    def fn(x, mean, variance):
        y = F.batch_norm(x, mean, variance, training=training)
        return y, y + 1

    def inputs():
        x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
        if channels_last:  # with gaps
            x = torch.randn(shape[0], *shape[2:], shape[1] * 2).movedim(-1, 1)[:, ::2]
        return [x, torch.zeros(3), torch.ones(3)]

    assert_same_as_eager(fn, inputs, dynamic=dynamic)
    assert not ferrite.last_compile().graphs[0].eager_calls


@pytest.mark.parametrize(("training", "dynamic"), [(False, True), (True, False)])
@pytest.mark.parametrize("shape", [(2, 3, 4), (2, 3, 4, 5)], ids=str)
def test_so_has_its_gradient(shape, training, dynamic):
    def fn(x, mean, variance, weight):
        return F.batch_norm(x, mean, variance, weight, training=training)

    def inputs():
        x = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
        return [x.requires_grad_(), torch.zeros(3), torch.ones(3), torch.rand(3, requires_grad=True)]

    assert_same_as_eager(fn, inputs, backward=True, dynamic=dynamic)


@pytest.mark.parametrize(
    "function",
    [lambda x: F.pixel_unshuffle(x, 1), lambda x: F.pixel_unshuffle(x, 2), lambda x: torch.channel_shuffle(x, 2)],
)
@pytest.mark.parametrize("width", [0, 4])
def test_pictures_without_pixels_stay_as_they_are(function, width):
    """Their sizes too, whatever the forecast says."""
    assert_same_as_eager(lambda x: (function(x), x + 1), lambda: [torch.randn(2, 4, 6, 6)[..., :width]])


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("function", [torch.fft.ifft, torch.fft.ihfft, torch.fft.rfft])
def test_spectra_of_real_numbers_lie_where_the_library_puts_them(function, dynamic: bool):
    def fn(x):
        return function(x, dim=1), function(x, dim=1) * 2, function(x, dim=0)

    assert_same_as_eager(fn, lambda: [torch.randn(2, 6, 7)], dynamic=dynamic)
    assert_same_as_eager(fn, lambda: [torch.randn(7, 6, 2).permute(2, 1, 0)], dynamic=dynamic)
    assert_same_as_eager(fn, lambda: [torch.randint(9, (1, 10, 14), dtype=torch.uint8)[:, :, ::2]], dynamic=dynamic)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", ["hardtanh", "elu", "logit", "threshold"])  # the last is iterated over its input first
def test_a_gradient_that_lies_otherwise_than_the_input(name, dynamic):
    numbers = {"hardtanh": (-1.0, 1.0), "threshold": (0.1,), "logit": ()}
    backward = getattr(torch.ops.aten, f"{name}_backward")

    def fn(gradient, x):
        if name == "elu":
            return backward(gradient, 1.0, 1.0, 1.0, False, x)
        return backward(gradient, x, *numbers[name])

    assert_same_as_eager(fn, lambda: [torch.rand(4, 5), torch.rand(5, 4).t()], dynamic=dynamic)
    assert_same_as_eager(fn, lambda: [torch.rand(5, 4).t(), torch.rand(4, 5)], dynamic=dynamic)


def test_least_and_greatest_of_rows_without_columns():
    assert_same_as_eager(lambda x: torch.aminmax(x, dim=1, keepdim=True), lambda: [torch.empty(4, 3, 0)])


def channels_last(*sizes: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(torch.Size(sizes).numel()).view(sizes).to(dtype).to(memory_format=torch.channels_last)


def order_changes(x):
    """The parts of what is rolled are joined with their channels last; the forecast is a contiguous tensor."""
    rolled = x.roll(1, 3)
    return rolled.index_fill(0, torch.tensor([1]), 2), rolled.flip(2) + 1, rolled.exp().sort(1)[0]


def order_stays(x):
    """A near miss: a batch of parts has no channels."""
    rolled = x.flatten(2).roll(1, 2)
    return rolled.index_fill(0, torch.tensor([1]), 2), rolled.flip(2) + 1


@pytest.mark.parametrize("function", [order_changes, order_stays])
@pytest.mark.parametrize(
    ("sizes", "dynamic"),
    [((2, 8, 8, 16), False), ((2, 8, 8, 16), True), ((2, 16, 64, 80), False)],
    ids=["small", "unknown", "large"],
)
def test_what_is_made_of_a_call_in_eager_goes_by_how_it_lies(function, sizes, dynamic):
    assert_same_as_eager(function, lambda: [channels_last(*sizes) / 100], dynamic=dynamic)


def signs_in_another_order(x, y):
    """`copysign` goes by the operands in another order than the forecast."""
    signed = torch.copysign(x, y)
    return signed.clone(), signed * 2, signed.flip(0)


def test_what_is_made_of_signs():
    assert_same_as_eager(signs_in_another_order, lambda: [torch.randn(4, 6).t(), torch.randn(6, 4)])


@pytest.mark.parametrize("columns", [1, 4])
def test_a_part_picked_by_indices_of_which_one_size_is_one(columns):
    """Of dimensions of one element the iteration over source and indices decides, whatever the sizes of the source."""

    def picked(x, places):
        found = x[places]
        found.add_(places.view(-1, 1, 1), alpha=2)
        return found, torch.nn.functional.elu(found)

    compiled = compile_strict(picked, dynamic=True)
    for rows in (4, 8):
        x = torch.randn(columns, rows, 16).permute(1, 2, 0)
        for got, wanted in zip(*(each(x, torch.arange(columns)) for each in (compiled, picked)), strict=True):
            torch.testing.assert_close(got, wanted, check_stride=True)
