"""Depthwise convolutions: every channel has a window of its own, so that there are no matrices to multiply.

    y[b, c, o]  = bias[c] + sum over r of  x[b, c, o * stride - padding + r * dilation] * weight[c, r]
    gx[b, c, i] = sum over r of            gy[b, c, (i + padding - r * dilation) / stride] * weight[c, r]
    gw[c, r]    = sum over b, o of         gy[b, c, o] * x[b, c, o * stride - padding + r * dilation]

What is read in windows is first written with its edges (and, for the gradient of the input, with its gaps) filled in,
so that no window asks where it ends. It is laid out as the result is; where channels lie side by side, so do those of
the weights. Other convolutions are calls of torch's kernels.

A zero at an edge counts as any other, also times an infinite weight; so it does in torch's kernels on Arm, but for the
gradient of the input, which there leaves out what lies outside.

What is left to torch, too, is where its kernels are as fast (measured, two threads, windows of 3x3 to 7x7). On Arm that
is the result where channels lie side by side; gradients are 3 to 25 times as fast here. On x86 torch generates code for
the very window: small ones without steps are 1.0 to 2.1 times as fast here where channels lie apart, and gradients of
large ones 1.1 to 12 times.
"""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from typing import Any

import torch

from ferrite.ir.expr import Expr, cast, const, index_value, op
from ferrite.ir.index import ONE, ZERO, Index
from ferrite.ir.types import arithmetic_type
from ferrite.lower.context import Context, contiguous, known
from ferrite.lower.ops.conditions import B8, all_inside, every, guarded
from ferrite.lower.ops.index import I64
from ferrite.lower.ops.pool import spread
from ferrite.lower.table import NotLowered, lowers
from ferrite.lower.value import Value, own_axes

aten = torch.ops.aten
MOST_TAPS = 64
FEW_TAPS = 9
ON_X86 = platform.machine().lower() in ("x86_64", "amd64")


class Depthwise:
    """A depthwise convolution: its window, and in which order its tensors lie."""

    def __init__(
        self,
        ctx: Context,
        weight: Value,
        stride: Any,
        padding: Any,
        dilation: Any,
        transposed: bool,
        groups: Any,
        channels_last: bool,
    ) -> None:
        self.taps = weight.sizes[2:]
        n = len(self.taps)
        kernel = [known(size) for size in self.taps]
        if transposed or weight.sizes[1] is not ONE or weight.sizes[0] is not ctx.index(groups):
            raise NotLowered("convolution: a kernel of torch")
        if weight.device.type != "cpu" or not weight.dtype.is_floating_point:
            raise NotLowered("convolution: a kernel of torch")
        if None in kernel or math.prod(size for size in kernel if size is not None) > MOST_TAPS:
            raise NotLowered("convolution: a kernel of torch, as its window is large")
        if not all(type(value) is int for value in (*stride, *padding, *dilation)):
            raise NotLowered("convolution: a kernel of torch, as its steps are not known")
        self.stride, self.padding, self.dilation = (spread(value, n) for value in (stride, padding, dilation))
        self.reach = [step * (size - ONE) for step, size in zip(self.dilation, self.taps, strict=True)]
        self.channels_last = channels_last
        self.is_small = math.prod(size for size in kernel if size is not None) <= FEW_TAPS
        self.has_steps = any(step > 1 for step in self.stride)
        self.wide = arithmetic_type(weight.dtype)

    def leave(self, gradients: bool) -> None:
        """Leave to torch what it does as fast; and gradients whose strides it does not forecast, as those of its own
        kernels, where oneDNN is switched off."""
        if gradients and self.channels_last and not torch.backends.mkldnn.enabled:
            raise NotLowered("convolution: a kernel of torch, of which strides are not known without oneDNN")
        if ON_X86:
            plain = not self.channels_last and not self.has_steps
            pays = plain or not self.is_small if gradients else plain and self.is_small
        else:
            pays = gradients or not self.channels_last
        if not pays:
            raise NotLowered("convolution: a kernel of torch, which is as fast")

    def strides(self, sizes: Sequence[Index]) -> tuple[Index, ...]:
        """Dense ones, with the channels where they are."""
        if not self.channels_last:
            return contiguous(sizes)
        first, *others, channel = contiguous([sizes[0], *sizes[2:], sizes[1]])
        return first, channel, *others

    def at(self, place: Sequence[Index], tap: Sequence[Index]) -> list[Index]:
        """Where a tap of a window is, in what has edges."""
        steps = zip(place, self.stride, tap, self.dilation, strict=True)
        return [item * step + inner * far for item, step, inner, far in steps]

    def with_edges(self, ctx: Context, x: Value, outputs: Sequence[Index]) -> Value:
        """The input as windows read it: with zeros around it."""
        if not any(self.padding):
            return ctx.in_memory(x)
        sizes = [
            (count - 1) * step + far + 1 for count, step, far in zip(outputs, self.stride, self.reach, strict=True)
        ]
        place = [item - pad for item, pad in zip(own_axes([*x.sizes[:2], *sizes])[2:], self.padding, strict=True)]
        return self.filled(ctx, x, sizes, place, all_inside(place, x.sizes[2:]))

    def with_gaps(self, ctx: Context, grad: Value, inputs: Sequence[Index]) -> Value:
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

    def filled(self, ctx: Context, x: Value, sizes: Sequence[Index], place: Sequence[Index], there: Expr) -> Value:
        whole = (*x.sizes[:2], *sizes)
        batch, channel, *_ = own_axes(whole)
        value = guarded(there, x.at([batch, channel, *place]), const(0, x.dtype))
        found = ctx.lazy(whole, value, x.device)
        found.box.strides = self.strides(whole)
        return ctx.in_memory(found)

    def weights(self, ctx: Context, weight: Value) -> Value:
        """The weights, side by side where the channels are."""
        if not self.channels_last:
            return ctx.in_memory(weight)
        channels, _, *taps = weight.sizes
        return ctx.copied(weight, (ONE, ONE, *(step * channels for step in contiguous(taps))))


def is_channels_last(ctx: Context, fake: Any) -> bool:
    """Whether a tensor has its channels side by side, and not its last dimension."""
    strides = ctx.sizes.indices(fake.stride()) if isinstance(fake, torch.Tensor) else ()
    return bool(strides) and strides[1] is ONE and strides[-1] is not ONE


@lowers(aten.convolution.default)
def convolution(
    ctx: Context,
    x: Value,
    weight: Value,
    bias: Value | None,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
) -> Value:
    sizes = ctx.out_sizes
    how = Depthwise(ctx, weight, stride, padding, dilation, transposed, groups, is_channels_last(ctx, ctx.out))
    how.leave(gradients=False)
    source, weights = how.with_edges(ctx, x, sizes[2:]), how.weights(ctx, weight)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        batch, channel, *place = outer
        value = cast(source.at([batch, channel, *how.at(place, inner)]), how.wide)
        return op("mul", value, cast(weights.at([channel, ZERO, *inner]), how.wide))

    (total,) = ctx.reduce("sum", sizes, how.taps, [element], [how.wide], x.device)
    assert total is not None
    axes = own_axes(sizes)
    found = total.at(axes)
    if bias is not None:
        found = op("add", found, cast(bias.at([axes[1]]), how.wide))
    return ctx.lazy(sizes, cast(found, ctx.out_dtype), x.device)


@lowers(aten.convolution_backward.default)
def convolution_backward(
    ctx: Context,
    grad_output: Value,
    x: Value,
    weight: Value,
    bias_sizes: Any,
    stride: Any,
    padding: Any,
    dilation: Any,
    transposed: bool,
    output_padding: Any,
    groups: Any,
    output_mask: Sequence[bool],
) -> tuple[Value | None, Value | None, Value | None]:
    how = Depthwise(ctx, weight, stride, padding, dilation, transposed, groups, is_channels_last(ctx, ctx.out[0]))
    how.leave(gradients=True)
    grad = ctx.in_memory(grad_output)
    of_input = input_gradient(ctx, how, grad, x, weight) if output_mask[0] else None
    of_weight = weight_gradient(ctx, how, grad, x, weight) if output_mask[1] else None
    of_bias = None
    if output_mask[2]:
        over = [grad.sizes[0], *grad.sizes[2:]]

        def gradient(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
            return cast(grad.at([inner[0], outer[0], *inner[1:]]), how.wide)

        (total,) = ctx.reduce("sum", [weight.sizes[0]], over, [gradient], [how.wide], grad.device)
        assert total is not None
        of_bias = ctx.convert(total, weight.dtype)
    return of_input, of_weight, of_bias


def input_gradient(ctx: Context, how: Depthwise, grad: Value, x: Value, weight: Value) -> Value:
    source, weights = how.with_gaps(ctx, grad, x.sizes[2:]), how.weights(ctx, weight)

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        batch, channel, *place = outer
        steps = zip(place, how.reach, inner, how.dilation, strict=True)
        at = [item + far - tap * step for item, far, tap, step in steps]
        value = cast(source.at([batch, channel, *at]), how.wide)
        return op("mul", value, cast(weights.at([channel, ZERO, *inner]), how.wide))

    (total,) = ctx.reduce("sum", x.sizes, how.taps, [element], [how.wide], x.device)
    assert total is not None
    return ctx.convert(total, x.dtype)


def weight_gradient(ctx: Context, how: Depthwise, grad: Value, x: Value, weight: Value) -> Value:
    source = how.with_edges(ctx, x, grad.sizes[2:])

    def element(outer: Sequence[Index], inner: Sequence[Index]) -> Expr:
        channel, _, *tap = outer
        batch, *place = inner
        value = cast(source.at([batch, channel, *how.at(place, tap)]), how.wide)
        return op("mul", value, cast(grad.at([batch, channel, *place]), how.wide))

    over = [grad.sizes[0], *grad.sizes[2:]]
    (total,) = ctx.reduce("sum", weight.sizes, over, [element], [how.wide], x.device)
    assert total is not None
    return ctx.convert(total, weight.dtype)
