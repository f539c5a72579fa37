"""Depthwise convolutions: every channel has a window of its own, so that there are no matrices to multiply.

    y[b, c, o]  = bias[c] + sum over r of  x[b, c, o * stride - padding + r * dilation] * weight[c, r]
    gx[b, c, i] = sum over r of            gy[b, c, (i + padding - r * dilation) / stride] * weight[c, r]
    gw[c, r]    = sum over b, o of         gy[b, c, o] * x[b, c, o * stride - padding + r * dilation]

What is read in windows is first written with its edges (and, for the gradient of the input, with its gaps) filled in,
so that no window asks where it ends. It is laid out as the result is, if not said otherwise below; where channels lie
side by side, so do those of the weights. Other convolutions are calls of torch's kernels, or see
`ferrite.lower.ops.dense_convolution`.

A zero at an edge counts as any other, also times an infinite weight; so it does in torch's kernels on Arm, but for the
gradient of the input, which there leaves out what lies outside.

What is left to torch, too, is where its kernels are as fast: the machine knows (`ferrite.machines.beside_torch`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import NotLowered
from ferrite.ir import ONE, ZERO, Expr, Index, arithmetic_type, cast, const, contiguous_strides, index_value, op
from ferrite.lower.builder import Builder
from ferrite.lower.forecasts import OperandLayout
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import copied, in_memory
from ferrite.lower.ops.accumulate import Element
from ferrite.lower.ops.conditions import B8, all_inside, every, guarded
from ferrite.lower.ops.index import I64
from ferrite.lower.ops.pool import spread
from ferrite.lower.ops.views import total
from ferrite.lower.sizes import constant_value
from ferrite.lower.table import lowers
from ferrite.lower.value import Value, own_axes
from ferrite.machines import DepthwiseWindow, host_machine

aten = torch.ops.aten
Places = Callable[[Sequence[Index], Sequence[Index]], list[Index]]


class Window:
    """What a convolution reads for one element: its taps, how far apart they are, and in which order tensors lie."""

    def __init__(self, taps: Sequence[Index], stride: Any, padding: Any, dilation: Any, channels_last: bool) -> None:
        self.taps, self.channels_last = tuple(taps), channels_last
        self.stride, self.padding, self.dilation = (spread(value, len(taps)) for value in (stride, padding, dilation))
        self.reach = [step * (size - ONE) for step, size in zip(self.dilation, self.taps, strict=True)]

    def strides(self, sizes: Sequence[Index]) -> tuple[Index, ...]:
        """Dense ones, with the channels where they are."""
        if not self.channels_last:
            return contiguous_strides(sizes)
        first, *others, channel = contiguous_strides([sizes[0], *sizes[2:], sizes[1]])
        return first, channel, *others

    def at(self, place: Sequence[Index], tap: Sequence[Index]) -> list[Index]:
        """Where a tap of a window is, in what has edges."""
        steps = zip(place, self.stride, tap, self.dilation, strict=True)
        return [item * step + inner * far for item, step, inner, far in steps]

    def with_edges(self, ctx: Builder, x: Value, outputs: Sequence[Index]) -> Value:
        """The input as windows read it: with zeros around it."""
        if not any(self.padding):
            if self.channels_last and x.is_whole and x.box.expr is not None:
                x.box.strides = self.strides(x.sizes)
            return in_memory(ctx, x)
        sizes = [
            (count - 1) * step + far + 1 for count, step, far in zip(outputs, self.stride, self.reach, strict=True)
        ]
        place = [item - pad for item, pad in zip(own_axes([*x.sizes[:2], *sizes])[2:], self.padding, strict=True)]
        return self.filled(ctx, x, sizes, place, all_inside(place, x.sizes[2:]))

    def filled(self, ctx: Builder, x: Value, sizes: Sequence[Index], place: Sequence[Index], there: Expr) -> Value:
        whole = (*x.sizes[:2], *sizes)
        batch, channel, *_ = own_axes(whole)
        value = guarded(there, x.at([batch, channel, *place]), const(0, x.dtype))
        found = ctx.lazy(whole, value, x.device)
        found.box.strides = self.strides(whole)
        return in_memory(ctx, found)


class Depthwise(Window):
    """A convolution of each channel by itself."""

    def __init__(
        self,
        ctx: Builder,
        weight: Value,
        result: torch.Tensor | None,
        *,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        groups: Any,
        output_padding: Any,
    ) -> None:
        """`result`: torch's fake value of what is computed. Of a padding of the output only transposed ones know."""
        many = constant_value(total(weight.sizes[2:]))
        if transposed or weight.sizes[1] is not ONE or weight.sizes[0] is not ctx.index(groups):
            raise NotLowered("convolution: a kernel of torch")
        if weight.device.type != "cpu" or not weight.dtype.is_floating_point:
            raise NotLowered("convolution: a kernel of torch")
        if many is None or many > host_machine().depthwise.max_taps:
            raise NotLowered("convolution: a kernel of torch, as its window is large")
        if not all(type(value) is int for value in (*stride, *padding, *dilation)):
            raise NotLowered("convolution: a kernel of torch, as its steps are not known")
        super().__init__(weight.sizes[2:], stride, padding, dilation, is_channels_last(ctx, result))
        self.count, self.wide = many, arithmetic_type(weight.dtype)

    def leave(self, gradients: bool, computed_by_channels: bool = False) -> None:
        """Leave to torch what it does as fast; and gradients whose strides it does not forecast, as those of its own
        kernels, where oneDNN is switched off. Otherwise, have the channels as loops are fastest."""
        if gradients and self.channels_last and not torch.backends.mkldnn.enabled:
            raise NotLowered("convolution: a kernel of torch, of which strides are not known without oneDNN")
        has_steps = any(step > 1 for step in self.stride)
        given = DepthwiseWindow(self.count, gradients, self.channels_last, has_steps, computed_by_channels)
        fastest = host_machine().depthwise.channels_last(given)
        if fastest is None:
            raise NotLowered("convolution: a kernel of torch, which is as fast")
        self.channels_last = fastest

    def back_at(self, place: Sequence[Index], tap: Sequence[Index]) -> list[Index]:
        """Where the result is that has an element of the input at this tap, in what has gaps."""
        steps = zip(place, self.reach, tap, self.dilation, strict=True)
        return [item + reach - inner * far for item, reach, inner, far in steps]

    def windowed(
        self, ctx: Builder, source: Value, weight: Value, sizes: Sequence[Index], at: Places, dtype: torch.dtype
    ) -> Value:
        """The sum over the taps: what the source has there, times the weights of its channel."""
        weights = self.weights(ctx, weight)

        def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
            batch, channel, *place = outer
            value = cast(source.at([batch, channel, *at(place, inner)]), self.wide)
            return op("mul", value, cast(weights.at([channel, ZERO, *inner]), self.wide))

        return summed(ctx, sizes, self.taps, element, dtype, source.device)

    def with_gaps(self, ctx: Builder, grad: Value, inputs: Sequence[Index]) -> Value:
        """The gradient of the output, as windows around an element of the input read it: with zeros around each."""
        sizes = [size + far for size, far in zip(inputs, self.reach, strict=True)]
        axes = own_axes([*grad.sizes[:2], *sizes])[2:]
        steps = [item - far + pad for item, far, pad in zip(axes, self.reach, self.padding, strict=True)]
        place = [item // step for item, step in zip(steps, self.stride, strict=True)]
        met = [
            op("eq", index_value(item % step), const(0, I64), dtype=B8)
            for item, step in zip(steps, self.stride, strict=True)
            if step > 1
        ]
        return self.filled(ctx, grad, sizes, place, every(all_inside(place, grad.sizes[2:]), *met))

    def weights(self, ctx: Builder, weight: Value) -> Value:
        """The weights, side by side where the channels are."""
        if not self.channels_last:
            return in_memory(ctx, weight)
        channels, _, *taps = weight.sizes
        return copied(ctx, weight, (ONE, ONE, *(step * channels for step in contiguous_strides(taps))))


def is_channels_last(ctx: Builder, fake: torch.Tensor | None) -> bool:
    """Whether a tensor has its channels side by side, and not its last dimension."""
    if fake is None:
        return False
    laid = OperandLayout(ctx.shape(fake), ctx.sizes.indices(fake.stride()))
    return laid.has_channels_last and not laid.is_contiguous


def is_computed_by_channels(ctx: Builder, x: Value) -> bool:
    """Whether it is computed from an image of our own that has its channels side by side, and not its places."""
    if x.box.expr is None or x.rank != len(x.box.sizes):
        return False
    images = [ctx.buffers[name] for name in x.box.expr.loads if ctx.buffers[name].kind == "owned"]
    return any(
        image.strides[1] is ONE and image.sizes[1] is not ONE and image.strides != contiguous_strides(image.sizes)
        for image in images
        if image.sizes[:2] == x.box.sizes[:2] and len(image.sizes) == x.rank
    )


def summed(
    ctx: Builder,
    sizes: Sequence[Index],
    over: Sequence[Index],
    element: Element,
    dtype: torch.dtype,
    device: torch.device,
) -> Value:
    (found,) = add_reduce(ctx, "sum", sizes, over, [element], [dtype], device)
    assert found is not None
    return found


@lowers(aten.convolution.default)
def convolution(ctx: Builder, x: Value, weight: Value, bias: Value | None, **window: Any) -> Value:
    sizes = ctx.out_sizes
    how = Depthwise(ctx, weight, ctx.out, **window)
    how.leave(gradients=False, computed_by_channels=is_computed_by_channels(ctx, x))
    found = how.windowed(ctx, how.with_edges(ctx, x, sizes[2:]), weight, sizes, how.at, how.wide)
    axes = own_axes(sizes)
    value = found.at(axes)
    if bias is not None:
        value = op("add", value, cast(bias.at([axes[1]]), how.wide))
    return ctx.lazy(sizes, cast(value, ctx.out_dtype), x.device)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    ctx: Builder,
    grad_output: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    output_mask: Sequence[bool],
    **window: Any,
) -> tuple[Value | None, Value | None, Value | None]:
    how = Depthwise(ctx, weight, ctx.out[0], **window)
    how.leave(gradients=True)
    grad = in_memory(ctx, grad_output)
    of_input, of_weight, of_bias = output_mask
    return (
        input_gradient(ctx, how, grad, x, weight) if of_input else None,
        weight_gradient(ctx, how, grad, x, weight) if of_weight else None,
        bias_gradient(ctx, how, grad, weight) if of_bias else None,
    )


def input_gradient(ctx: Builder, how: Depthwise, grad: Value, x: Value, weight: Value) -> Value:
    return how.windowed(ctx, how.with_gaps(ctx, grad, x.sizes[2:]), weight, x.sizes, how.back_at, x.dtype)


def weight_gradient(ctx: Builder, how: Depthwise, grad: Value, x: Value, weight: Value) -> Value:
    source = how.with_edges(ctx, x, grad.sizes[2:])

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        (channel, _, *tap), (batch, *place) = outer, inner
        value = cast(source.at([batch, channel, *how.at(place, tap)]), how.wide)
        return op("mul", value, cast(grad.at([batch, channel, *place]), how.wide))

    return summed(ctx, weight.sizes, [grad.sizes[0], *grad.sizes[2:]], element, weight.dtype, grad.device)


def bias_gradient(ctx: Builder, how: Depthwise, grad: Value, weight: Value) -> Value:
    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        return cast(grad.at([inner[0], outer[0], *inner[1:]]), how.wide)

    return summed(ctx, weight.sizes[:1], [grad.sizes[0], *grad.sizes[2:]], element, weight.dtype, grad.device)
