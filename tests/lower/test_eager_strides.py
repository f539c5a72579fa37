"""Eager's rules for strides, compared with eager: sizes of 0 and 1, broadcasts, conversions, memory with holes."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from ferrite.ir.index.algebra import as_index, number, symbol
from ferrite.lower.eager_strides import Placed, Undecided, decided, elementwise, like_operand, transformed
from ferrite.lower.probes import Asked

aten = torch.ops.aten
UNARY = [aten.abs.default, aten.exp.default, aten.neg.default, aten.clone.default, aten.zeros_like.default]
WITH_NUMBERS = [(aten.add.Tensor, 1), (aten.mul.Scalar, 2.5), (aten.gt.Scalar, 0), (aten.clamp_min.default, 0)]
BACKWARD = [
    (aten.elu_backward.default, (1.0, 1, 1, False)),
    (aten.hardsigmoid_backward.default, ()),
    (aten.hardswish_backward.default, ()),
    (aten.hardtanh_backward.default, (-1, 1)),
    (aten.leaky_relu_backward.default, (0.1, False)),
    (aten.mish_backward.default, ()),
    (aten.softplus_backward.default, (1, 20)),
]
BINARY = [aten.add.Tensor, aten.div.Tensor, aten.ge.Tensor, aten.maximum.default, aten.threshold_backward.default]


def laid_out(rng: random.Random, sizes: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Ones somewhere in memory: in any order, with holes, strides along one element at will."""
    order = rng.sample(range(len(sizes)), len(sizes))
    strides, step = [0] * len(sizes), 1
    for dim in order:
        strides[dim] = step
        step *= max(sizes[dim], 1) * rng.choice([1, 1, 1, 2])
    for dim, size in enumerate(sizes):
        if size == 1 and rng.random() < 0.5:
            strides[dim] = rng.choice([0, 1, 7, step])
    return torch.ones(step + 8 * len(sizes) + 1, dtype=dtype).as_strided(sizes, strides)


def strides_by_rule(target, arguments, result):
    mode, graph = FakeTensorMode(), torch.fx.Graph()

    def picture(tensor):
        with mode:
            return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)

    def operand(each):
        if isinstance(each, list):
            return [operand(part) for part in each]
        if not isinstance(each, torch.Tensor):
            return each
        node = graph.placeholder("x")
        node.meta["val"] = picture(each)
        return node

    operands = [operand(each) for each in arguments]
    node = graph.call_function(target, tuple(operands))
    node.meta["val"] = picture(result)
    return Asked().by_rule(node, [node.meta["val"]])


@pytest.mark.parametrize("seed", range(3))
def test_rules_say_what_eager_does(seed: int) -> None:
    rng = random.Random(seed)
    types = [torch.float32, torch.float64, torch.int64]
    for _ in range(20):
        sizes = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
        x = laid_out(rng, sizes, rng.choice(types))
        y = laid_out(rng, [rng.choice([size, size, 1]) for size in sizes], rng.choice(types))
        calls = [(target, (x,)) for target in UNARY] + [(target, (x, each)) for target, each in WITH_NUMBERS]
        calls += [(target, (x, y)) for target in BINARY[:-1]]
        if x.shape == y.shape and x.dtype == y.dtype:
            calls.append((BINARY[-1], (x, y, 0)))
        for target, arguments in calls:
            result = target(*arguments)
            found = strides_by_rule(target, arguments, result)
            assert found == (result.stride(),), (target, [(*each.shape, each.stride()) for each in (x, y)])


@pytest.mark.parametrize("seed", range(3))
def test_views_and_reductions_lie_as_in_eager(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        sizes = [rng.choice([0, 1, 1, 2, 3, 4]) for _ in range(rng.randint(1, 4))]
        x, flat = laid_out(rng, sizes, torch.float32), [size for size in sizes if size != 1]
        for _ in range(rng.randint(0, 2)):
            flat.insert(rng.randint(0, len(flat)), 1)
        wider = [rng.choice([1, 2]) for _ in range(rng.randint(0, 2))]
        wider += [rng.choice([1, 3]) if size == 1 else size for size in sizes]
        calls = [(aten.expand.default, (x, wider)), (aten.masked_fill.Scalar, (x, x > 0, 2))]
        calls += [(aten.sum.dim_IntList, (x, [rng.randrange(x.ndim)], rng.random() < 0.5))]
        calls += [(aten.view.default, (x, each)) for each in (sizes, flat, [*sizes[:-2], math.prod(sizes[-2:])])]
        for target, arguments in calls:
            try:
                result = target(*arguments)
            except RuntimeError:  # it cannot be viewed so
                continue
            found = strides_by_rule(target, arguments, result)
            assert found == (result.stride(),), (target, x.shape, x.stride(), arguments[1:])


@pytest.mark.parametrize("seed", range(3))
def test_concatenations_lie_as_in_eager(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(80):
        sizes = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.choice([2, 3, 4, 4, 4, 5]))]
        x, y = (laid_out(rng, sizes, torch.float32) for _ in range(2))
        if rng.random() < 0.6 and len(sizes) > 3:  # with the channels last, but along dimensions of one
            x, y = (torch.ones(sizes[:1] + sizes[2:] + sizes[1:2]).movedim(-1, 1) for _ in range(2))
        dims = [rng.randrange(len(sizes)) for _ in range(2)]
        shifts = [rng.choice([-1, 1, 2, 3]) for _ in range(2)]
        calls = [(target, ([x, y], dim)) for target in (aten.cat.default, aten.stack.default) for dim in (0, *dims)]
        calls += [(aten.stack.default, ([x, y, x], -1)), (aten.stack.default, ([x],))]
        calls += [(aten.roll.default, (x, shifts, dims)), (aten.roll.default, (x, shifts[:1], dims[:1]))]
        calls += [(aten.roll.default, (x, shifts[:1]))]
        for target, arguments in calls:
            result = target(*arguments)
            found = strides_by_rule(target, arguments, result)
            assert found == (result.stride(),), (target, sizes, x.stride(), y.stride(), arguments[1:])


@pytest.mark.parametrize("seed", range(3))
def test_what_indices_pick_lies_as_in_eager(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(120):
        sizes = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.randint(1, 4))]
        x, common = laid_out(rng, sizes, torch.float32), [rng.choice([0, 1, 1, 2]) for _ in range(rng.randint(0, 3))]
        indices: list[torch.Tensor | None] = [None] * x.ndim
        for dim in rng.sample(range(x.ndim), rng.randint(1, min(x.ndim, 3))):
            own = [rng.choice([size, size, 1]) for size in common][rng.choice([0, 0, 1]) :]
            indices[dim] = laid_out(rng, own, torch.int64).zero_()
        try:
            result = aten.index.Tensor(x, indices)
        except IndexError:  # of nothing
            continue
        found = strides_by_rule(aten.index.Tensor, (x, indices), result)
        laid = [None if each is None else (*each.shape, each.stride()) for each in indices]
        assert found == (result.stride(),), (sizes, x.stride(), laid)


@pytest.mark.parametrize("seed", range(3))
def test_gradients_of_activations_lie_as_in_eager(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        sizes = [rng.choice([0, 1, 1, 2, 3]) for _ in range(rng.randint(1, 4))]
        x, y = (laid_out(rng, sizes, torch.float32) for _ in range(2))
        for target, rest in BACKWARD:
            arguments = (x, *rest, y) if target is aten.elu_backward.default else (x, y, *rest)
            found = strides_by_rule(target, arguments, result := target(*arguments))
            assert found == (result.stride(),), (target, sizes, x.stride(), y.stride())


def test_what_holds_for_every_size_is_said_and_nothing_else() -> None:
    rows, one = symbol("u0", 0), number(1)
    column = Placed((rows, one), (one, rows))
    steps = decided(like_operand, [column], column.sizes)
    assert [step.operand for step in steps] == [(0, 0), (0, 1)]
    spread = decided(lambda operands, sizes: elementwise(operands, sizes, numbers=True), [column], column.sizes)
    assert [step.inside for step in spread] == [(), (0,)]
    assert spread[1].at_least_one
    some = symbol("s0", 2)
    unknown = Placed((some, one), (one, symbol("s1", 0)))
    with pytest.raises(Undecided):
        decided(lambda operands, sizes: elementwise(operands, sizes, numbers=True), [unknown], unknown.sizes)


@pytest.mark.parametrize("dims", list(itertools.permutations(range(3))))
@pytest.mark.parametrize("inner", [0, 1, -1])
def test_spectra_by_mkl_lie_with_the_transformed_dimension_inside(dims: tuple[int, ...], inner: int) -> None:
    """What MKL does, on numbers: the others go around in the order of the operand's strides."""
    operand = torch.empty(5, 6, 7).permute(dims)
    others = sorted({0, 1, 2} - {inner % 3}, key=lambda dim: operand.stride(dim))
    order = [inner % 3, *others]
    reference = torch.empty([operand.shape[dim] for dim in reversed(order)]).permute(
        [list(reversed(order)).index(dim) for dim in range(3)]
    )
    sizes = tuple(as_index(size) for size in operand.shape)
    placed = Placed(sizes, tuple(as_index(step) for step in operand.stride()))
    steps = transformed([placed], sizes, [inner])
    assert tuple(step.of(operand.shape, [operand.stride()], lambda size: size) for step in steps) == reference.stride()
    with pytest.raises(Undecided):
        transformed([placed], sizes, [0, 1])
