"""Every operator torch has sample inputs for, compiled alone and compared with eager bit by bit.

With every operator an eager call, the compiled result must be the very bits and strides of eager. A few operators
are taken apart by torch's own tracing, whatever the backend (bilinear interpolation, for one): there the bits must be
those of `aot_eager`. An operator that `aot_eager` refuses must be refused here too, not mangled.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

pytestmark = pytest.mark.slow

SAMPLES = 3
OPTIONS = {"strict": True, "executor": "calls"}
# Memory without contents has no values to compare.
UNDEFINED = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}
OPERATORS = {f"{op.name}.{op.variant_test_name}".strip("."): op for op in op_db if torch.float32 in op.dtypes}


def outcome(fn, sample):
    """What a call gives: its results, or the exception it raises."""
    torch.manual_seed(0)
    try:
        return fn(sample.input, *sample.args, **sample.kwargs), None
    except Exception as error:
        return None, error


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_compiled_alone_it_is_eager(name):
    operator = OPERATORS[name]
    samples = list(itertools.islice(operator.sample_inputs("cpu", torch.float32), SAMPLES))

    def call(*args, **kwargs):
        return operator.op(*args, **kwargs)

    for sample in samples:
        eager, refused = outcome(call, sample)
        if refused is not None:
            continue
        torch.compiler.reset()
        ours, failure = outcome(torch.compile(call, backend="ferrite", options=OPTIONS), sample)
        if failure is None:
            assert_same_looks(ours, eager)
            if name in UNDEFINED or same_bits(ours, eager):
                continue
        torch.compiler.reset()
        # the whole graph: what `aot_eager` refuses must not run in eager behind it
        traced, expected = outcome(torch.compile(call, backend="aot_eager", fullgraph=True), sample)
        assert (failure is None) == (expected is None), f"aot_eager: {expected}, ferrite: {failure}"
        assert failure is not None or same_bits(ours, traced), "other values than eager and than aot_eager"


def assert_same_looks(ours, eager):
    """Structure, types, dtypes, shapes, layouts and strides."""
    our_leaves, eager_leaves = pytree.tree_leaves(ours), pytree.tree_leaves(eager)
    assert len(our_leaves) == len(eager_leaves)
    for mine, theirs in zip(our_leaves, eager_leaves, strict=True):
        assert type(mine) is type(theirs)
        if isinstance(theirs, torch.Tensor):
            assert (mine.dtype, mine.shape, mine.layout) == (theirs.dtype, theirs.shape, theirs.layout)
            if theirs.layout is torch.strided and theirs.numel():
                assert mine.stride() == theirs.stride()


def same_bits(ours, theirs) -> bool:
    try:
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    except AssertionError:
        return False
    return True
