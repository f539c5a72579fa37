"""Images of convolutions have their channels side by side, as the loops of a convolution read them.

    y = relu(x)                 y[n, c, h, w], w the fastest        =>      c the fastest
    z = convolution(y, weight)                                              the same, without a copy

A buffer that loops alone access is laid out so, whatever eager does. What others access, as the result of a call, is
copied.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from ferrite.ir import ONE, ZERO, Axis, Load, axis, op
from ferrite.ir.program import Buffer, Compute, Operation, Program, Reduce, Store
from ferrite.schedule.cpu.buffer_layouts import free_buffers, turned
from ferrite.schedule.cpu.convolutions import convolution_of, factors_of
from ferrite.schedule.cpu.products import extent_of
from ferrite.schedule.fusion.accesses import axes_in


def with_images(program: Program) -> tuple[Program, set[str]]:
    """The program with such images, and their names."""
    found = {operation: seen for operation in program.operations if (seen := image_of(operation)) is not None}
    if not found:
        return program, set()
    free, buffers = free_buffers(program), {buffer.name: buffer for buffer in program.buffers}
    operations: list[Operation] = []
    for operation in program.operations:
        if operation not in found:
            operations.append(operation)
            continue
        image, channels = found[operation]
        buffer = buffers[image.buffer]
        if buffer.strides[channels] is ONE or buffer.sizes[channels] is ONE:
            operations.append(operation)
        elif image.buffer in free:
            buffers[buffer.name] = turned(buffer, channels)
            operations.append(operation)
        else:
            copy = turned(replace(buffer, name=unused(buffers, buffer), offset=ZERO, kind="owned", base=None), channels)
            buffers[copy.name] = copy
            operations += copied(operation, image, copy)
    images = {image.buffer for image, _ in filter(None, map(image_of, operations))}
    return replace(program, buffers=tuple(buffers.values()), operations=tuple(operations)), images


def image_of(operation: Operation) -> tuple[Load, int] | None:
    """The image that a convolution reads, and the dimension of its channels: the longest that windows do not move."""
    if not isinstance(operation, Reduce) or (convolution := convolution_of(operation)) is None:
        return None
    image, _ = factors_of(operation.values[0], convolution)
    lengths = {
        dim: max(map(extent_of, summed))
        for dim, index in enumerate(image.coordinates)
        if (summed := axes_in(index) & set(convolution.summed)) and axes_in(index).isdisjoint(convolution.places)
    }
    return (image, max(lengths, key=lengths.__getitem__)) if lengths else None


def unused(buffers: dict[str, Buffer], like: Buffer) -> str:
    name = f"{like.name}_image"
    while name in buffers:
        name += "_"
    return name


def copied(operation: Operation, image: Load, copy: Buffer) -> Iterator[Operation]:
    assert isinstance(operation, Reduce)
    axes = tuple(ZERO if size is ONE else axis(f"i{dim}", size) for dim, size in enumerate(copy.sizes))
    store = Store(copy.name, axes, Load.intern(image.buffer, axes, image.dtype))
    yield Compute(tuple(item for item in axes if isinstance(item, Axis)), (store,), operation.origin)
    (value,) = operation.values
    pair = [Load.intern(copy.name, item.coordinates, item.dtype) if item is image else item for item in value.args]
    yield replace(operation, values=(op("mul", *pair),))
