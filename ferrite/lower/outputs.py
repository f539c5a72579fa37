"""What a program returns, as eager returns it: strides, memory that results share, tensors that are apart."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from ferrite.graph import fake_value, same_sizes
from ferrite.ir import ZERO, Expr, Index
from ferrite.ir.program import Constant, Literal, Output
from ferrite.lower.arguments import argument, literal_text, named_object
from ferrite.lower.builder import Builder
from ferrite.lower.conj_and_neg import bits_of, laid_out, resolved_later
from ferrite.lower.memory import buffer_of, buffer_of_copy
from ferrite.lower.value import Value

Values = Mapping[torch.fx.Node, Any]


def program_outputs(ctx: Builder, values: Values, results: Sequence[Any], strides: Sequence[Any]) -> tuple[Output, ...]:
    """What a program gives for the results of its graph. `strides`: eager's, None where a result has its own."""
    outputs: list[Output] = []
    returned: dict[Any, Output] = {}  # one tensor may be returned twice
    for result, wanted in zip(results, strides, strict=True):
        key = (id(result), None if wanted is None else ctx.sizes.indices(wanted))
        if key not in returned or not isinstance(result, torch.fx.Node):
            value, fake = value_and_picture(ctx, values, result, wanted, shared=True)
            if not isinstance(value, Value):
                returned[key] = plain_output(ctx, value)
            elif wanted is not None and fake is not None:
                returned[key] = output_with(ctx, value, fake, ctx.sizes.indices(wanted))
            else:
                returned[key] = buffer_of(ctx, value, fake)
        outputs.append(returned[key])
    return tuple(tensors_apart(ctx, values, results, outputs))


def body_outputs(ctx: Builder, values: Values, results: Sequence[Any], strides: Sequence[Any]) -> tuple[Output, ...]:
    """What a body gives for the results of its graph: each shares memory with nothing the body was given, and nothing
    else it returns."""
    outputs: list[Output] = []
    returned: set[str] = set()  # storages
    for result, wanted in zip(results, strides, strict=True):
        value, fake = value_and_picture(ctx, values, result, wanted, shared=False)
        if not isinstance(value, Value):
            outputs.append(plain_output(ctx, value))
            continue
        assert fake is not None
        dense = ctx.sizes.indices(wanted if wanted is not None else fake.stride())
        storage = ctx.buffers[ctx.realise(value.box)].storage
        is_own = ctx.buffers[storage].kind == "owned" and storage not in returned
        name = output_with(ctx, value, fake, dense) if is_own else buffer_of_copy(ctx, value, dense)
        returned.add(ctx.buffers[name].storage)
        outputs.append(name)
    return tuple(tensors_apart(ctx, values, results, outputs))


def value_and_picture(
    ctx: Builder, values: Values, result: Any, wanted: Any, shared: bool
) -> tuple[Any, torch.Tensor | None]:
    """A result and, where it is a tensor, torch's picture of it. Numbers to be conjugated or negated lie so already, as
    eager's `wanted` strides have it: a kernel that copied them would not see their bits."""
    is_node = isinstance(result, torch.fx.Node)
    value = values[result] if is_node else result
    if not isinstance(value, Value):
        return value, None
    fake = fake_value(result) if is_node else value.fake
    if not isinstance(fake, torch.Tensor):
        return value, None
    if not bits_of(fake):
        return value, fake
    if wanted is not None and not same_sizes(wanted, fake.stride()):
        fake = laid_out(fake, wanted)
    return resolved_later(ctx, value, fake, shared), fake


def plain_output(ctx: Builder, value: Any) -> Output:
    """A result that is no tensor."""
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return ctx.index(value)
    if isinstance(value, (Index, Constant)):
        return value
    if isinstance(value, Expr):
        return argument(ctx, value)  # type: ignore[return-value]
    text = literal_text(value)
    return Literal(text) if text is not None else named_object(ctx, value, type(value).__name__)


def output_with(ctx: Builder, value: Value, fake: torch.Tensor, strides: tuple[Index, ...]) -> str:
    own = ctx.sizes.indices(fake.stride())
    if own == strides:
        found = ctx.buffers[name := buffer_of(ctx, value, fake)]
        if ZERO not in value.sizes or found.kind == "foreign" or found.strides == strides:
            return name
        return ctx.new_view(found, value.dtype, value.sizes, strides, found.offset)
    if ZERO in value.sizes:  # without elements any strides will do, and what shares memory goes on sharing it
        base = ctx.buffers[ctx.realise(value.box)]
        return ctx.new_view(base, value.dtype, value.sizes, strides, base.offset)
    return buffer_of_copy(ctx, value, strides)


def tensors_apart(ctx: Builder, values: Values, results: Sequence[Any], outputs: Sequence[Output]) -> Iterator[Output]:
    """Two results of eager are two tensors, even where both are the same elements of one memory. The one that was
    computed first owns it: the others are views of it, and autograd tells a view from its base. A view that is returned
    twice is one tensor, which no input is: autograd makes two of an input."""
    named = [pair for pair in zip(results, outputs, strict=True) if isinstance(pair[1], str)]
    owner = {output: result for result, output in sorted(named, key=operator.itemgetter(0), reverse=True)}
    if len(owner) < len(named):
        inputs = {value.box.buffer: node for node, value in values.items() if is_input(node, value)}
        owner |= {output: inputs[output] for output in owner if output in inputs}
    views: dict[Any, str] = {}  # one tensor may be returned twice, as a view of another too
    for result, output in zip(results, outputs, strict=True):
        same = isinstance(output, str) and owner[output] is not result
        if same and (buffer := ctx.buffers[str(output)]).kind != "foreign":
            if (result, output) not in views:
                view = ctx.new_view(buffer, buffer.dtype, buffer.sizes, buffer.strides, buffer.offset)
                views[result, output] = view
            yield views[result, output]
        else:
            yield output


def is_input(node: torch.fx.Node, value: Any) -> bool:
    return node.op == "placeholder" and isinstance(value, Value)
