"""Convolutions that are loops of our own: sums over the channels of an image and the taps of a window.

    y[b, c, o] = sum over k, r of  x[b, k, o * stride - padding + r * dilation] * weight[c, k, r]

The image is read in windows, channels side by side. It is written so first where it has edges, which are filled in, as
no window asks where it ends; and where it is memory of others that lies otherwise. Memory of our own the scheduler lays
out so (`ferrite.schedule.cpu.convolution_images`). A constant weight may lie in panels, in the order of its use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ferrite.ir import ONE, ZERO, Expr, Index, op
from ferrite.lower.builder import Builder
from ferrite.lower.loops import add_reduce
from ferrite.lower.memory import copied, in_memory, strides_in_storage
from ferrite.lower.ops.convolution import Window
from ferrite.lower.table import lowers_later
from ferrite.lower.value import Value, own_axes


@lowers_later("ferrite.convolution.default")
def convolution(ctx: Builder, x: Value, weight: Value, stride: Any, padding: Any, dilation: Any) -> Value:
    window = Window(weight.sizes[2:], stride, padding, dilation, channels_last=True)

    def weight_at(channel: Index, inner: Index, taps: Sequence[Index]) -> Expr:
        return in_memory(ctx, weight).at((channel, inner, *taps))

    return summed_windows(ctx, x, window, weight.sizes[1], weight_at)


@lowers_later("ferrite.convolution_of_panels.default")
def convolution_of_panels(
    ctx: Builder, x: Value, panels: Value, channels: object, stride: Any, padding: Any, dilation: Any
) -> Value:
    """The same, of a weight whose channels are in panels."""
    width = panels.sizes[-1]
    window = Window(panels.sizes[1:-2], stride, padding, dilation, channels_last=True)

    def weight_at(channel: Index, inner: Index, taps: Sequence[Index]) -> Expr:
        return in_memory(ctx, panels).at((channel // width, *taps, inner, channel % width))

    return summed_windows(ctx, x, window, panels.sizes[-2], weight_at)


def summed_windows(
    ctx: Builder, x: Value, window: Window, inputs: Index, weight_at: Callable[[Index, Index, Sequence[Index]], Expr]
) -> Value:
    """Sums of the image times the weight, which is asked for by a channel of the result, one of the image, and taps. A
    channel of the result has so many `inputs`: where the image has more, they are its group's."""
    image = seen_in_windows(ctx, window, x, ctx.out_sizes[2:])
    batch, channel, *place = own_axes(ctx.out_sizes)
    over = (*window.taps, inputs)
    groups = x.sizes[1] // inputs
    group = ZERO if groups is ONE else channel // (ctx.out_sizes[1] // groups)
    *taps, inner = own_axes(over, "r")
    value = op(
        "mul", image.at((batch, group * inputs + inner, *window.at(place, taps))), weight_at(channel, inner, taps)
    )
    (result,) = add_reduce(ctx, "sum", ctx.out_sizes, over, [value], [ctx.out_dtype], x.device)
    assert result is not None
    return result


def seen_in_windows(ctx: Builder, window: Window, x: Value, outputs: Sequence[Index]) -> Value:
    if any(window.padding):
        return window.with_edges(ctx, x, outputs)
    if ctx.buffers[in_memory(ctx, x).box.buffer or ""].kind == "owned" and x.is_whole:
        return x  # the scheduler decides how it lies
    found = strides_in_storage(ctx, x)
    if found is not None and (found[0][1] is ONE or x.sizes[1] is ONE):
        return x
    return copied(ctx, x, window.strides(x.sizes))
