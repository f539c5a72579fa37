"""Every second element and the one behind it: one load of both, where both are wanted everywhere."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ferrite.codegen.triton import kernel_source
from tests.gpu_plans import TINY, assert_as_eager

X, EVEN = torch.randn(5, 40), torch.randn(8, 64)
IMAGES = torch.randn(2, 3, 22, 18)

BOTH = {
    "halves": (lambda x: x[:, ::2] - x[:, 1::2], [EVEN], 1),
    "halves of a few": (lambda x: x[:, ::2] - x[:, 1::2], [X], None),
    "of a part": (lambda x: x[:, 32::2] * x[:, 33::2], [EVEN], 1),
    "rows of an odd length": (lambda x: x[:, :38:2] + x[:, 1:39:2], [torch.randn(5, 39)], None),
    "complex numbers": (lambda x: x[..., 0] ** 2 + x[..., 1] ** 2, [torch.randn(6, 8, 2)], 1),
    "pooling": (lambda x: F.max_pool2d(x, 2), [torch.randn(2, 2, 32, 32)], 2),
    "pooling of few": (lambda x: F.max_pool2d(x, 2), [IMAGES], None),
    "padded windows": (lambda x: F.max_pool2d(F.pad(x, (1, 1, 1, 1)), 3, 2), [IMAGES], None),
    "in place": (lambda x: x[:, ::2].add_(x[:, 1::2]), [X.clone()], None),
    "sixteen bits": (lambda x: x[:, ::2] - x[:, 1::2], [EVEN.bfloat16()], 1),
}


@pytest.mark.parametrize("machine", [None, TINY], ids=["H200", "tiny"])
@pytest.mark.parametrize("name", BOTH)
def test_pairs_are_loaded_at_once(name, machine):
    function, inputs, loads = BOTH[name]
    plan = assert_as_eager(function, *inputs, **({"machine": machine} if machine else {}))
    source = kernel_source(plan.launches[0].kernel, "kernel")
    if machine is None and loads is not None:
        assert source.count("tl.load(") == source.count("tl.split(") == loads


NOT_BOTH = {
    "one of them": lambda x: x[:, ::2] * 2,
    "odd ones first": lambda x: x[:, 1:39:2] + x[:, 2::2],
    "every third": lambda x: x[:, :39:3] + x[:, 1:39:3],
    "one only where it is there": lambda x: x[:, ::2] + F.pad(x, (0, 2))[:, 3:42:2],
}


@pytest.mark.parametrize("name", NOT_BOTH)
def test_what_is_no_pair_is_loaded_by_itself(name):
    plan = assert_as_eager(NOT_BOTH[name], X)
    assert not any("tl.split(" in kernel_source(launch.kernel, "kernel") for launch in plan.launches)


def test_an_element_that_is_there_where_another_is_not():
    """The last even place has no odd one behind it: nothing is read there."""
    x = torch.randn(4, 39)

    def function(x):
        return x[:, ::2] + F.pad(x, (0, 1))[:, 1::2]

    plan = assert_as_eager(function, x)
    assert "tl.split(" not in kernel_source(plan.launches[0].kernel, "kernel")
