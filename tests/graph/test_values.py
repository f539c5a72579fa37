"""Fake values of nodes: what they are computed to be, and that each node has an object of its own."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from ferrite.graph.values import compute

quick = pytest.mark.quick
aten = torch.ops.aten
SHAPES = [(24,), (2, 12), (12, 2), (2, 3, 4), (1, 24), (24, 1), (2, 1, 12), (1, 1, 24), (2, 3, 1, 4, 1), (4, 6)]
SHAPES += [(-1, 4), (2, -1)]


def computed(real: torch.Tensor, target, *args):
    """The value of a node that calls an operator on a fake of this tensor, and that fake."""
    mode = FakeTensorMode(shape_env=ShapeEnv())
    fake = mode.from_tensor(real, static_shapes=True)
    graph = torch.fx.Graph()
    operand = graph.placeholder("x")
    operand.meta["val"] = fake
    value, _ = compute(graph.call_function(target, (operand, *args)), mode)
    return value, fake


@pytest.mark.parametrize("target", [aten.view.default, aten.reshape.default], ids=str)
@pytest.mark.parametrize("offset", [0, 5])
def test_views_of_what_lies_dense_have_the_strides_that_torch_gives(target, offset):
    for old, new in itertools.product([shape for shape in SHAPES if -1 not in shape], SHAPES):
        real = torch.randn(40)[offset : offset + 24].view(old)
        expected = target(real, new)
        value, fake = computed(real, target, list(new))
        found = value.shape, value.stride(), value.storage_offset()
        assert found == (expected.shape, expected.stride(), expected.storage_offset()), (old, new)
        assert value.untyped_storage() is fake.untyped_storage() or value.untyped_storage()._cdata == (
            fake.untyped_storage()._cdata
        )


@quick
@pytest.mark.parametrize(
    ("real", "shape"),
    [
        (torch.randn(4, 6).t(), [24]),  # a copy
        (torch.randn(2, 3, 4).permute(0, 2, 1), [2, 12]),
        (torch.randn(0, 3), [3, 0]),
        (torch.randn(1, 6).as_strided((1, 6), (99, 1)), [6]),
        (torch.randn(3, 1).expand(3, 4), [12]),
    ],
    ids=["turned", "permuted", "empty", "one row", "repeated"],
)
def test_others_have_them_too(real, shape):
    expected = aten.reshape.default(real, shape)
    value, _ = computed(real, aten.reshape.default, shape)
    assert (value.shape, value.stride()) == (expected.shape, expected.stride())


@quick
@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.reshape.default, ([4, 6],)),
        (aten.view.default, ([4, 6],)),
        (aten.contiguous.default, ()),
        (aten.mul.Tensor, (2,)),
    ],
    ids=str,
)
def test_a_value_is_an_object_of_its_own(target, args):
    value, fake = computed(torch.randn(4, 6), target, *args)
    assert value is not fake
    assert value.shape == fake.shape
