"""Kernels written by hand compute what torch does, in any order that is free."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch

from ferrite.ir.kernel.canonical import canonical
from ferrite.ir.kernel.interpret import _Scalars, run_kernel
from ferrite.ir.kernel.laws import verify_kernel
from ferrite.ir.kernel.nodes import checks
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.reductions import REDUCTIONS
from ferrite.ir.states import STATES
from ferrite.ir.types import short
from tests.loop_kernels import GATHER, KERNELS, POINTWISE, SCATTER_ADD, SOFTMAX, changed, text

pytestmark = pytest.mark.quick


def results(source, inputs, outputs, sizes=(), order=None):
    """What a kernel writes, given inputs and the outputs as they are before."""
    memory = [tensor.reshape(-1).clone() for tensor in (*inputs, *outputs)]
    run_kernel(verify_kernel(parse_kernel(source)), memory, sizes, order)
    return [made.reshape(out.shape) for made, out in zip(memory[len(inputs) :], outputs, strict=True)]


def nan(*shape):
    return torch.full(shape, float("nan"))


def cases():
    torch.manual_seed(0)
    x = torch.randn(3, 5)
    y = torch.randn(5, dtype=torch.bfloat16)
    rows, wide = torch.randn(4, 11), torch.randn(19)
    ties = torch.tensor([[1.0, 3, 3, 2, 3], [float("nan"), 9, float("nan"), 1, 1], [float("-inf")] * 5])
    where, source, target = torch.tensor([5, 0, 5, 5, 2]), torch.randn(5, 3), torch.randn(6, 3)
    variance, mean = torch.var_mean(rows, 1, correction=0)
    yield "pointwise", [x, y], [nan(3, 5)], [3], [torch.sin(x * y.float())]
    yield "pointwise", [x[:0], y], [nan(0, 5)], [0], [x[:0]]
    yield "row softmax", [rows], [nan(4, 11)], [4, 11], [rows.softmax(1)]
    yield "online softmax", [wide], [nan(19)], [19], [wide.softmax(0)]
    for values in ([1.0, float("-inf"), 2.0], [float("inf"), 1.0], [float("-inf")] * 2, [float("nan"), 1.0]):
        special = torch.tensor(values)
        yield "online softmax", [special], [nan(len(values))], [len(values)], [special.softmax(0)]
    for m, n in ((4, 4), (5, 7), (1, 9), (8, 3)):
        matrix = torch.randn(m, n)
        yield "transposing copy", [matrix], [nan(n, m)], [m, n], [matrix.t()]
    for each in (rows, ties):
        outputs = [nan(each.shape[0]), torch.zeros(each.shape[0], dtype=torch.int64)]
        yield "argmax", [each], outputs, list(each.shape), list(each.max(1))
    yield "welford", [rows], [nan(4), nan(4)], [4, 11], [mean, variance]
    yield "welford", [wide], [nan(1), nan(1)], [1, 19], [wide.mean().view(1), wide.var(correction=0).view(1)]
    yield "scatter-add", [where, source], [target], [5], [target.index_add(0, where, source)]
    yield "gather", [where, source[:2].reshape(6)], [nan(5)], [5], [source[:2].reshape(6)[where]]
    yield (
        "gather",
        [where.neg(), source[:2].reshape(6)],
        [nan(5)],
        [5],
        [torch.tensor([-1.0, source[0, 0], -1, -1, -1])],
    )
    yield "centred rows", [rows], [nan(4, 11)], [4, 11], [rows - rows.sum(1, keepdim=True)]
    ends, flat = torch.tensor([0, 3, 3, 7, 8]), torch.randn(12, 6)
    sums = [flat[begin:end].sum(0) for begin, end in itertools.pairwise(ends.tolist())]
    yield "ragged rows", [ends, flat], [nan(4, 6)], [4], [torch.stack(sums)]
    counts, some = torch.tensor([0, 4, 1]), torch.randn(3, 4)
    yield "ragged lanes", [counts, some], [nan(3)], [3], [torch.stack([torch.tensor(0.0), some[1].sum(), some[2, 0]])]
    yield "cumulative sum", [wide], [nan(19)], [19], [wide.cumsum(0)]
    decay, start = torch.tensor([0.5, 0.25, 2.0]), torch.tensor([1.0, 2.0, 3.0])
    yield "linear scan", [decay, start], [nan(3)], [3], [torch.tensor([1.0, 2.25, 7.5])]
    yield "column sums", [rows], [nan(11), nan(11)], [4, 11], [rows.sum(0), (rows * rows).sum(0)]
    yield "column sums", [rows[:0]], [nan(11), nan(11)], [0, 11], [torch.zeros(11)] * 2


CASES = list(cases())


@pytest.mark.parametrize("case", range(len(CASES)), ids=[case[0].replace(" ", "-") for case in CASES])
def test_a_kernel_computes_what_torch_does(case):
    name, inputs, outputs, sizes, expected = CASES[case]
    for order in (None, random.Random(0), random.Random(1)):
        made = results(KERNELS[name], inputs, outputs, sizes, order)
        torch.testing.assert_close(made, expected, equal_nan=True, rtol=2e-6, atol=2e-6)


def test_an_index_outside_is_an_error():
    with pytest.raises(IndexError, match="index 6 is out of bounds for dimension with size 6"):
        results(GATHER, [torch.tensor([6]), torch.randn(6)], [nan(1)], [1])
    own = changed(GATHER, "data(v0, 6)", "data(v0, 6, 'RuntimeError: {index} of {size}')")
    with pytest.raises(RuntimeError, match="6 of 6"):
        results(own, [torch.tensor([6]), torch.randn(6)], [nan(1)], [1])


def test_checks_are_numbered_in_order():
    assert [str(check) for check in checks(parse_kernel(SCATTER_ADD))] == ["data(row, 6)"]
    assert [str(check) for check in checks(parse_kernel(GATHER))] == ["data(where[i], 6)"]
    assert checks(parse_kernel(SOFTMAX)) == []


def test_a_tile_that_is_read_before_it_is_written_shows():
    source = text("""
        def kernel(out):
            out = pointer(f32, 'write')
            tile = scratch(f32, [1])
            v0: f32 = tile[0]
            out[0] = v0
    """)
    (made,) = results(source, [], [torch.zeros(1)])
    assert made.isnan().all()


def test_memory_outside_is_an_error():
    with pytest.raises(IndexError, match="lies outside"):
        results(POINTWISE, [torch.randn(3, 4), torch.randn(5).bfloat16()], [nan(3, 5)], [3])


def test_canonical_kernels_compute_the_same():
    rows = torch.randn(2, 3)
    renamed = str(canonical(parse_kernel(SOFTMAX)))
    assert renamed.startswith("def kernel(p0, p1, s0, s1):")
    (made,) = results(renamed, [rows], [nan(2, 3)], [2, 3])
    torch.testing.assert_close(made, rows.softmax(1))


NUMBERS = (torch.float32, torch.int32)
EXTREMES = ("amax", "amin", "argmax", "argmin", "argmax_of_window")
TYPES = {
    "any": (torch.bool,),
    "all": (torch.bool,),
    "xor": (torch.int32, torch.bool),
    "welford": (torch.float32,),
    "softmax": (torch.float32,),
    **dict.fromkeys(EXTREMES, (*NUMBERS, torch.bool)),
}


@pytest.mark.parametrize(("kind", "dtype"), [(kind, dtype) for kind in STATES for dtype in TYPES.get(kind, NUMBERS)])
def test_states_agree_with_the_reductions_of_programs(kind, dtype):
    row = STATES[kind]
    types = [dtype, torch.int64] if kind.startswith("arg") else [dtype] * row.gives
    names = [f"r{place}" for place in range(row.gives)]
    pointers = [f"o{place}" for place in range(row.gives)]
    bound = names[0] if len(names) == 1 else f"({', '.join(names)})"
    taken = "v0, v1" if row.takes == 2 else "v0"
    lines = [
        f"def kernel(x, {', '.join(pointers)}):",
        f"    x = pointer({short(dtype)}, 'read')",
        *(f"    {name} = pointer({short(one)}, 'write')" for name, one in zip(pointers, types, strict=True)),
        f"    with {kind}({', '.join(map(short, types))}) as {bound}:",
        "        for j in reduction(9, lanes=4):",
        f"            v0: {short(dtype)} = x[j]",
        *(["            v1: i64 = index(j)"] if row.takes == 2 else []),
        f"            {names[0]}.update({taken})",
        *(f"    {pointer}[0] = {name}" for pointer, name in zip(pointers, names, strict=True)),
    ]
    torch.manual_seed(0)
    samples = [torch.randint(-3, 3, (9,)).to(dtype), torch.randn(9).to(dtype)]
    if dtype.is_floating_point and kind in EXTREMES:
        samples.append(torch.where(torch.rand(9) < 0.4, torch.nan, torch.randn(9)).to(dtype))
    for values in samples:
        expected = [result.reshape(1) for result in REDUCTIONS[kind].meaning(values)]
        outputs = [torch.zeros(1, dtype=one) for one in types]
        made = results("\n".join(lines), [values], outputs, order=random.Random(0))
        wanted = [one.to(two.dtype) for one, two in zip(expected, outputs, strict=True)]
        torch.testing.assert_close(made, wanted, equal_nan=True)


@pytest.mark.parametrize("kind", [name for name, row in STATES.items() if row.take])
def test_an_update_by_a_value_is_one_by_its_state(kind):
    row, special = STATES[kind], [1.5, -2.0, 0.0, float("-inf"), float("inf"), float("nan")]
    dtypes = (torch.float64,) * row.gives

    def applied(parts, values):
        return [_Scalars(params=values).value(part) for part in parts]

    def number(value):
        return torch.tensor(value, dtype=torch.float64)

    for first in special:
        for second in special:
            if kind == "welford" and not math.isfinite(first + second):
                continue
            begin = applied(row.begin(dtypes), [])
            lifted = [applied(row.lift(dtypes), [number(each)]) for each in (first, second)]
            state = applied(row.take(dtypes), [*begin, number(first)])
            torch.testing.assert_close(state, applied(row.combine(dtypes), [*begin, *lifted[0]]), equal_nan=True)
            taken = applied(row.take(dtypes), [*state, number(second)])
            torch.testing.assert_close(taken, applied(row.combine(dtypes), [*state, *lifted[1]]), equal_nan=True)
