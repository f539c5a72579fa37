"""Convolutions whose windows do not overlap are matrix products.

    convolution(x, w, b)                  one by one        =>      w as a matrix @ x as a matrix + b
    convolution(x, w, b, stride=k)        k by k            =>      the same, with x cut into patches
    convolution_backward(g, x, w, ...)                      =>      a product for each gradient, a sum for the bias

An image is a matrix with a column for each window; where its channels lie side by side, with a row for each. Only
patches have to be copied for that.

On a CPU torch's kernels for convolutions take longer. Measured with two threads, batches of 1 and 8, on Arm and on x86
with AVX-512, the product takes 0.19 to 0.98 of the time, those of the gradients 0.23 to 0.95. No faster are small ones,
and the result of one by one where channels lie side by side: they are left.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferrite.capture import gradients_of_pointwise_weights_lie_as_images, known_contiguous, torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.machines import host_machine
from ferrite.passes.shared.cases import whole_numbers as of
from ferrite.rewrite import Case, NodeRule, Site

aten = torch.ops.aten
INPUT, WEIGHT, BIAS = range(3)  # the gradients


@dataclass(frozen=True)
class Along:
    """One dimension of an image: its size, and of how many windows, how large, one every so many elements."""

    size: Any  # a number, or the node of the graph that tells it
    count: Any
    window: int
    step: int

    @property
    def seen(self) -> Any:
        """How many elements the windows see, as if side by side."""
        return self.count if self.window == 1 else self.count * self.window


@dataclass(frozen=True)
class WindowProduct:
    """A convolution that is a product. `last`: channels lie side by side."""

    site: Site
    batch: Any
    inputs: int
    outputs: int
    space: tuple[Along, ...]
    last: bool

    # --- what is written ----------------------------------------------------------------------------------------------

    def reshaped(self, value: Any, *shape: Any) -> Any:
        return self.site.call(aten.reshape.default, value, list(shape))

    def permuted(self, value: Any, *order: int) -> Any:
        return self.site.call(aten.permute.default, value, list(order))

    def transposed(self, matrix: Any) -> Any:
        """Of each matrix of a batch, too."""
        *batch, rows, columns = range(fake_value(matrix).ndim)
        return self.permuted(matrix, *batch, columns, rows)

    def product(self, left: Any, right: Any) -> Any:
        """Of matrices; of batches of them, where the left one may be the same for all."""
        if fake_value(right).ndim == 2:
            return self.site.call(aten.mm.default, left, right)
        if fake_value(left).ndim == 2:
            left = self.site.call(aten.expand.default, left, [self.batch, *fake_value(left).shape])
        return self.site.call(aten.bmm.default, left, right)

    def sum(self, value: Any, *dims: int) -> Any:
        return self.site.call(aten.sum.dim_IntList, value, list(dims))

    # --- images to matrices, and back ---------------------------------------------------------------------------------

    @property
    def elements(self) -> int:
        """Of a window."""
        return self.inputs * math.prod(along.window for along in self.space)

    @property
    def has_patches(self) -> bool:
        return any(along.window > 1 for along in self.space)

    @property
    def places(self) -> int:
        """How many windows an image has; -1, to be found out, where that is not known."""
        counts = [along.count for along in self.space]
        return math.prod(counts) if all(type(count) is int for count in counts) else -1

    @property
    def has_few_places(self) -> bool:
        """Whether an image and its result are smaller than the weight, so that one for each image would be too much."""
        return self.places != -1 and self.places * (self.outputs + self.elements) < self.outputs * self.elements

    def inside(self, channels: int, *space: Any) -> list[Any]:
        """The shape of images of this size, channels where they are."""
        return [self.batch, *space, channels] if self.last else [self.batch, channels, *space]

    def dims(self) -> Iterator[tuple[int, Along]]:
        return enumerate(self.space, 1 if self.last else 2)

    def as_it_lies(self, image: Any) -> Any:
        return self.permuted(image, 0, *range(2, 2 + len(self.space)), 1) if self.last else image

    def as_torch_has_it(self, image: Any) -> Any:
        return self.permuted(image, 0, len(self.space) + 1, *range(1, len(self.space) + 1)) if self.last else image

    def flat(self, image: Any, rows: int) -> Any:
        """As a matrix: places by rows where channels are last, otherwise rows by places, one for each of a batch."""
        if self.last:
            return self.reshaped(image, -1, rows)
        return self.reshaped(image, *(() if self.batch == 1 else (self.batch,)), rows, self.places)

    def matrix(self, x: Any) -> Any:
        x = self.as_it_lies(x)
        for dim, along in self.dims():
            if along.window != along.step:
                x = self.site.call(aten.slice.Tensor, x, dim, 0, along.size, along.step)
            elif along.size != along.seen:
                x = self.site.call(aten.slice.Tensor, x, dim, 0, along.seen)
        if self.has_patches:
            pairs = [item for along in self.space for item in (along.count, along.window)]
            apart = self.reshaped(x, *self.inside(self.inputs, *pairs))
            x = self.permuted(apart, *self.order_of_patches())
        return self.flat(x, self.elements)

    def image(self, matrix: Any) -> Any:
        """The opposite of `matrix`, with zeros where no window is."""
        if self.has_patches:
            counts, windows = ([getattr(along, name) for along in self.space] for name in ("count", "window"))
            parts = (*counts, *windows) if self.last else (*windows, *counts)
            apart = self.reshaped(matrix, *self.inside(self.inputs, *parts))
            order = self.order_of_patches()
            matrix = self.permuted(apart, *sorted(range(len(order)), key=order.__getitem__))
        x = self.reshaped(matrix, *self.inside(self.inputs, *(along.seen for along in self.space)))
        for dim, along in self.dims():
            shape = list(fake_value(x).shape)
            if along.window != along.step:
                apart = self.padded(self.reshaped(x, *shape[: dim + 1], 1, *shape[dim + 1 :]), dim + 1, along.step - 1)
                x = self.reshaped(apart, *shape[:dim], along.count * along.step, *shape[dim + 1 :])
            if type(along.size) is int:
                x = self.padded(x, dim, along.size - fake_value(x).shape[dim])
        return self.as_torch_has_it(x)

    def order_of_patches(self) -> list[int]:
        """Where pairs of count and window are, the order that has all of one kind before the other."""
        n, first = len(self.space), 1 if self.last else 2
        counts, windows = range(first, first + 2 * n, 2), range(first + 1, first + 2 * n, 2)
        return [0, *counts, *windows, 2 * n + 1] if self.last else [0, 1, *windows, *counts]

    def padded(self, x: Any, dim: int, amount: int) -> Any:
        """With zeros behind, or without what is too much."""
        if not amount:
            return x
        behind = fake_value(x).ndim - dim - 1
        return self.site.call(aten.constant_pad_nd.default, x, [0, 0] * behind + [0, amount])

    def weight_matrix(self, weight: Any) -> Any:
        """A row for each channel of the result, in the order of the elements of a window."""
        return self.reshaped(self.as_it_lies(weight), self.outputs, self.elements)


# --- which they are ---------------------------------------------------------------------------------------------------


def windows_at(site: Site, last: bool) -> WindowProduct | Refusal:
    given = site.arguments
    source, weight = given["input"], site.value(given["weight"])
    x, n = site.value(source), weight.ndim - 2
    steps, dilation = (list(given[name]) * (n // len(given[name])) for name in ("stride", "dilation"))
    if x.device.type != "cpu" or {x.dtype, weight.dtype} != {torch.float32}:
        return Refusal("it is measured for float32 on a cpu only")
    if given["transposed"] or given["groups"] != 1 or any(given["padding"]):
        return Refusal("it is transposed, in groups or has edges")
    if not all(type(number) is int for number in (*weight.shape, *steps)):
        return Refusal("its window is not known")
    outputs, inputs, *windows = weight.shape
    if any(w > 1 and (w != step or far != 1) for w, step, far in zip(windows, steps, dilation, strict=True)):
        return Refusal("its windows overlap, or leave gaps")
    if max(steps) > 1 and not all(type(size) is int for size in x.shape[2:]):
        return Refusal("how many windows there are is known at run time only")
    hinted = math.prod(map(torch_api.size_hint, x.shape)) * math.prod(windows) // math.prod(steps)
    if hinted * outputs < host_machine().min_split_convolution:
        return Refusal("it is too small to pay")
    batch, _, *space = (
        size if type(size) is int else site.call(aten.sym_size.int, source, dim) for dim, size in enumerate(x.shape)
    )
    alongs = [
        Along(size, size if step == 1 else (size - window) // step + 1, window, step)
        for size, window, step in zip(space, windows, steps, strict=True)
    ]
    return WindowProduct(site, batch, inputs, outputs, tuple(alongs), last)


def result(site: Site) -> Any:
    how = windows_at(site, last=not known_contiguous(fake_value(site.node)))
    if isinstance(how, Refusal):
        return how
    if how.last and not how.has_patches:
        return Refusal("channels lie side by side: torch's kernel is as fast")
    given, counts = site.arguments, [along.count for along in how.space]
    matrix, weight = how.matrix(given["input"]), how.weight_matrix(given["weight"])
    product = how.product(matrix, how.transposed(weight)) if how.last else how.product(weight, matrix)
    found = how.as_torch_has_it(how.reshaped(product, *how.inside(how.outputs, *counts)))
    if given["bias"] is None:
        return found
    return site.call(aten.add.Tensor, found, how.reshaped(given["bias"], how.outputs, *[1] * len(counts)))


# --- gradients --------------------------------------------------------------------------------------------------------


def wanted(node: torch.fx.Node) -> Sequence[torch.fx.Node] | Refusal:
    """The gradients that are read."""
    items = [item for item in node.users if item.target is operator.getitem and fake_value(item) is not None]
    return items if items and len(items) == len(node.users) else Refusal("its gradients are read together")


def gradients(site: Site) -> Any:
    x, weight = (site.value(site.arguments[name]) for name in ("input", "weight"))
    how = windows_at(site, last=not (known_contiguous(x) and known_contiguous(weight)))
    if isinstance(how, Refusal):
        return how
    if how.last and not torch.backends.mkldnn.enabled:
        return Refusal("without oneDNN strides of gradients are not known")
    is_pointwise = all(along.window == 1 for along in how.space)
    if how.last and is_pointwise and known_contiguous(weight) and not gradients_of_pointwise_weights_lie_as_images():
        return Refusal("this torch gives the gradient of a weight that is contiguous strides of its own")
    flat = how.flat(how.as_it_lies(site.arguments["grad_output"]), how.outputs)
    return tuple(GRADIENTS[item.args[1]](how, flat) for item in site.roots)  # type: ignore[index]


def input_gradient(how: WindowProduct, grad: Any) -> Any:
    weight = how.weight_matrix(how.site.arguments["weight"])
    return how.image(how.product(grad, weight) if how.last else how.product(how.transposed(weight), grad))


def weight_gradient(how: WindowProduct, grad: Any) -> Any:
    x, windows = how.matrix(how.site.arguments["input"]), [along.window for along in how.space]
    if how.last:
        product = how.product(how.transposed(grad), x)
        parts = how.reshaped(product, how.outputs, *windows, how.inputs)
        return how.as_torch_has_it(parts)
    if fake_value(x).ndim == 3 and how.has_few_places:
        joined = how.reshaped(how.permuted(grad, 1, 0, 2), how.outputs, -1)
        product = how.product(joined, how.reshaped(how.permuted(x, 0, 2, 1), -1, how.elements))
    else:
        product = how.product(grad, how.transposed(x))
        if fake_value(product).ndim == 3:
            product = how.sum(product, 0)
    return how.reshaped(product, how.outputs, how.inputs, *windows)


def bias_gradient(how: WindowProduct, grad: Any) -> Any:
    return how.sum(grad, *((0,) if how.last else (1,) if fake_value(grad).ndim == 2 else (0, 2)))


GRADIENTS: Mapping[int, Callable[[WindowProduct, Any], Any]] = {
    INPUT: input_gradient,
    WEIGHT: weight_gradient,
    BIAS: bias_gradient,
}


# --- what they fire on ------------------------------------------------------------------------------------------------


def conv(step: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1, transposed: bool = False) -> Any:
    """A convolution with a bias."""

    def run(x: Any, weight: Any, bias: Any) -> Any:
        n = weight.ndim - 2
        window = [step] * n, [padding] * n, [dilation] * n, transposed, [0] * n, groups
        return aten.convolution.default(x, weight, bias, *window)

    return run


def bare(step: int = 1, **more: Any) -> Any:
    """The same without."""
    return lambda x, weight: conv(step, **more)(x, weight, None)


def grads(step: int = 1) -> Any:
    def run(grad: Any, x: Any, weight: Any) -> Any:
        n = weight.ndim - 2
        window = [step] * n, [0] * n, [1] * n, False, [0] * n, 1
        return aten.convolution_backward.default(grad, x, weight, [grad.shape[1]], *window, [True, True, True])

    return run


DENSE = ((1, 64, 32, 32), (32, 64, 1, 1))
PATCHES = ((1, 16, 64, 64), (32, 16, 4, 4))

RESULT = NodeRule(
    name="convolution_as_product",
    purpose="a convolution whose windows do not overlap is a matrix product",
    targets=(aten.convolution.default,),
    rewrite=result,
    numerics="rounded",
    examples=(
        Case("one by one", bare(), of(*DENSE)),
        Case("a bias", conv(), of(*DENSE, (32,))),
        Case("a batch", bare(), of((3, 64, 20, 20), (32, 64, 1, 1))),
        Case("every other place", conv(2), of((2, 64, 43, 42), (64, 64, 1, 1), (64,))),
        Case("patches", conv(4), of(*PATCHES, (32,))),
        Case("patches, and a rest", bare(4), of((2, 16, 66, 67), (32, 16, 4, 4))),
        Case("patches, channels side by side", bare(4), of((2, 16, 66, 67), (32, 16, 4, 4), last=True)),
        Case("one dimension", bare(), of((2, 64, 700), (64, 64, 1))),
        Case("three dimensions", bare(2), of((1, 16, 16, 16, 17), (32, 16, 2, 2, 2))),
        Case("steps within a window of one do not count", bare(dilation=3), of(*DENSE)),
    ),
    near_misses=(
        Case("small", bare(), of((1, 64, 31, 32), (32, 64, 1, 1))),
        Case("windows overlap", bare(), of((1, 64, 32, 32), (32, 64, 3, 3))),
        Case("windows leave gaps", bare(3), of((1, 64, 64, 64), (32, 64, 2, 2))),
        Case("windows have gaps", bare(2, dilation=2), of((1, 64, 64, 64), (32, 64, 2, 2))),
        Case("edges", bare(padding=1), of(*DENSE)),
        Case("groups", bare(groups=2), of((1, 64, 64, 64), (32, 32, 1, 1))),
        Case("transposed", bare(transposed=True), of((1, 64, 32, 32), (64, 32, 1, 1))),
        Case("double precision", bare(), of(*DENSE, dtype=torch.float64)),
        Case("channels side by side", bare(), of((2, 64, 32, 32), (32, 64, 1, 1), last=True)),
    ),
)
GRADIENT = NodeRule(
    name="convolution_backward_as_products",
    purpose="gradients of a convolution whose windows do not overlap are matrix products",
    targets=(aten.convolution_backward.default,),
    rewrite=gradients,
    roots=wanted,
    numerics="rounded",
    examples=(
        Case("one by one", grads(), of((1, 32, 32, 32), *DENSE)),
        Case("a batch", grads(), of((3, 32, 20, 20), (3, 64, 20, 20), (32, 64, 1, 1))),
        Case("a batch, more weights than places", grads(), of((3, 128, 6, 6), (3, 160, 6, 6), (128, 160, 1, 1))),
        Case("only that of the weight", lambda *given: grads()(*given)[1], of((1, 32, 32, 32), *DENSE)),
        Case("every other place", grads(2), of((2, 64, 22, 21), (2, 64, 43, 42), (64, 64, 1, 1))),
        Case("patches", grads(4), of((1, 32, 16, 16), *PATCHES)),
        Case("patches, and a rest", grads(4), of((2, 32, 16, 16), (2, 16, 66, 67), (32, 16, 4, 4))),
        Case("channels side by side", grads(), of((2, 32, 32, 32), (2, 64, 32, 32), (32, 64, 1, 1), last=True)),
        Case(
            "patches, channels side by side",
            grads(4),
            of((2, 32, 16, 16), (2, 16, 66, 67), (32, 16, 4, 4), last=True),
        ),
        Case("one dimension", grads(), of((2, 64, 700), (2, 64, 700), (64, 64, 1))),
    ),
    near_misses=(
        Case("small", grads(), of((1, 32, 31, 32), (1, 64, 31, 32), (32, 64, 1, 1))),
        Case("windows overlap", grads(), of((1, 32, 30, 30), (1, 64, 32, 32), (32, 64, 3, 3))),
        Case("double precision", grads(), of((1, 32, 32, 32), *DENSE, dtype=torch.float64)),
    ),
)
CONVOLUTION_RULES = (RESULT, GRADIENT)
