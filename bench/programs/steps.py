"""The kinds of line a random program is made of.

Each kind is a function of a `Choice` (a source of random numbers and the values known so far) that gives a step, or
None where it finds no operand. A step need not be right: one that raises in eager is thrown away by the generator.
The target "*" stands for a new name, "**" for two of them, "" for a line that only writes.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from bench.programs.program import Step

Kind = Callable[["Choice"], "Step | None"]
FLOATS = ("float32", "float64", "bfloat16")
DTYPES = (*FLOATS, "int64", "int32", "bool")
KINDS: list[tuple[Kind, str, float]] = []


class Choice:
    """Random choices among the values a program has so far, the later ones more often."""

    def __init__(self, source: random.Random, values: Mapping[str, Any]) -> None:
        self.source, self.values = source, values

    def of(self, *options: Any) -> Any:
        return self.source.choice(options)

    def name(self, accept: Callable[[torch.Tensor], bool] = lambda tensor: True) -> str | None:
        names = [n for n, value in self.values.items() if isinstance(value, torch.Tensor) and accept(value)]
        if not names:
            return None
        return names[max(self.source.randrange(len(names)), self.source.randrange(len(names)))]

    def whole(self) -> str | None:
        """A Python number that came from data."""
        names = [n for n, value in self.values.items() if type(value) is int]
        return self.source.choice(names) if names else None

    def fitting(self, name: str) -> str | None:
        """Another tensor whose shape broadcasts against this one's."""
        return self.name(lambda other: broadcasts(other, self.values[name]))

    def like(self, name: str) -> str | None:
        return self.name(lambda other: other.shape == self.values[name].shape)

    def axis(self, name: str) -> int:
        rank = max(self.values[name].dim(), 1)
        return self.source.randrange(rank) - self.of(0, 0, 0, rank)

    def size(self, name: str, axis: int) -> int:
        tensor = self.values[name]
        return int(tensor.shape[axis]) if tensor.dim() else 1

    def scalar(self) -> int | float:
        return self.of(2, 3, -1, 0.5, 1.5, -0.25, 1, 0)


def broadcasts(one: torch.Tensor, other: torch.Tensor) -> bool:
    try:
        torch.broadcast_shapes(one.shape, other.shape)
    except RuntimeError:
        return False
    return True


def floating(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point()


def has_axes(tensor: torch.Tensor) -> bool:
    return tensor.dim() > 0


def kind(family: str, weight: float = 1.0) -> Callable[[Kind], Kind]:
    def register(function: Kind) -> Kind:
        KINDS.append((function, family, weight))
        return function

    return register


# --- element by element -----------------------------------------------------------------------------------------------

UNARY = ("exp", "sin", "tanh", "relu", "abs", "neg", "sigmoid", "square", "floor", "sign", "rsqrt", "log1p", "sqrt")
BINARY = ("add", "sub", "mul", "maximum", "minimum", "div", "eq", "gt", "le", "atan2", "remainder")


@kind("elements", 3)
def unary(c: Choice) -> Step | None:
    name = c.name()
    return name and Step("*", "{v[0]}.{n[0]}()", (name,), (c.of(*UNARY),))


@kind("elements", 4)
def binary(c: Choice) -> Step | None:
    name = c.name()
    other = name and c.fitting(name)
    return other and Step("*", "torch.{n[0]}({v[0]}, {v[1]})", (name, other), (c.of(*BINARY),))


@kind("elements", 2)
def with_alpha(c: Choice) -> Step | None:
    name = c.name()
    other = name and c.fitting(name)
    return other and Step("*", "torch.{n[0]}({v[0]}, {v[1]}, alpha={n[1]})", (name, other), (c.of("add", "sub"), 2))


@kind("elements", 3)
def with_number(c: Choice) -> Step | None:
    name = c.name()
    sign = c.of("+", "-", "*", "/", "<", ">=", "==", "**")
    number = 2 if sign == "**" else c.scalar()
    template = "{n[0]} {n[1]} {v[0]}" if sign in "+-*" and c.of(0, 0, 1) else "{v[0]} {n[1]} {n[0]}"
    return name and Step("*", template, (name,), (number, sign))


@kind("elements", 2)
def choose(c: Choice) -> Step | None:
    name = c.name()
    other = name and c.fitting(name)
    test = other and c.fitting(other)
    if not test:
        return None
    if c.of(0, 1):
        return Step("*", "torch.where({v[2]} > {n[0]}, {v[0]}, {v[1]})", (name, other, test), (0,))
    return Step("*", "torch.where({v[1]} > 0, {v[0]}, {n[0]})", (name, test), (c.scalar(),))


@kind("elements", 2)
def clamp(c: Choice) -> Step | None:
    name = c.name()
    template = c.of("{v[0]}.clamp(min={n[0]})", "{v[0]}.clamp({n[0]}, 1)", "{v[0]}.masked_fill({v[0]} > {n[0]}, 0)")
    return name and Step("*", template, (name,), (c.of(-1, -0.5, 0),))


@kind("elements", 2)
def cast(c: Choice) -> Step | None:
    name = c.name()
    if name is None:
        return None
    dtype = c.of(*DTYPES)
    template = "{v[0]}.to(torch.{n[0]})"
    if floating(c.values[name]) and dtype in ("int64", "int32"):
        template = "torch.nan_to_num({v[0]}).clamp(-9, 9).to(torch.{n[0]})"
    return Step("*", template, (name,), (dtype,))


@kind("elements", 1)
def function(c: Choice) -> Step | None:
    name = c.name(floating)
    text = c.of("gelu", "silu", "softplus", "leaky_relu", "hardtanh", "elu")
    return name and Step("*", "torch.nn.functional.{n[0]}({v[0]})", (name,), (text,))


@kind("elements", 1)
def made(c: Choice) -> Step | None:
    name = c.name()
    template = c.of(
        "torch.zeros_like({v[0]})",
        "torch.full_like({v[0]}, {n[0]})",
        "torch.arange({v[0]}.numel()).reshape({v[0]}.shape)",
        "{v[0]}.clone()",
        "{v[0]}.contiguous()",
        "{v[0]}.new_ones({v[0]}.shape)",
    )
    return name and Step("*", template, (name,), (c.of(1, 2, 0),))


# --- reductions and products ------------------------------------------------------------------------------------------


@kind("reductions", 3)
def reduction(c: Choice) -> Step | None:
    name = c.name()
    if name is None:
        return None
    text = c.of("sum", "mean", "amax", "amin", "prod", "any", "var", "argmax", "logsumexp", "std")
    if c.of(0, 0, 0, 1) and text in ("sum", "mean", "any", "prod", "amax", "amin"):
        return Step("*", "{v[0]}.{n[0]}()", (name,), (text,))
    return Step("*", "{v[0]}.{n[0]}({n[1]}, keepdim={n[2]})", (name,), (text, c.axis(name), c.of(True, False)))


@kind("reductions", 1)
def over_several(c: Choice) -> Step | None:
    name = c.name(lambda t: t.dim() >= 2)
    if name is None:
        return None
    axes = tuple(sorted(c.source.sample(range(c.values[name].dim()), 2)))
    numbers = (c.of("sum", "mean", "amax"), axes, c.of(True, False))
    return Step("*", "{v[0]}.{n[0]}({n[1]}, keepdim={n[2]})", (name,), numbers)


@kind("reductions", 2)
def along(c: Choice) -> Step | None:
    name = c.name()
    text = c.of("softmax", "log_softmax", "cumsum", "softmax", "cumprod", "sort")
    template = "{v[0]}.{n[0]}({n[1]})[0]" if text == "sort" else "{v[0]}.{n[0]}({n[1]})"
    return name and Step("*", template, (name,), (text, c.axis(name)))


@kind("reductions", 1)
def norm(c: Choice) -> Step | None:
    name = c.name(lambda t: floating(t) and t.dim() >= 1)
    return name and Step("*", "torch.nn.functional.layer_norm({v[0]}, {v[0]}.shape[-1:])", (name,))


@kind("products", 2)
def matmul(c: Choice) -> Step | None:
    name = c.name(lambda t: t.dim() >= 2)
    if name is None:
        return None
    if c.of(0, 1):
        return Step("*", "{v[0]} @ {v[0]}.transpose(-1, -2)", (name,))
    inner = c.size(name, -1)
    other = c.name(lambda t: t.dim() in (1, 2) and t.shape[-1] == inner)
    if other is None:
        return None
    return Step("*", "{v[0]} @ {v[1]}" if c.values[other].dim() == 1 else "{v[0]} @ {v[1]}.t()", (name, other))


# --- joins and parts of them ------------------------------------------------------------------------------------------


@kind("joins", 3)
def join(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name)
    names = [name]
    for _ in range(c.of(1, 1, 2)):
        names.append(c.name(lambda t: joins(t, c.values[name], axis)) or name)
    c.source.shuffle(names)
    text = ", ".join(f"{{v[{i}]}}" for i in range(len(names)))
    return Step("*", f"torch.cat([{text}], {{n[0]}})", tuple(names), (axis,))


def joins(one: torch.Tensor, other: torch.Tensor, axis: int) -> bool:
    axis %= other.dim()
    return one.dim() == other.dim() and all(
        i == axis or a == b for i, (a, b) in enumerate(zip(one.shape, other.shape, strict=True))
    )


@kind("joins", 1)
def stack(c: Choice) -> Step | None:
    name = c.name()
    other = name and c.like(name)
    axis = c.source.randrange(c.values[name].dim() + 1) if name else 0
    return other and Step("*", "torch.stack([{v[0]}, {v[1]}], {n[0]})", (name, other), (axis,))


@kind("joins", 3)
def part(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name)
    size = c.size(name, axis)
    start = c.source.randrange(max(size, 1))
    length = c.source.randint(0 if c.of(0, 0, 0, 1) else 1, max(size - start, 1))
    if c.of(0, 1):
        return Step("*", "{v[0]}.narrow({n[0]}, {n[1]}, {n[2]})", (name,), (axis, start, length))
    place = axis % c.values[name].dim()
    index = ", ".join([":"] * place + ["{n[0]}:{n[1]}:{n[2]}"])
    return Step("*", f"{{v[0]}}[{index}]", (name,), (start, start + length, c.of(1, 1, 2)))


@kind("joins", 2)
def part_by_size(c: Choice) -> Step | None:
    """A part whose ends are computed from sizes."""
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name) % c.values[name].dim()
    size = f"{{v[0]}}.shape[{axis}]"
    ends = c.of(
        f"{size} // 2:", f":{size} // 2", f"1:{size} - 1", f":{size} - 1", "-2:", f"{size} // 3:{size} // 3 * 2"
    )
    return Step("*", f"{{v[0]}}[{':, ' * axis}{ends}]", (name,))


@kind("joins", 2)
def pieces(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name)
    if c.size(name, axis) == 2 or c.of(0, 1):
        text = c.of("chunk", "tensor_split")
        return Step("**", "{v[0]}.{n[0]}({n[1]}, {n[2]})", (name,), (text, 2, axis))
    piece = c.source.randint(1, max(c.size(name, axis), 1))
    return Step("*", "{v[0]}.split({n[0]}, {n[1]})[{n[2]}]", (name,), (piece, axis, c.of(0, -1)))


@kind("joins", 1)
def padded(c: Choice) -> Step | None:
    name = c.name(has_axes)
    template = "torch.nn.functional.pad({v[0]}, ({n[0]}, {n[1]}), value={n[2]})"
    return name and Step("*", template, (name,), (c.of(0, 1, 2, -1), c.of(0, 1, 3), c.of(0, 2)))


@kind("joins", 1)
def rolled(c: Choice) -> Step | None:
    name = c.name(has_axes)
    return name and Step("*", "{v[0]}.roll({n[0]}, {n[1]})", (name,), (c.of(1, 2, -1), c.axis(name)))


# --- views ------------------------------------------------------------------------------------------------------------


@kind("views", 3)
def reshape(c: Choice) -> Step | None:
    name = c.name()
    if name is None:
        return None
    count = c.values[name].numel()
    factors = [n for n in (1, 2, 3, 4, 6, 8) if count % n == 0]
    one, other = c.of(*factors), c.of(*factors)
    shape = c.of((-1, one), (one, -1), (-1,), (one, -1, other), (-1, 1, one))
    return Step("*", "{v[0]}.{n[0]}({n[1]})", (name,), (c.of("reshape", "reshape", "view"), shape))


@kind("views", 2)
def reshape_by_size(c: Choice) -> Step | None:
    name = c.name(lambda t: t.dim() >= 2)
    template = c.of(
        "{v[0]}.reshape({v[0]}.shape[0] * {v[0]}.shape[1], -1)",
        "{v[0]}.reshape(-1, {v[0]}.shape[0])",
        "{v[0]}.reshape({v[0]}.shape[-1], -1)",
        "{v[0]}.flatten({n[0]}, {n[1]})",
        "{v[0]}.view({v[0]}.shape[0], -1)",
        "{v[0]}.unflatten(0, (-1, {n[1]}))",
    )
    return name and Step("*", template, (name,), (c.of(0, 1), c.of(1, -1)))


@kind("views", 3)
def transpose(c: Choice) -> Step | None:
    name = c.name(lambda t: t.dim() >= 2)
    if name is None:
        return None
    if c.of(0, 1):
        return Step("*", "{v[0]}.transpose({n[0]}, {n[1]})", (name,), (c.axis(name), c.axis(name)))
    order = list(range(c.values[name].dim()))
    c.source.shuffle(order)
    return Step("*", "{v[0]}.permute({n[0]})", (name,), (tuple(order),))


@kind("views", 2)
def select(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name)
    index = c.source.randrange(max(c.size(name, axis), 1)) - c.of(0, 0, max(c.size(name, axis), 1))
    return Step("*", "{v[0]}.select({n[0]}, {n[1]})", (name,), (axis, index))


@kind("views", 2)
def squeeze(c: Choice) -> Step | None:
    name = c.name()
    if name is None:
        return None
    rank = c.values[name].dim()
    if rank and c.of(0, 1):
        return Step("*", "{v[0]}.squeeze({n[0]})", (name,), (c.axis(name),))
    return Step("*", "{v[0]}.unsqueeze({n[0]})", (name,), (c.source.randint(-1, rank),))


@kind("views", 2)
def expand(c: Choice) -> Step | None:
    name = c.name()
    if name is None:
        return None
    shape = [c.of(2, 3) if size == 1 and c.of(0, 1) else -1 for size in c.values[name].shape]
    if c.of(0, 0, 1):
        return Step("*", "{v[0]}.expand({n[0]})", (name,), ((c.of(1, 2), *shape),))
    other = c.fitting(name)
    return other and Step("*", "{v[0]}.expand_as({v[1]})", (name, other))


@kind("views", 1)
def odd_views(c: Choice) -> Step | None:
    name = c.name(lambda t: t.dim() >= 1)
    template = c.of(
        "{v[0]}.flip({n[0]})",
        "{v[0]}.unfold({n[0]}, 2, 1)",
        "{v[0]}.unfold({n[0]}, 2, 2)",
        "{v[0]}.diagonal()",
        "{v[0]}.T",
        "{v[0]}.as_strided((2,), (1,))",
        "{v[0]}.movedim({n[0]}, 0)",
        "{v[0]}.unbind({n[0]})[-1]",
        "{v[0]}.detach()",
        "{v[0]}.repeat_interleave(2, {n[0]})",
        "{v[0]}.swapaxes({n[0]}, -1)",
    )
    return name and Step("*", template, (name,), (c.axis(name) if name else 0,))


# --- writes -----------------------------------------------------------------------------------------------------------


@kind("writes", 4)
def write(c: Choice) -> Step | None:
    name = c.name()
    template = c.of(
        "{v[0]}.mul_({n[0]})",
        "{v[0]}.add_({n[0]})",
        "{v[0]}.clamp_(min=-1)",
        "{v[0]}.fill_({n[0]})",
        "{v[0]}.zero_()",
        "{v[0]}.sin_()",
        "{v[0]}.neg_()",
        "{v[0]}.relu_()",
        "{v[0]}.masked_fill_({v[0]} > 0, {n[0]})",
        "{v[0]}.sub_({n[0]}, alpha=2)",
    )
    return name and Step("", template, (name,), (c.of(2, 3, -1, 0.5),))


@kind("writes", 3)
def write_from(c: Choice) -> Step | None:
    name = c.name()
    other = name and c.fitting(name)
    template = c.of(
        "{v[0]}.copy_({v[1]})",
        "{v[0]}.add_({v[1]}, alpha=2)",
        "{v[0]}.mul_({v[1]})",
        "{v[0]}.sub_({v[1]})",
        "{v[0]} += {v[1]}",
    )
    return other and Step("", template, (name, other))


@kind("writes", 3)
def assign(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name) % c.values[name].dim()
    before = ":, " * axis
    size = c.size(name, axis)
    at = c.source.randrange(max(size, 1))
    where = c.of("{n[0]}", "{n[0]}:", ":{n[0]}", "::2", "1:-1", "None" if axis == 0 else ":")
    other = c.name(lambda t: t.dim() <= 1)
    if c.of(0, 1) and other:
        return Step("", f"{{v[0]}}[{before}{where}] = {{v[1]}}", (name, other), (at,))
    sign = c.of("=", "=", "+=", "*=")
    return Step("", f"{{v[0]}}[{before}{where}] {sign} {{n[1]}}", (name,), (at, c.of(2, 0, -1, 0.5)))


@kind("writes", 1)
def assign_part(c: Choice) -> Step | None:
    """A part of one tensor written over a part of another, maybe of the same memory."""
    name = c.name(has_axes)
    other = name and c.name(lambda t: t.dim() == c.values[name].dim())
    template = c.of(
        "{v[0]}[:{n[0]}].copy_({v[1]}[:{n[0]}])",
        "{v[0]}[-{n[0]}:] = {v[1]}[:{n[0]}]",
        "{v[0]}[:-1] = {v[0]}[1:].clone()",
        "{v[0]}[:-1] += {v[0]}[1:]",
        "{v[0]}.transpose(0, -1)[{n[0]}:].mul_(2)",
        "{v[0]}[{v[1]} > 0] = {n[0]}",
    )
    return other and Step("", template, (name, other), (c.of(1, 2),))


# --- indices ----------------------------------------------------------------------------------------------------------


def indices(tensor: torch.Tensor) -> bool:
    return tensor.dtype == torch.int64 and tensor.dim() == 1


@kind("indices", 2)
def picked(c: Choice) -> Step | None:
    name, index = c.name(has_axes), c.name(indices)
    if name is None or index is None:
        return None
    axis = c.axis(name)
    before = ":, " * (axis % c.values[name].dim())
    template = c.of("{v[0]}.index_select({n[0]}, {v[1]})", f"{{v[0]}}[{before}{{v[1]}}]")
    return Step("*", template, (name, index), (axis,))


@kind("indices", 2)
def gathered(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    axis = c.axis(name)
    rank = c.values[name].dim()
    index = c.name(lambda t: t.dtype == torch.int64 and t.dim() == rank)
    if index and c.of(0, 1):
        return Step("*", "{v[0]}.gather({n[0]}, {v[1]})", (name, index), (axis,))
    return Step("*", f"{{v[0]}}.gather({{n[0]}}, {backwards(axis % rank, rank)})", (name,), (axis,))


def backwards(axis: int, rank: int, of: str = "{v[0]}") -> str:
    """Indices along an axis, from the last to the first: none of them twice."""
    shape = ", ".join("-1" if i == axis else "1" for i in range(rank))
    return f"torch.arange({of}.shape[{axis}] - 1, -1, -1).reshape({shape}).expand_as({of})"


@kind("indices", 3)
def scattered(c: Choice) -> Step | None:
    name = c.name(has_axes)
    source = name and c.like(name)
    if source is None:
        return None
    axis, rank = c.axis(name), c.values[name].dim()
    there = backwards(axis % rank, rank)
    text = c.of("scatter", "scatter_add", "scatter_", "scatter_add_", "scatter_reduce")
    rest = ', reduce="sum"' if text == "scatter_reduce" else ""
    template = f"{{v[0]}}.{text}({{n[0]}}, {there}, {{v[1]}}{rest})"
    return Step("" if text.endswith("_") else "*", template, (name, source), (axis,))


@kind("indices", 3)
def added_at(c: Choice) -> Step | None:
    index = c.name(indices)
    name = c.name(has_axes)
    if index is None or name is None:
        return None
    template = c.of(
        "{v[0]}.index_add(0, {v[1]}, {v[0]}[{v[1]}])",
        "{v[0]}.index_add_(0, {v[1]}, {v[0]}[{v[1]}] * 2)",
        "{v[0]}.index_put(({v[1]},), {v[0]}[{v[1]}], accumulate=True)",
        "{v[0]}.index_put_(({v[1]},), {v[0]}[{v[1]}] + 1, accumulate=True)",
        "torch.zeros_like({v[0]}).index_add(0, {v[1]}, {v[0]}[{v[1]}], alpha=2)",
        "{v[0]}.index_fill(0, {v[1]}, 2)",
        "{v[0]}[{v[1]}] = 3",
        "{v[0]}.index_copy(0, torch.arange({v[0]}.shape[0] - 1, -1, -1), {v[0]})",
    )
    written = template.endswith(" = 3") or "_(" in template.replace("zeros_like(", "")[7:18]
    return Step("" if written else "*", template, (name, index))


@kind("indices", 1)
def embedding(c: Choice) -> Step | None:
    table = c.name(lambda t: t.dim() == 2 and floating(t))
    index = c.name(lambda t: t.dtype in (torch.int64, torch.int32))
    return table and index and Step("*", "torch.nn.functional.embedding({v[1]}, {v[0]})", (table, index))


@kind("indices", 1)
def new_indices(c: Choice) -> Step | None:
    name = c.name(has_axes)
    template = c.of(
        "torch.arange({v[0]}.shape[0])",
        "torch.arange({v[0]}.shape[0]) % 2",
        "torch.arange({v[0]}.shape[0] - 1, -1, -1)",
        "{v[0]}.argsort(0, stable=True)",
    )
    return name and Step("*", template, (name,))


# --- facts about sizes ------------------------------------------------------------------------------------------------


@kind("guards", 2)
def guard(c: Choice) -> Step | None:
    name = c.name(has_axes)
    other = name and c.name(has_axes)
    template = c.of(
        "{v[0]} + 1 if {v[0]}.shape[0] == {v[1]}.shape[-1] else {v[0]} * 2",
        "{v[0]}.sum(0) if {v[0]}.shape[0] > 3 else {v[0]} * {v[0]}.shape[0]",
        "{v[0]} * {v[0]}.shape[-1] if {v[0]}.shape[0] == 1 else {v[0]}[:1]",
        "{v[0]} + {v[1]}.shape[0]",
        "{v[0]} / ({v[0]}.shape[-1] + 1)",
        "{v[0]}.new_zeros({v[0]}.shape[0] + {v[1]}.shape[0])",
        "{v[0]}.repeat({v[1]}.shape[0], *[1] * ({v[0]}.dim() - 1))",
    )
    return other and Step("*", template, (name, other))


@kind("guards", 1)
def assertion(c: Choice) -> Step | None:
    name = c.name(has_axes)
    other = name and c.name(has_axes)
    template = c.of("torch._check({v[0]}.shape[0] == {v[1]}.shape[0])", "torch._check({v[0]}.shape[0] > {n[0]})")
    return other and Step("", template, (name, other), (c.of(0, 1, 2),))


# --- sizes from data --------------------------------------------------------------------------------------------------


@kind("data", 4)
def counted(c: Choice) -> Step | None:
    name = c.name()
    template = c.of(
        "{v[0]}.nonzero()",
        "{v[0]}[{v[0]} > 0]",
        "torch.masked_select({v[0]}, {v[0]} > 0)",
        "{v[0]}.unique()",
        "({v[0]} > 0).nonzero()[:, 0]",
        "{v[0]}.flatten()[:3].repeat_interleave(torch.arange({v[0]}.flatten()[:3].shape[0]))",
    )
    return name and Step("*", template, (name,))


@kind("data", 4)
def number_from_data(c: Choice) -> Step | None:
    name = c.name(has_axes)
    if name is None:
        return None
    return Step("*", c.of("({v[0]} > 0).sum().item()", "({v[0]} > 0).any(-1).sum().item()"), (name,))


@kind("data", 4)
def known_of_number(c: Choice) -> Step | None:
    number, name = c.whole(), c.name(has_axes)
    template = c.of("torch._check({v[1]} >= 0)", "torch._check({v[1]} <= {v[0]}.shape[0])", "torch._check({v[1]} > 1)")
    return number and name and Step("", template, (name, number))


@kind("data", 4)
def by_number_from_data(c: Choice) -> Step | None:
    number, name = c.whole(), c.name(has_axes)
    template = c.of(
        "{v[0]}[:{v[1]}]",
        "{v[0]} * {v[1]}",
        "{v[0]}.new_ones({v[1]})",
        "torch.arange({v[1]}) * {n[0]}",
        "{v[0]}.new_zeros({v[1]}, 2)",
        "{v[0]}.narrow(0, 0, {v[1]})",
        "{v[0]}.flatten()[:{v[1]}] + 1",
        "{v[0]}.select(0, {v[1]})",
    )
    return number and name and Step("*", template, (name, number), (c.of(2, -1),))
