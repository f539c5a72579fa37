"""Where a batch norm becomes part of the layer before it, and where not: the examples of `conv_bn`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from ferrite.rewrite import Case


def parameters(*shape: int, channels: int = 4) -> list[torch.Tensor]:
    """A weight, the statistics, and what the norm multiplies and adds."""
    mean, gamma, beta = (torch.randn(channels, requires_grad=index > 0) for index in range(3))
    return [torch.randn(*shape, requires_grad=True), mean, torch.rand(channels) + 0.5, gamma, beta]


def conv_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 3, 6, 6, requires_grad=True), *parameters(4, 3, 3, 3)]


def frozen_inputs() -> list[torch.Tensor]:
    return [value.detach() for value in conv_inputs()]


def conv_norm(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return F.batch_norm(torch.conv2d(x, w), mean, var, gamma, beta, False, 0.1, 1e-5)


def strided_norm(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return F.batch_norm(torch.conv2d(x, w, stride=2, padding=1), mean, var, gamma, beta, eps=1e-3)


def conv_norm_plain(x: Any, w: Any, b: Any, mean: Any, var: Any) -> Any:
    y = torch.conv2d(input=x, weight=w, bias=b, stride=2, padding="valid", groups=1)
    return F.batch_norm(input=y, running_mean=mean, running_var=var)


def linear_norm(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return F.batch_norm(F.linear(x, w), mean, var, gamma, beta)


def transposed_norm(x: Any, w: Any, mean: Any, var: Any, gamma: Any, beta: Any) -> Any:
    return F.batch_norm(torch.conv_transpose1d(x, w, stride=2, groups=2), mean, var, gamma, beta)


def norm_of_read_twice(x: Any, w: Any, *norm: Any) -> Any:
    y = torch.conv2d(x, w)
    return F.batch_norm(y, *norm), y.relu()


def written_between(x: Any, w: Any, *norm: Any) -> Any:
    w = w * 1
    y = torch.conv2d(x, w)
    w.zero_()
    return F.batch_norm(y, *norm), w


def examples(**options: Any) -> tuple[Case, ...]:
    return (
        Case("a convolution without bias", conv_norm, conv_inputs, options),
        Case("stride and padding stay", strided_norm, conv_inputs, options),
        Case(
            "arguments by name, a bias, no scale and shift",
            conv_norm_plain,
            lambda: [torch.randn(2, 3, 7, 7), torch.randn(4, 3, 3, 3), torch.randn(4), torch.randn(4), torch.ones(4)],
            options,
        ),
        Case("a linear layer", linear_norm, lambda: [torch.randn(5, 3), *parameters(4, 3)], options),
        Case(
            "a transposed convolution in groups",
            transposed_norm,
            lambda: [torch.randn(2, 6, 5, requires_grad=True), *parameters(6, 2, 3)],
            options,
        ),
        Case(
            "bfloat16 with statistics in float32",
            conv_norm,
            lambda: [
                torch.randn(2, 3, 6, 6, dtype=torch.bfloat16),
                torch.randn(4, 3, 3, 3, dtype=torch.bfloat16),
                *(value.detach() for value in parameters(1)[1:]),
            ],
            options,
        ),
    )


def near_misses(**options: Any) -> tuple[Case, ...]:
    return (
        Case("the convolution is read twice", norm_of_read_twice, conv_inputs, options),
        Case(
            "the norm is training",
            lambda x, w, mean, var, gamma, beta: F.batch_norm(torch.conv2d(x, w), mean, var, gamma, beta, True),
            conv_inputs,
            options,
        ),
        Case("the weight is written between the two", written_between, frozen_inputs, options),
        Case(
            "an image alone: its rows would be taken for channels",
            conv_norm,
            lambda: [torch.randn(3, 6, 6), *parameters(4, 3, 3, 3)],
            options,
        ),
        Case(
            "a linear layer on sequences, as long as wide",
            linear_norm,
            lambda: [torch.randn(2, 4, 3), *parameters(4, 3)],
            options,
        ),
        Case(
            "float16 could overflow",
            conv_norm,
            lambda: [value.half() for value in frozen_inputs()],
            options,
        ),
        Case("no convolution", lambda x, mean, var: F.batch_norm(x.relu(), mean, var), norm_inputs, options),
    )


def norm_inputs() -> list[torch.Tensor]:
    return [torch.randn(2, 4, 5), torch.randn(4), torch.rand(4) + 0.5]
