"""Every memory layout a tensor can have on the way in, and eager's layout on the way out."""

from __future__ import annotations

import pytest
import torch

from tests.compare import assert_same_as_eager, assert_same_tree, compile_strict

LAYOUTS = {
    "contiguous": lambda: torch.randn(4, 6),
    "transposed": lambda: torch.randn(6, 4).t(),
    "row_slice": lambda: torch.randn(9, 6)[2:6],
    "column_slice": lambda: torch.randn(4, 13)[:, 3:9],
    "strided": lambda: torch.randn(8, 18)[::2, ::3],
    "expanded_rows": lambda: torch.randn(6).expand(4, 6),
    "expanded_columns": lambda: torch.randn(4, 1).expand(4, 6),
    "expanded_scalar": lambda: torch.randn(()).expand(4, 6),
    "flipped": lambda: torch.randn(4, 6).flip(0, 1),
    "overlapping": lambda: torch.randn(16).as_strided((4, 6), (3, 1)),
    "padded_rows": lambda: torch.randn(4 * 8).as_strided((4, 6), (8, 1)),
    "one_row": lambda: torch.randn(1, 6),
    "one_column": lambda: torch.randn(6, 1).t().expand(4, 6),
    "diagonal": lambda: torch.randn(6, 4, 4).diagonal(dim1=1, dim2=2).t(),
    "empty": lambda: torch.randn(0, 6),
    "empty_inner": lambda: torch.randn(4, 0),
    "zero_dim": lambda: torch.randn(()),
    "one_dim": lambda: torch.randn(11),
    "five_dims_permuted": lambda: torch.randn(2, 3, 1, 4, 5).permute(4, 0, 2, 3, 1),
}


def pointwise(x):
    return (
        x * 2 + 1,
        x.exp(),
        x.clone(),
        torch.zeros_like(x),
        x.to(torch.float64),
        x > 0,
        torch.empty_like(x).fill_(3),
    )


def mixed_with_contiguous(x):
    other = torch.ones(x.shape)
    return x + other, other * x, torch.where(x > 0, x, other), x.add(1).t() if x.dim() == 2 else x


TERMS = {"reductions": 3.0}  # sums of numbers drawn from a normal distribution, which may cancel


def reductions(x):
    return x.sum(), x.mean(-1), x.sum(0, keepdim=True), x.var(-1), x.softmax(-1), x.cumsum(0), x.norm()


def reshaped(x):
    return x.reshape(-1) + 1, x.contiguous() * 2, x.flatten(), x.unsqueeze(0).expand(2, *x.shape) * 3


@pytest.mark.parametrize("fn", [pointwise, mixed_with_contiguous, reductions, reshaped])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(fn, layout: str) -> None:
    assert_same_as_eager(fn, lambda: [LAYOUTS[layout]()], dynamic=False, terms=TERMS.get(fn.__name__, 0.0))


@pytest.mark.parametrize("fn", [pointwise, mixed_with_contiguous, reductions, reshaped])
@pytest.mark.parametrize("layout", ["contiguous", "transposed", "strided", "expanded_rows", "empty"])
def test_layout_with_symbolic_sizes(fn, layout: str) -> None:
    assert_same_as_eager(fn, lambda: [LAYOUTS[layout]()], dynamic=True, terms=TERMS.get(fn.__name__, 0.0))


@pytest.mark.parametrize("layout", [n for n in LAYOUTS if n not in ("contiguous", "one_dim", "overlapping")])
def test_layout_in_training(layout: str) -> None:
    def compute(x: torch.Tensor) -> object:
        return x.sin() * 2, x.sum(), x.reshape(-1) * 3

    assert_same_as_eager(
        compute, lambda: [LAYOUTS[layout]().detach().requires_grad_()], backward=True, dynamic=False, terms=3.0
    )


@pytest.mark.parametrize("left", ["contiguous", "transposed", "strided", "padded_rows", "expanded_rows"])
@pytest.mark.parametrize("right", ["contiguous", "transposed", "column_slice", "expanded_columns"])
def test_matrix_product_of_layouts(left: str, right: str) -> None:
    assert_same_as_eager(
        lambda x, y: (x @ y.t(), x.t() @ y),
        lambda: [LAYOUTS[left](), LAYOUTS[right]()],
        dynamic=False,
    )


def image(*shape: int, **kwargs: object) -> torch.Tensor:
    return torch.randn(*shape, **kwargs).to(memory_format=torch.channels_last)


def volume(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).to(memory_format=torch.channels_last_3d)


@pytest.mark.quick
def test_channels_last_pointwise_keeps_the_format(dynamic: bool) -> None:
    def compute(x: torch.Tensor, bias: torch.Tensor) -> object:
        return x.relu() + bias, x * 2, x.mean((2, 3)), x.sum(1), x.contiguous(), torch.cat([x, x], 1)

    assert_same_as_eager(compute, lambda: [image(2, 3, 5, 7), torch.randn(3, 1, 1)], dynamic=dynamic)


def test_channels_last_3d_pointwise_keeps_the_format(dynamic: bool) -> None:
    assert_same_as_eager(
        lambda x: (x.sigmoid() * 2, x.sum(1), x.mean((2, 3, 4)), x.contiguous()),
        lambda: [volume(2, 3, 4, 5, 6)],
        dynamic=dynamic,
    )


@pytest.mark.parametrize("channels_last", [False, True], ids=["contiguous", "channels_last"])
@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
def test_convolution_keeps_the_format(channels_last: bool, training: bool, dynamic: bool) -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 3, padding=1), torch.nn.BatchNorm2d(8), torch.nn.ReLU(), torch.nn.MaxPool2d(2)
    ).train(training)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)

    def inputs() -> list[torch.Tensor]:
        x = torch.randn(2, 3, 8, 8)
        x = x.to(memory_format=torch.channels_last) if channels_last else x
        return [x.requires_grad_(training)]

    assert_same_as_eager(model, inputs, backward=training, dynamic=dynamic)


def test_convolution_in_three_dimensions_channels_last() -> None:
    model = torch.nn.Conv3d(3, 4, 3, padding=1).to(memory_format=torch.channels_last_3d)
    assert_same_as_eager(model, lambda: [volume(2, 3, 4, 4, 4)], backward=True, dynamic=False)


def test_conversion_between_memory_formats(dynamic: bool) -> None:
    def convert(x: torch.Tensor, y: torch.Tensor) -> object:
        there = x.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last) + 1
        return there, y.contiguous(), y.contiguous(memory_format=torch.channels_last), x + y, y + x

    assert_same_as_eager(convert, lambda: [torch.randn(2, 3, 4, 5), image(2, 3, 4, 5)], dynamic=dynamic)


def test_result_strides_follow_a_permuted_operand(dynamic: bool) -> None:
    def compute(x: torch.Tensor, y: torch.Tensor) -> object:
        return x + y, y + x, x * y.contiguous(), torch.empty_strided((2, 3), (1, 2)).fill_(1) + 1

    assert_same_as_eager(
        compute,
        lambda: [torch.randn(2, 3, 4).permute(2, 0, 1), torch.randn(4, 3, 2).transpose(1, 2)],
        dynamic=dynamic,
    )


@pytest.mark.quick
def test_meta_tensors(dynamic: bool) -> None:
    """Nothing to compute, and still shapes, dtypes and strides to get right."""
    assert_same_as_eager(
        lambda x, y: (x @ y, (x + 1).t(), x.sum(0), x.to(torch.float16), x[1:]),
        lambda: [torch.randn(4, 6, device="meta"), torch.randn(6, 3, device="meta")],
        dynamic=dynamic,
    )


def test_meta_module_in_training() -> None:
    assert_same_as_eager(
        torch.nn.Sequential(torch.nn.Linear(6, 3, device="meta"), torch.nn.ReLU()),
        lambda: [torch.randn(4, 6, device="meta")],
        dynamic=False,
    )


def test_tensors_become_meta_tensors(dynamic: bool) -> None:
    """What a call computes there cannot be compared in numbers, however it is spelled; what it looks like can."""
    assert_same_as_eager(
        lambda x: (x.to("meta").half(), x.to(device="meta", dtype=torch.int64).sum(0), x.to("meta").softmax(1), x + 1),
        lambda: [torch.randn(3, 4)],
        dynamic=dynamic,
    )


def test_new_layout_of_the_same_shape_after_compiling() -> None:
    """Code made for contiguous inputs must not be run on others."""
    compiled = compile_strict(pointwise)
    for layout in ("contiguous", "transposed", "strided", "expanded_rows", "padded_rows", "contiguous"):
        torch.manual_seed(0)
        x = LAYOUTS[layout]()
        assert_same_tree(compiled(x), pointwise(x), pointwise(x.double()), layout)


def strides_along_one(x):
    """`x` has sizes (1, n), and the strides of a column that was transposed."""
    return x + 1, x > 0, x.expand(1, 2, -1, -1), x.unsqueeze(0) / 3, x.flip(1), torch.nn.functional.hardtanh(x)


@pytest.mark.parametrize("make", [lambda: torch.randn(8, 1).t(), lambda: torch.randn(1, 8), lambda: torch.randn(3, 8)])
def test_strides_along_dimensions_of_one(make) -> None:
    assert_same_as_eager(strides_along_one, lambda: [make()])


def test_a_number_spread_over_one_place() -> None:
    assert_same_as_eager(
        lambda x: (x.sum().expand(1), x.sum().expand(3, 1), x.sum().expand(3)), lambda: [torch.randn(4)]
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(16, 0, 2, 6)[:, :, 1:],
        lambda: torch.randn(4, 2, 0, 3).permute(3, 2, 0, 1),
        lambda: torch.randn(1, 2, 3).expand(0, 2, 3).unsqueeze(0),
    ],
)
def test_strides_of_empty_results(make) -> None:
    assert_same_as_eager(
        lambda x: (x * 2, x >= 0, torch.where(x > 0, x, 1.5), x.to(torch.float64), x.flip(0)), lambda: [make()]
    )


def test_views_of_empty_tensors_in_other_shapes() -> None:
    assert_same_as_eager(
        lambda x: (x.flatten(1, 1).reshape(-1), x[: x.shape[0] // 2].reshape(-1, 1, 24)),
        lambda: [torch.randn(0, 12, 2)],
    )
