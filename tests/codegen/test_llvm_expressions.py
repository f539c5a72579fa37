"""Expressions at random, random numbers, and indices, as machine code."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrite.ir.expr import Random, cast, const, index_value, load, masked, op
from ferrite.ir.expr_laws import wrong_type
from ferrite.ir.index.algebra import axis, maximum, minimum, number
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.nodes import Accumulate, Kernel, Let, Loop, Pointer, State, Store, Update
from ferrite.ir.types import short
from tests.llvm_kernels import assert_same

TYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.bool)
UNARY = ("neg", "abs", "sign", "floor", "sqrt", "reciprocal", "isnan", "signbit", "logical_not", "bitwise_not")
BINARY = ("add", "mul", "sub", "div", "fmax", "eq", "lt", "bitwise_and", "bitwise_xor", "bitwise_left_shift", "fmod")
COUNT = 23


def result_of(name, dtype):
    return torch.bool if name in ("isnan", "signbit", "eq", "lt") else dtype


@st.composite
def expressions(draw, i):
    """A small graph of exact operators over three inputs, an index, and constants."""
    made = [load(f"x{place}", (i,), dtype) for place, dtype in enumerate((torch.float32, torch.int32, torch.bool))]
    made += [load("x0", (COUNT - 1 - i,), torch.float32), load("x1", (i // 3,), torch.int32)]
    made += [index_value(i * 3 % 7, torch.int32), const(2.5, torch.float32), const(-3, torch.int32)]
    for _ in range(draw(st.integers(3, 14))):
        one = draw(st.sampled_from(made))
        alike = [item for item in made if item.dtype == one.dtype]
        other = draw(st.sampled_from(alike))
        way = draw(st.integers(0, 4))
        if way == 0:
            node = cast(one, draw(st.sampled_from(TYPES)))
        elif way == 1:
            name = draw(st.sampled_from(UNARY))
            node = op(name, one, dtype=result_of(name, one.dtype))
        elif way == 2:
            name = draw(st.sampled_from(BINARY))
            node = op(name, one, other, dtype=result_of(name, one.dtype))
            if name == "fmod" and not one.dtype.is_floating_point:
                node = op(name, one, const(3, one.dtype))
        else:
            condition = draw(st.sampled_from([item for item in made if item.dtype is torch.bool]))
            node = masked(condition, one, other) if way == 3 else op("where", condition, one, other, dtype=one.dtype)
        if wrong_type(node) is None and not outside_integers(node):
            made.append(node)
    return made[-1]


def outside_integers(node):
    """Whether it converts to an integer what may not fit one: there torch's own ways differ."""
    source = node.args[0].dtype if node.args else node.dtype
    return type(node).__name__ == "Cast" and source.is_floating_point and not node.dtype.is_floating_point


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.data())
def test_an_expression_has_the_bits_of_the_oracle(data):
    i = axis("i", COUNT)
    roots = data.draw(st.lists(expressions(i), min_size=1, max_size=3))
    lanes, copies = data.draw(st.sampled_from([(1, 1), (4, 1), (4, 2), (8, 2)]))
    inputs = [Pointer(f"x{place}", dtype) for place, dtype in enumerate((torch.float32, torch.int32, torch.bool))]
    outputs = [Pointer(f"out{place}", root.dtype, "write") for place, root in enumerate(roots)]
    stores = tuple(Store(pointer.name, (i,), root) for pointer, root in zip(outputs, roots, strict=True))
    kernel = verify_kernel(Kernel((*inputs, *outputs), (), (Loop(i, "vector", stores, lanes, copies),)))
    generator = torch.Generator().manual_seed(0)
    memory = [
        torch.randn(COUNT, generator=generator),
        torch.randint(-9, 9, [COUNT], generator=generator).to(torch.int32),
        torch.randint(0, 2, [COUNT], generator=generator).bool(),
        *(torch.zeros(COUNT, dtype=pointer.dtype) for pointer in outputs),
    ]
    memory[0][3], memory[0][9], memory[0][11] = float("nan"), float("inf"), -0.0
    assert_same(str(kernel), memory)


@st.composite
def places(draw, i, j):
    """An index within 0 and 99."""
    made = [i, j, i * 3 - j * 2, i + j + 4]
    for _ in range(draw(st.integers(0, 4))):
        one, other = draw(st.sampled_from(made)), draw(st.sampled_from(made))
        number = draw(st.integers(1, 9))
        sums = [one + other, one - number, one * number, minimum(one, other), maximum(one, other - number)]
        divisions = [one // number, one % number, (one - other) // number, (one * 4) % number]
        made.append(draw(st.sampled_from([*sums, *divisions])))
    return maximum(minimum(made[-1], 99), 0)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.data())
def test_an_index_is_where_the_oracle_has_it(data):
    i, j = axis("i", 5), axis("j", 11)
    place = data.draw(places(i, j))
    lanes, copies = data.draw(st.sampled_from([(1, 1), (4, 1), (4, 2)]))
    pointers = (
        Pointer("x", torch.int32),
        Pointer("out", torch.int32, "write"),
        Pointer("number", torch.int64, "write"),
    )
    body = (
        Store("out", (i * 11 + j,), load("x", (place,), torch.int32)),
        Store("number", (i * 11 + j,), index_value(place)),
    )
    kernel = Kernel(pointers, (), (Loop(i, "serial", (Loop(j, "vector", body, lanes, copies),)),))
    memory = [torch.arange(100).to(torch.int32), torch.zeros(55, dtype=torch.int32), torch.zeros(55, dtype=torch.int64)]
    assert_same(str(kernel), memory)


@pytest.mark.parametrize(("kind", "dtype"), [
    ("uniform", torch.float32), ("uniform", torch.float64), ("uniform", torch.bfloat16), ("uniform", torch.float16),
    ("bits", torch.int64), ("bits", torch.int32),
], ids=lambda item: item if isinstance(item, str) else short(item))  # fmt: skip
def test_random_numbers_have_the_bits_of_the_oracle(kind, dtype):
    i = axis("i", 27)
    seed = load("seed", (axis("k", 1) * 0,), torch.int64)
    far = number(1 << 40)
    cases = [(1, 1, 3, number(5)), (4, 2, 3, i * 3), (4, 2, 4, far), (4, 2, 4, i // 3), (8, 1, 8, number(5))]
    for lanes, copies, first, stream in cases:
        body = (Store("out", (i,), Random.intern(kind, seed, i + first, stream, dtype)),)
        kernel = Kernel(
            (Pointer("seed", torch.int64), Pointer("out", dtype, "write")),
            (),
            (Loop(i, "vector", body, lanes, copies),),
        )
        assert_same(str(kernel), [torch.tensor([-0x123456789ABCDEF]), torch.zeros(27, dtype=dtype)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=short)
def test_narrow_floats_are_summed_in_wide_ones(dtype):
    i = axis("i", 37)
    state = State("sum", ("s",), (torch.float32,))
    value = cast(load("x", (i,), dtype), torch.float32)
    body = (
        Accumulate((state,), (Loop(i, "reduction", (Update("s", (value,)),), 4, 2),)),
        Let("t", cast(op("add", *[local("s", torch.float32)] * 2), dtype)),
        Store("out", (axis("k", 1) * 0,), local("t", dtype)),
    )
    kernel = verify_kernel(Kernel((Pointer("x", dtype), Pointer("out", dtype, "write")), (), body))
    assert_same(str(kernel), [torch.arange(37).to(dtype), torch.zeros(1, dtype=dtype)])


def local(name, dtype):
    from ferrite.ir.expr import Local

    return Local.intern(name, dtype)
