"""Attention as kernels for a GPU: captured by torch.compile, scheduled, and run in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import ferrite
from ferrite.codegen.triton import kernel_source
from ferrite.ir.kernel.nodes import Attend, walk
from ferrite.ir.kernel.parse import parse_kernel
from ferrite.ir.program.interpret import interpret
from ferrite.ir.program.laws import verify_program
from ferrite.ir.program.loop_operations import Attention
from ferrite.ir.program.nodes import Program, call_of
from ferrite.ir.program.parse import parse
from ferrite.lower.graph import LoweredProgram, lower_module
from ferrite.machines import AttentionBlocks, AttentionMachine
from ferrite.schedule.plan import make_plan
from ferrite.schedule.steps import Plan
from tests.cases import seldom
from tests.flex_attention import CAUSAL, attention_within_documents, blocks, two_samples_of_three_documents
from tests.gpu_plans import MACHINE, run_plan, scheduling

pytestmark = [
    pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed"),
    pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:return_lse is deprecated"),
]
SMALL = ((256, AttentionBlocks(16, 16, warps=4, stages=2)),)  # so that a few rows and keys are several blocks
TINY = replace(MACHINE, attention=AttentionMachine(SMALL, SMALL, SMALL, SMALL, min_piece_keys=1 << 20))
DECODING = replace(TINY, multiprocessors=4, attention=AttentionMachine(SMALL, SMALL, SMALL, SMALL, min_piece_keys=32))
MADE: list[tuple[LoweredProgram, Plan]] = []


@pytest.fixture(autouse=True)
def gradients_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """There torch refuses them before anybody is asked."""
    monkeypatch.setattr(flex, "_validate_device", lambda *given: None)
    MADE.clear()


def compiled(fn: Callable[..., Any], way: str = "triton", dynamic: bool = False) -> Callable[..., Any]:
    """`way`: triton, or the interpreter of kernels, or that of programs."""

    def compile_graph(gm: torch.fx.GraphModule, inputs: Any) -> Any:
        lowered = lower_module(gm, attention_on={"cpu"})
        assert parse(str(lowered.program)) == verify_program(lowered.program)
        plan = make_plan(lowered.program, {"cpu": scheduling(TINY)}, verify=True)
        assert not plan.not_compiled
        for kernel in (launch.kernel for launch in plan.launches):
            assert parse_kernel(str(kernel)) == kernel
        MADE.append((lowered, plan))

        def run(*given: Any) -> list[Any]:
            values = [each.detach() if isinstance(each, torch.Tensor) else each for each in given]
            with torch.no_grad():
                if way == "program":
                    return interpret(lowered.program, values, lowered.objects)
                return run_plan(plan, values, lowered.objects, triton=way == "triton")

        return run

    backend = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, inference_compiler=compile_graph)
    torch.compiler.reset()
    MADE.clear()
    return torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)


def attentions(program: Program) -> list[Attention]:
    return [each for each in program.operations if isinstance(each, Attention)]


def random(*sizes: int) -> torch.Tensor:
    return torch.randn(*sizes)


def qkv(
    rows: int = 36, keys: int = 40, width: int = 24, columns: int = 20, heads: int = 2, groups: int = 1
) -> list[Any]:
    return [
        random(1, heads, rows, width),
        random(1, heads // groups, keys, width),
        random(1, heads // groups, keys, columns),
    ]


def assert_as_eager(
    fn: Callable[..., Any],
    inputs: list[torch.Tensor],
    way: str = "triton",
    gradients: bool = True,
    tolerance: float = 2e-5,
    kernels: int | None = None,
) -> None:
    """Results and gradients, with eager's strides; so many kernels of attention (forward one, backward two)."""
    ours, theirs = (
        [each.clone().requires_grad_(gradients and each.is_floating_point()) for each in inputs] for _ in range(2)
    )
    found, wanted = compiled(fn, way)(*ours), fn(*theirs)
    found, wanted = (list(each) if isinstance(each, tuple) else [each] for each in (found, wanted))
    torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)
    assert [each.stride() for each in found] == [each.stride() for each in wanted]
    if gradients:
        outer = [torch.randn_like(each) for each in wanted]
        asked = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.requires_grad]
        mine = torch.autograd.grad(found, [x for x, _ in asked], outer)
        right = torch.autograd.grad(wanted, [y for _, y in asked], outer)
        torch.testing.assert_close(mine, right, rtol=4 * tolerance, atol=4 * tolerance)
        assert [each.stride() for each in mine] == [each.stride() for each in right]
    if kernels is not None:
        launches = [launch for _, plan in MADE for launch in plan.launches]
        attended = [each for launch in launches for each in walk(launch.kernel.body) if isinstance(each, Attend)]
        assert len(attended) == kernels


@pytest.mark.parametrize("way", ["triton", "kernels", "program"])
def test_keys_are_gone_through_block_by_block(way):
    rows, keys = (36, 40) if way != "kernels" else (18, 20)
    mask = blocks(CAUSAL, rows, keys)
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), qkv(rows, keys), way, kernels=3)


def test_without_blocks_all_keys_are_gone_through():
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v, scale=0.3), qkv(), kernels=3)


def test_heads_share_keys():
    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)

    mask = blocks(lambda b, h, m, n: (m >= n) & (m - n < 9 + h), 40, 40, heads=4)
    assert_as_eager(fn, qkv(40, 40, heads=4, groups=2), kernels=3)


def test_scores_are_changed_by_captured_tensors():
    slopes, table = random(2).bfloat16(), random(2, 96)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s * slopes[h] + table[h, m - n + 40].sin())

    assert_as_eager(fn, qkv(), kernels=3)


def test_rows_without_anything_allowed_are_zero():
    mask = blocks(lambda b, h, m, n: (m >= n) & (m % 3 > 0) & (m < 30), 36, 40)

    def fn(q, k, v):
        return flex_attention(q, k, v, block_mask=mask, return_lse=True)

    inputs = qkv()
    assert_as_eager(fn, inputs, gradients=False, kernels=1)
    out, lse = fn(*inputs)
    assert not out[:, :, 0].any()
    assert bool((lse[:, :, 35] == -math.inf).all())
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v, block_mask=mask), inputs, kernels=3)


def test_gradients_of_the_logarithm():
    def fn(q, k, v):
        capped = lambda s, b, h, m, n: 5 * torch.tanh(s / 5)  # noqa: E731
        return flex_attention(q, k, v, score_mod=capped, return_lse=True)

    assert_as_eager(fn, qkv(), kernels=3)


@pytest.mark.parametrize("dtype", seldom([torch.bfloat16, torch.float16], torch.float16))
def test_in_16_bits_scores_are_computed_in_32(dtype):
    mask = blocks(CAUSAL, 36, 40)

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + (m - n) * 0.01, block_mask=mask)

    assert_as_eager(fn, [each.to(dtype) for each in qkv()], tolerance=2e-2, kernels=3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_functions_of_scores_are_quick_in_16_bits_alone(dtype):
    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: 20 * torch.tanh(s / 20))

    is_short = dtype is torch.bfloat16
    assert_as_eager(fn, [8 * each.to(dtype) for each in qkv()], tolerance=3e-2 if is_short else 1e-4, kernels=3)
    sources = [
        kernel_source(launch.kernel, "kernel")
        for _, plan in MADE
        for launch in plan.launches
        if any(isinstance(each, Attend) for each in walk(launch.kernel.body))
    ]
    assert len(sources) == 3
    assert all(("quick_tanh(" in each) == is_short for each in sources)
    assert all(("libdevice.tanh(" in each) != is_short for each in sources)


@pytest.mark.slow
def test_documents_and_views_that_a_graph_makes():
    assert_as_eager(attention_within_documents, two_samples_of_three_documents(), kernels=3)


def test_lengths_that_are_not_known():
    f = compiled(lambda q, k, v: flex_attention(q, k, v) * 2, dynamic=True)
    for rows, keys in ((36, 40), (33, 70)):
        inputs = qkv(rows, keys)
        torch.testing.assert_close(f(*inputs), flex_attention(*inputs) * 2, rtol=2e-5, atol=2e-5)


def test_infinities_and_numbers_that_are_none_are_eagers():
    inputs = qkv()
    inputs[0][0, 0, 3, 5], inputs[1][0, 1, 7, 2], inputs[2][0, 0, 1, 1] = math.nan, math.inf, -math.inf
    assert_as_eager(flex_attention, inputs, gradients=False)


def test_blocks_that_memory_names_wrongly_stay_inside():
    """Lists are no indices that eager checks: eager does not look at them. They cannot lead outside of memory."""
    wild = blocks(CAUSAL, 36, 40)
    wild.kv_num_blocks, wild.kv_indices = wild.kv_num_blocks + 9, wild.kv_indices - 70
    found = compiled(lambda q, k, v: flex_attention(q, k, v, block_mask=wild))(*qkv())
    assert bool(found.isfinite().all())


def test_an_index_outside_of_a_captured_tensor_is_eagers_error():
    table, far = random(2, 40), torch.full((36,), 39)

    def fn(q, k, v, places):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + table[h, places[m]])

    assert_as_eager(fn, [*qkv(), far], gradients=False, kernels=1)
    far[7] = 40
    with pytest.raises(IndexError):
        fn(*[*qkv(), far])
    with pytest.raises(IndexError):
        compiled(fn)(*[*qkv(), far])


# --- what stays products and loops ------------------------------------------------------------------------------------


def reasons(fn: Callable[..., Any], *inputs: torch.Tensor) -> set[str]:
    """Why calls are calls, in a program that is right."""
    wanted, found = fn(*inputs), compiled(fn)(*inputs)
    torch.testing.assert_close(found, wanted, rtol=2e-5, atol=2e-5)
    if found.requires_grad:
        found.sum().backward()
    calls = [call_of(each) for made, _ in MADE for each in made.program.operations]
    return {call.reason for call in calls if call is not None}


@pytest.mark.parametrize(
    ("reason", "make"),
    [
        ("float64", lambda: (flex_attention, [each.double() for each in qkv()])),
        ("256 at most", lambda: (flex_attention, qkv(width=260))),
        (
            "no expression",
            lambda: (
                lambda q, k, v, t: flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + t[h].sum()),
                [*qkv(), random(2, 5)],
            ),
        ),
        ("multiply 16", lambda: (with_blocks_of(24), qkv())),
    ],
)
def test_what_has_no_kernel_says_why(reason, make):
    fn, inputs = make()
    assert any(reason in each for each in reasons(fn, *inputs))
    assert not any(attentions(made.program) for made, _ in MADE)


def with_blocks_of(side: int) -> Callable[..., Any]:
    mask = blocks(CAUSAL, 36, 40, side=side)
    return lambda q, k, v: flex_attention(q, k, v, block_mask=mask)


def test_gradients_of_captured_tensors_are_products_and_loops():
    table = random(2, 40).requires_grad_()

    def fn(q, k, v, table):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + table[h, n])

    found = reasons(fn, *qkv(), table)
    assert any("gradients of tensors" in each for each in found), found
    assert [len(attentions(made.program)) for made, _ in MADE] == [1, 0]


# --- through the whole compiler ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("processor", ["H200", "A100"])
def test_through_the_compiler_to_machine_code(processor, fresh_compiler, monkeypatch):
    from tests.targets import simulated_cuda

    target = simulated_cuda.SimulatedTarget()
    target.processor = getattr(simulated_cuda, processor)
    monkeypatch.setattr("ferrite.backend.targets_for", lambda options, devices: {"cpu": target})
    mask = blocks(CAUSAL, 36, 40)
    inputs = [each.bfloat16().requires_grad_() for each in qkv()]

    def fn(q, k, v):
        return flex_attention(q, k, v, score_mod=lambda s, b, h, m, n: s + (m - n) * 0.01, block_mask=mask)

    f = torch.compile(fn, backend="ferrite", options={"strict": True}, fullgraph=True)
    found, wanted = f(*inputs), fn(*inputs)
    torch.testing.assert_close(found, wanted, rtol=2e-2, atol=2e-2)
    outer = torch.randn_like(found)
    mine, right = (torch.autograd.grad(each, inputs, outer) for each in (found, wanted))
    torch.testing.assert_close(mine, right, rtol=5e-2, atol=5e-2)
    assert not ferrite.last_compile().eager_calls


# --- few rows ---------------------------------------------------------------------------------------------------------


def pieces() -> list[str]:
    """Kernels of attention, by how many programs share the keys of a row."""
    launches = [launch for _, plan in MADE for launch in plan.launches]
    found = [each.operation for one in launches for each in walk(one.kernel.body) if isinstance(each, Attend)]
    return [str(each.axes[2].extent) if len(each.axes) > 2 else "1" for each in found]


def test_few_rows_share_their_keys(monkeypatch):
    monkeypatch.setattr("tests.schedule.test_gpu_attention.TINY", DECODING)
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v, return_lse=True), qkv(1, 70), gradients=False)
    assert pieces() == ["2"]
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v), qkv(3, 96), gradients=False)
    assert pieces() == ["3"]


def test_heads_with_the_same_keys_are_rows_of_one_block(monkeypatch):
    monkeypatch.setattr("tests.schedule.test_gpu_attention.TINY", DECODING)
    place, bias = torch.tensor([49, 61]), random(8)

    def fn(q, k, v, place):
        mask = create_block_mask(lambda b, h, m, n: n <= place[b] + m, 2, None, 2, 70, device="cpu", BLOCK_SIZE=16)
        score = lambda s, b, h, m, n: s + bias[h] * m  # noqa: E731
        return flex_attention(q, k, v, score_mod=score, block_mask=mask, enable_gqa=True)

    inputs = [random(2, 8, 2, 16), random(2, 2, 70, 16), random(2, 2, 70, 16), place]
    assert_as_eager(fn, inputs, gradients=False)
    assert pieces() == ["2"]
    (launch,) = [
        each for _, plan in MADE for each in plan.launches if any(isinstance(x, Attend) for x in walk(each.kernel.body))
    ]
    (attend,) = [each for each in walk(launch.kernel.body) if isinstance(each, Attend)]
    assert str(attend.operation.rows.extent) == "8"


def test_many_rows_do_not(monkeypatch):
    monkeypatch.setattr("tests.schedule.test_gpu_attention.TINY", replace(DECODING, multiprocessors=1))
    assert_as_eager(lambda q, k, v: flex_attention(q, k, v), qkv(1, 70), gradients=False)
    assert pieces() == ["1"]
