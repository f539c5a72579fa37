"""Attention as kernels for a CPU: blocked with running maxima, functions of scores inside."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ferrite
from ferrite.ir.kernel import Accumulate, walk
from ferrite.ir.kernel.interpret import run_kernel
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.interpret import Interpreter
from ferrite.lower.graph import LoweredProgram, lower_module
from ferrite.schedule.steps import Plan
from tests.compare import assert_no_farther, assert_same_as_eager, compile_strict, reset
from tests.flex_attention import CAUSAL, attention_within_documents, blocks, two_samples_of_three_documents
from tests.schedule.plans import MACHINE, loops, make

pytestmark = [
    pytest.mark.usefixtures("llvm_kernels"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated"),
]
slow = pytest.mark.slow
CHECKED = {"check_bounds": True}
SMALL = replace(MACHINE, attention_rows=8, attention_keys=8)  # so that a few rows and keys are several blocks


def qkv(
    rows: int = 70, keys: int = 75, width: int = 24, columns: int = 20, heads: int = 2, groups: int = 1, batch: int = 1
) -> list[Any]:
    return [
        torch.randn(batch, heads, rows, width),
        torch.randn(batch, heads // groups, keys, width),
        torch.randn(batch, heads // groups, keys, columns),
    ]


def listed(found: Any) -> list[torch.Tensor]:
    return list(found) if isinstance(found, tuple) else [found]


def assert_one_kernel(fn: Callable[..., Any], inputs: list[torch.Tensor], more: int = 0, **options: Any) -> None:
    """As near to float64 as eager, with its strides; one kernel has all of the attention."""
    reset()
    found = listed(compile_strict(fn, options={**CHECKED, **options}, fullgraph=True, dynamic=False)(*inputs))
    record = ferrite.last_compile()
    assert sum("attention" in name for kernel in record.kernels for name in kernel.operators) == 1 + more
    assert not [call for graph in record.graphs for call in graph.eager_calls]
    exact = listed(fn(*[each.double() if each.is_floating_point() else each for each in inputs]))
    for mine, eager, true in zip(found, listed(fn(*inputs)), exact, strict=True):
        assert mine.stride() == eager.stride()
        assert_no_farther(mine, eager, true, "attention")


# --- sizes and layouts ------------------------------------------------------------------------------------------------


@pytest.mark.quick
@pytest.mark.parametrize(
    "rows",
    [5, pytest.param(16, marks=slow), pytest.param(70, marks=pytest.mark.lengthy), pytest.param(128, marks=slow)],
)
def test_keys_are_gone_through_block_by_block(rows):
    assert_one_kernel(flex_attention, qkv(rows=rows))


@pytest.mark.parametrize(
    "sizes",
    [
        {"rows": 1, "keys": 1, "width": 1, "columns": 1},
        pytest.param({"rows": 64, "keys": 64, "width": 64, "columns": 64}, marks=slow),
        pytest.param({"rows": 33, "keys": 67, "width": 7, "columns": 3}, marks=slow),
        pytest.param({"rows": 17, "keys": 200, "width": 256, "columns": 5}, marks=slow),
        {"rows": 97, "keys": 2, "width": 33, "columns": 65, "batch": 3},
    ],
    ids=str,
)
def test_sizes(sizes):
    assert_one_kernel(lambda q, k, v: flex_attention(q, k, v, return_lse=True), qkv(**sizes))


def test_views():
    def fn(x, k, v):
        q = x.unflatten(-1, (2, 12)).transpose(1, 2)[:, :, ::2]
        return flex_attention(q, k.mT, v[..., 3:, ::3]) * 2

    assert_one_kernel(fn, [torch.randn(2, 41, 24), torch.randn(2, 2, 12, 30), torch.randn(2, 2, 33, 19)])


def test_heads_share_keys():
    mask = blocks(lambda b, h, m, n: (m >= n) & (m - n < 9 + h), 40, 40, heads=4)
    assert_one_kernel(
        lambda q, k, v: flex_attention(q, k, v, block_mask=mask, enable_gqa=True), qkv(40, 40, heads=4, groups=2)
    )


@slow
def test_a_batch_shares_keys():
    inputs = [torch.randn(3, 2, 20, 8), *(torch.randn(1, 2, 40, 8) for _ in range(2))]
    mask = create_block_mask(lambda b, h, m, n: m + b >= n, 3, None, 20, 40, device="cpu", BLOCK_SIZE=16)
    assert_one_kernel(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_in_16_bits_sums_have_32(dtype):
    mask = blocks(CAUSAL, 70, 75)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + (m - n) * 0.01, block_mask=mask)

    assert_one_kernel(fn, [each.to(dtype) for each in qkv()])


def test_lengths_that_are_not_known():
    f = compile_strict(lambda q, k, v: flex_attention(q, k, v) * 2, options=CHECKED, fullgraph=True, dynamic=True)
    for rows, keys in ((36, 40), (33, 70), (130, 6)):
        inputs = qkv(rows, keys)
        torch.testing.assert_close(f(*inputs), flex_attention(*inputs) * 2, rtol=2e-5, atol=2e-5)
        assert not [call for graph in ferrite.last_compile().graphs for call in graph.eager_calls]


def test_threads_do_not_change_a_bit():
    f, inputs = compile_strict(flex_attention), qkv(300, 300)
    threads = torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(f(*inputs))
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# --- functions of scores, and masks -----------------------------------------------------------------------------------


def test_masks_with_blocks():
    mask = blocks(CAUSAL, 70, 75)
    assert_one_kernel(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, scale=0.3), qkv())


@pytest.mark.parametrize(
    "side", [pytest.param(16, marks=slow), pytest.param(48, marks=slow), pytest.param(128, marks=slow)]
)
def test_sides_of_blocks(side):
    mask = blocks(lambda b, h, m, n: (m >= n) & (m - n < 40), 200, 200, side=side)
    assert_one_kernel(lambda q, k, v: flex_attention(q, k, v, block_mask=mask, return_lse=True), qkv(200, 200))


@slow
def test_documents_and_views_that_a_graph_makes():
    assert_one_kernel(attention_within_documents, two_samples_of_three_documents())


def test_scores_are_changed_by_captured_tensors():
    slopes, table = torch.randn(2).bfloat16(), torch.randn(2, 150)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s * slopes[h] + table[h, m - n + 75].sin())

    assert_one_kernel(fn, qkv())


@slow
def test_scores_that_are_places():
    table = torch.randn(5)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + table[(s > 0).int() + (m > n).int()])

    assert_one_kernel(fn, qkv())


def test_rows_without_anything_allowed_are_zero():
    mask = blocks(lambda b, h, m, n: (m >= n) & (m % 3 > 0) & (m < 30), 36, 40)

    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, return_lse=True)

    inputs = qkv(36, 40)
    assert_one_kernel(fn, inputs)
    out, lse = fn(*inputs)
    assert not out[:, :, 0].any()
    assert bool((lse[:, :, 35] == -math.inf).all())


def test_infinities_and_numbers_that_are_none_are_eagers():
    inputs = qkv()
    inputs[0][0, 0, 3, 5], inputs[1][0, 1, 7, 2], inputs[2][0, 0, 1, 1] = math.nan, math.inf, -math.inf

    def fn(q, k, v):
        highest = lambda s, b, h, m, n: torch.where((m == 9) & (n == 70), math.inf, s)  # noqa: E731
        return flex_attention(q, k, v, score_mod=highest, return_lse=True)

    assert_one_kernel(fn, inputs)


def test_blocks_that_memory_names_wrongly_stay_inside():
    """Lists are no indices that eager checks: eager does not look at them. They cannot lead outside of memory."""
    wild = blocks(CAUSAL, 36, 40)
    wild.kv_num_blocks, wild.kv_indices = wild.kv_num_blocks + 9, wild.kv_indices - 70
    found = compile_strict(lambda q, k, v: flex_attention(q, k, v, block_mask=wild), options=CHECKED)(*qkv(36, 40))
    assert bool(found.isfinite().all())


def test_blocks_without_anything_are_not_looked_at():
    """Keys that are not there for any row could be anything."""
    mask = blocks(lambda b, h, m, n: n < 32, 70, 75)
    inputs = qkv()
    inputs[1][:, :, 32:] = math.nan
    found = compile_strict(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), options=CHECKED)(*inputs)
    right = flex_attention(inputs[0], *(each[:, :, :32] for each in inputs[1:]))
    torch.testing.assert_close(found, right, rtol=2e-5, atol=2e-5)


def test_an_index_outside_of_a_captured_tensor_is_eagers_error():
    table, far = torch.randn(2, 40), torch.full((36,), 39)

    def fn(q, k, v, places):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + table[h, places[m]])

    assert_one_kernel(fn, [*qkv(36, 40), far])
    far[7] = 40
    with pytest.raises(IndexError):
        compile_strict(fn)(*[*qkv(36, 40), far])


# --- torch's attention ------------------------------------------------------------------------------------------------

OWN = {"own_attention": "always"}
sdpa = F.scaled_dot_product_attention


@pytest.mark.parametrize(
    "sizes",
    [
        {},
        {"rows": 1, "keys": 130},
        {"rows": 3, "keys": 130, "heads": 4, "groups": 2, "batch": 2},
        pytest.param({"rows": 130, "keys": 6}, marks=slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("is_causal", [pytest.param(False, marks=slow), True])
def test_attention_of_torch(sizes, is_causal):
    inputs = qkv(columns=24, **sizes)
    gqa = sizes.get("groups", 1) > 1
    assert_one_kernel(lambda q, k, v: sdpa(q, k, v, is_causal=is_causal, enable_gqa=gqa), inputs, **OWN)


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float16, marks=slow)])
def test_attention_of_torch_in_16_bits(dtype):
    assert_one_kernel(
        lambda q, k, v: sdpa(q, k, v, is_causal=True), [each.to(dtype) for each in qkv(columns=24)], **OWN
    )


def test_masks_of_torch():
    added, hidden = torch.randn(1, 1, 70, 75), torch.rand(1, 1, 1, 75) > 0.5
    assert_one_kernel(lambda q, k, v, mask: sdpa(q, k, v, mask), [*qkv(columns=24), added], **OWN)
    assert_one_kernel(lambda q, k, v, mask: sdpa(q, k, v, mask), [*qkv(columns=24), hidden], **OWN)
    added[:, :, 5] = -math.inf
    assert_one_kernel(lambda q, k, v, mask: sdpa(q, k, v, mask), [*qkv(columns=24), added], **OWN)


def test_layers_have_what_lies_between_them():
    def layer(x, w):
        q, k, v = (part.unflatten(-1, (2, 16)).transpose(1, 2) for part in (x @ w).chunk(3, -1))
        return sdpa(q, k, v).transpose(1, 2).flatten(2).relu()

    def inputs():
        return [torch.randn(2, 50, 32), torch.randn(32, 96)]

    assert_same_as_eager(layer, inputs, options={**CHECKED, **OWN})


def test_gradients_are_torchs():
    def loss(q, k, v):
        return sdpa(q, k, v, is_causal=True).square().mean()

    def inputs():
        return [each.requires_grad_() for each in qkv(columns=24)]

    assert_same_as_eager(loss, inputs, backward=True, options={**CHECKED, **OWN})
    forward, backward = ferrite.last_compile().graphs
    assert not forward.eager_calls
    assert [call.operator for call in backward.eager_calls] == [
        "aten._scaled_dot_product_flash_attention_for_cpu_backward.default"
    ]


@pytest.mark.parametrize(
    "options",
    [{"own_attention": "off"}, {**OWN, "numerics": "strict"}, {"own_attention": "auto", "executor": "interpreter"}],
)
def test_torch_keeps_its_kernel(options):
    reset()
    compile_strict(sdpa, options=options)(*qkv(columns=24))
    assert not ferrite.last_compile().rewrites.get("own_attention")


# --- kernels ----------------------------------------------------------------------------------------------------------


def plan_of(fn: Callable[..., Any], *inputs: torch.Tensor) -> tuple[Plan, LoweredProgram, list[Any]]:
    """A plan of which every kernel keeps the laws, and what it is given."""
    made: list[Any] = []

    def compile_graph(gm: torch.fx.GraphModule, _fakes: Any) -> Any:
        lowered = lower_module(gm, attention_on={"cpu"})
        plan = make(lowered.program, machine=SMALL)

        def run(*given: Any) -> Any:
            made.append((plan, lowered, list(given)))
            return gm(*given)

        return run

    reset()
    with torch.no_grad():
        torch.compile(fn, backend=aot_autograd(fw_compiler=compile_graph), fullgraph=True)(*inputs)
    (found,) = made
    return found


@pytest.mark.parametrize("rows", [8, 5])
def test_the_interpreter_of_kernels_agrees(rows):
    mask = blocks(CAUSAL, rows, 18, side=16)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + h * n * 0.1, block_mask=mask)

    inputs = qkv(rows, 18, 3, 2)
    plan, lowered, given = plan_of(fn, *inputs)
    (launch,) = plan.launches
    assert parse_kernel(str(launch.kernel)) == launch.kernel
    program = Interpreter(plan.program, lowered.objects)
    program.take(given)
    memory = [program.tensor(name).view(-1) for name in launch.arguments]
    run_kernel(launch.kernel, memory)
    found = program.output(plan.program.outputs[0])
    torch.testing.assert_close(found, fn(*inputs), rtol=2e-5, atol=2e-5)


def test_tiles_of_sums_are_in_registers():
    plan, *_ = plan_of(flex_attention, *qkv(16, 16, 8, 8))
    (launch,) = plan.launches
    sums = [item for item in walk(launch.kernel.body) if isinstance(item, Accumulate) and item.states[0].kind == "sum"]
    around = [[loop for loop in loops(launch.kernel, "vector") if each in walk(loop.body)] for each in sums]
    tile = [(4, 2), (1, 8)]  # two vectors of rows, eight keys or columns; and sums of weights have rows alone
    assert [[(each.lanes, each.copies) for each in some] for some in around] == [tile, [(4, 2)], tile]


# --- what stays products and loops ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "make_inputs", "options"),
    [
        ("float64", lambda: [each.double() for each in qkv()], {}),
        ("256 at most", lambda: qkv(width=260), {}),
        ("no kernel of its own", qkv, {"numerics": "strict"}),
    ],
)
def test_what_has_no_kernel_says_why(reason, make_inputs, options):
    inputs = make_inputs()
    reset()
    found = compile_strict(lambda q, k, v: flex_attention(q, k, v), options=options)(*inputs)
    torch.testing.assert_close(found, flex_attention(*inputs), rtol=2e-5, atol=2e-5)
    calls = [call for graph in ferrite.last_compile().graphs for call in graph.eager_calls]
    assert any(reason in call.reason for call in calls), calls
