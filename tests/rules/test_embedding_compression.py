"""Compression of embeddings: the operators, every way it is written, and the five names as separate switches."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import ferrite
from ferrite.errors import UserError
from ferrite.graph.verify import verify_graph
from ferrite.options import Options, resolve
from ferrite.passes.pre_grad import compress
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules, why
from tests.compare import assert_same_as_eager
from tests.torch_level import Captured, assert_same, captured

own = torch.ops.ferrite
aten = torch.ops.aten
B, N, D, K = 2, 3, 4, 5
X, W, BIAS = (B, N, D), (K, N), (K,)
PASSES: dict[str, Any] = {
    "lce-first": compress.use_matmul_fuse_lce_replace_first_LCE,
    "lce-parts": compress.use_triton_lce_replace_normal_LCE,
    "lce-matmul": compress.use_matmul_lce_replace_normal_LCE,
    "lce-simple": compress.use_triton_lce_replace_simple_LCE,
    "dot-compress": compress.use_triton_dot_compress,
}


def tensors(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [(torch.rand(shape) - 0.5).to(dtype).requires_grad_() for shape in shapes]


def assert_rewritten(function: Any, make_inputs: Any, rules: Any, fires: int) -> Captured:
    before = captured(function, make_inputs())
    after = before.copy()
    reasons = [str(miss) for rule in rules for miss in why(before.gm, rule)]
    assert apply_rules(after.gm, rules, PassContext(Options())) == fires, reasons
    verify_graph(after.gm, deep=True)
    assert_same(before, after, make_inputs, exact=False)
    return after


def calls(graph: Captured, target: Any) -> int:
    return sum(node.target is target for node in graph.gm.graph.nodes)


# --- the operators ----------------------------------------------------------------------------------------------------


def doubles(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.rand(shape, dtype=torch.float64, requires_grad=True) for shape in shapes]


OPERATORS = [
    pytest.param(own.lce.default, lambda x, w, b: w @ x + b[:, None], doubles(X, W, BIAS), id="lce"),
    pytest.param(lambda x, w: own.lce.default(x, w, None), lambda x, w: w @ x, doubles(X, W), id="lce, no bias"),
    pytest.param(
        lambda x, y, w, b: own.lce_parts.default([x, y], w, b),
        lambda x, y, w, b: w @ torch.cat([x, y], 1) + b[:, None],
        doubles((B, 1, D), (B, 2, D), W, BIAS),
        id="lce_parts",
    ),
    pytest.param(
        lambda x, w: own.lce_parts.default([x], w, None), lambda x, w: w @ x, doubles(X, W), id="lce_parts, one part"
    ),
    pytest.param(
        own.dot_compress.default, lambda x, y, w: x @ y.mT @ w, doubles(X, (B, 6, D), (6, K)), id="dot_compress"
    ),
    pytest.param(
        own.dot_compress.default, lambda x, y, w: x @ y.mT @ w, doubles(X, (B, 6, D), (B, 6, K)), id="dot, per sample"
    ),
]


@pytest.mark.parametrize(("operator", "meaning", "inputs"), OPERATORS)
def test_operators_compute_what_they_say_and_have_its_gradients(operator, meaning, inputs):
    torch.testing.assert_close(operator(*inputs), meaning(*inputs))
    assert torch.autograd.gradcheck(operator, inputs)
    assert torch.autograd.gradgradcheck(operator, inputs)


@pytest.mark.parametrize(
    ("operator", "shapes"),
    [
        (own.lce.default, (X, W, BIAS)),
        (own.dot_compress.default, (X, (B, 6, D), (6, K))),
    ],
)
def test_operators_keep_torch_s_rules(operator, shapes):
    x, *rest = [torch.rand(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes]
    torch.library.opcheck(operator, (x, *rest))
    torch.library.opcheck(
        operator, (x.detach().mT.contiguous().mT, *rest), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_parts_keep_torch_s_rules_and_round_once(dtype):
    parts = [torch.randn(B, 8, D).to(dtype) for _ in range(4)]
    weight, bias = torch.randn(K, 32).to(dtype), torch.randn(K).to(dtype)
    torch.library.opcheck(own.lce_parts.default, (parts, weight, bias))
    exact = weight.double() @ torch.cat(parts, 1).double() + bias.double()[:, None]
    result = own.lce_parts.default(parts, weight, bias).double()
    eager = (weight @ torch.cat(parts, 1) + bias[:, None]).double()
    unit = torch.finfo(dtype).eps * exact.abs().max()
    assert (result - exact).abs().max() <= (eager - exact).abs().max() + 2 * unit


# --- ways to write it -------------------------------------------------------------------------------------------------

SPELLINGS: dict[str, Callable[..., Any]] = {
    "matmul": lambda x, w, b: torch.matmul(w, x),
    "operator": lambda x, w, b: w @ x,
    "method": lambda x, w, b: w.matmul(x),
    "column by unsqueeze": lambda x, w, b: w @ x + b.unsqueeze(-1),
    "column by index": lambda x, w, b: b[:, None] + w @ x,
    "column by view": lambda x, w, b: torch.add(w @ x, b.view(-1, 1)),
    "column by reshape": lambda x, w, b: w @ x + b.reshape(K, 1),
    "einsum": lambda x, w, b: torch.einsum("kn,bnd->bkd", w, x),
    "einsum, swapped": lambda x, w, b: torch.einsum("xij, yi -> xyj", x, w) + b.unsqueeze(1),
    "layer": lambda x, w, b: F.linear(x.transpose(1, 2), w, b).transpose(1, 2),
    "layer, permuted": lambda x, w, b: F.linear(x.permute(0, 2, 1), w, b).permute(0, 2, 1),
    "layer, mT": lambda x, w, b: F.linear(x.mT, w).mT,
    "layer, left transposed": lambda x, w, b: F.linear(x.transpose(-1, -2), w, b),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_one_operator(spelling):
    function = lambda *inputs: SPELLINGS[spelling](*inputs).relu().sum(1)  # noqa: E731
    after = assert_rewritten(function, tensors(X, W, BIAS), compress.SIMPLE_RULES, 1)
    assert calls(after, own.lce.default) == 1
    assert calls(after, aten.linear.default) == calls(after, aten.matmul.default) == 0


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w, b: torch.einsum("bnn,kn->bkn", x[:, :, :N], w),
        lambda x, w, b: torch.einsum("kn,bnd->bdk", w, x),
        lambda x, w, b: torch.einsum("kb,bnd->knd", w[:, :B], x),
        lambda x, w, b: F.linear(x.transpose(0, 2), w[:, :B]),
        lambda x, w, b: torch.matmul(x.mT, w.t()),
        lambda x, w, b: w.double() @ x.double(),
    ],
    ids=["diagonal", "result transposed", "samples mixed", "transposed elsewhere", "from the right", "double"],
)
def test_what_only_looks_like_it(function):
    assert_rewritten(function, tensors(X, W, BIAS), compress.SIMPLE_RULES, 0)


def test_a_result_that_is_written_or_has_other_strides_outside_stays():
    written = lambda x, w: (w @ x).add_(1).cos()  # noqa: E731
    plain = lambda: [x.detach() for x in tensors(X, W)()]  # noqa: E731
    after = assert_rewritten(written, plain, compress.SIMPLE_RULES, 0)
    assert calls(after, aten.matmul.default) == 1
    assert_rewritten(lambda x, w: F.linear(x.mT, w).mT, tensors(X, W), compress.SIMPLE_RULES, 0)


def test_nothing_is_read_across_a_write():
    def function(x, w, b):
        product = w @ x
        b.add_(1)
        return product + b.unsqueeze(-1)

    plain = lambda: [x.detach() for x in tensors(X, W, BIAS)()]  # noqa: E731
    after = assert_rewritten(function, plain, compress.SIMPLE_RULES, 1)  # the product alone
    assert calls(after, aten.add.Tensor) == 1


# --- joins ------------------------------------------------------------------------------------------------------------


def with_join(kind: str, count: int, bias: bool) -> tuple[Callable[..., Any], Any]:
    def function(w, b, *parts):
        x = torch.cat(parts, 1) if kind == "cat" else torch.stack(parts, 1)
        return (w @ x + b.unsqueeze(-1) if bias else w @ x).relu()

    widths = [1 + place % 3 for place in range(count)] if kind == "cat" else [1] * count
    shapes = [(B, width, D) if kind == "cat" else (B, D) for width in widths]
    return function, tensors((K, sum(widths)), BIAS, *shapes)


@pytest.mark.parametrize("kind", ["cat", "stack"])
@pytest.mark.parametrize("count", [1, 2, 4, 5, 6])
@pytest.mark.parametrize("bias", [False, True])
def test_the_parts_are_read_and_the_join_is_not_written(kind, count, bias):
    function, make_inputs = with_join(kind, count, bias)
    after = assert_rewritten(function, make_inputs, compress.PARTS_RULES, 1)
    assert calls(after, own.lce_parts.default) == 1
    assert calls(after, aten.cat.default) == calls(after, aten.stack.default) == 0


@pytest.mark.parametrize("kind", ["cat", "stack"])
@pytest.mark.parametrize(("count", "fires"), [(1, 1), (2, 1), (4, 1), (5, 0), (6, 0)])
def test_few_parts_are_a_sum_of_products(kind, count, fires):
    function, make_inputs = with_join(kind, count, True)
    after = assert_rewritten(function, make_inputs, compress.MATMUL_RULES, fires)
    assert calls(after, aten.matmul.default) == (count if fires else 1)


def test_many_parts_behind_a_layer_are_a_plain_product():
    def function(w, b, *parts):
        return F.linear(torch.cat(parts, 1).mT, w, b).mT.relu().sum(1)

    make_inputs = tensors((K, 6), BIAS, *[(B, 1, D)] * 6)
    after = assert_rewritten(function, make_inputs, compress.MATMUL_RULES, 1)
    assert calls(after, aten.matmul.default) == calls(after, aten.cat.default) == 1
    assert calls(after, aten.linear.default) == 0


def test_sums_in_half_precision_would_round_each_part():
    def function(x, y, w):
        return (w @ torch.cat([x, y], 1)).relu()

    make_inputs = tensors((B, 1, D), (B, 2, D), W, dtype=torch.bfloat16)
    assert_rewritten(function, make_inputs, compress.MATMUL_RULES, 0)
    assert_rewritten(function, make_inputs, compress.PARTS_RULES, 1)


@pytest.mark.parametrize("rules", [compress.PARTS_RULES, compress.MATMUL_RULES])
def test_a_join_with_a_second_reader_stays(rules):
    def function(x, y, w):
        whole = torch.cat([x, y], 1)
        return (w @ whole).relu(), whole.relu()

    def behind_a_transpose(x, y, w):
        whole = torch.cat([x, y], 1).mT
        return F.linear(whole, w).relu(), whole.relu()

    assert_rewritten(function, tensors((B, 1, D), (B, 2, D), W), rules, 0)
    assert_rewritten(behind_a_transpose, tensors((B, 1, D), (B, 2, D), W), rules, 0)


# --- several on one input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("heads", [2, 3, 5])
def test_heads_on_one_input_are_merged(heads):
    def function(x, b, *weights):
        first, *rest = (w @ x for w in weights)
        return (first + b.unsqueeze(-1)).relu(), *(each.tanh() for each in rest)

    shapes = [(2 + place, N) for place in range(heads)]
    after = assert_rewritten(function, tensors(X, (2,), *shapes), compress.FIRST_RULES, 1)
    assert calls(after, aten.matmul.default) == 1


def test_a_second_level_is_left_to_itself():
    def function(x, w, v, u, t):
        first, second = (w @ x).relu(), (v @ x).relu()
        return (u @ first).sum(), (t @ first).sum(), second

    after = assert_rewritten(function, tensors(X, W, W, (2, K), (2, K)), compress.FIRST_RULES, 1)
    assert calls(after, aten.matmul.default) == 3


def test_heads_in_and_out_of_no_grad_are_apart():
    def function(x, w, v):
        with torch.no_grad():
            first = (w @ x).relu()
        return first, (v @ x).relu()

    assert_rewritten(function, tensors(X, W, W), compress.FIRST_RULES, 0)


def test_merged_heads_are_seen_by_the_others():
    def function(x, y, w, v):
        whole = torch.cat([x, y], 1)
        return (w @ whole).relu(), (v @ whole).tanh()

    make_inputs = tensors((B, 1, D), (B, 2, D), W, W)
    before = captured(function, make_inputs())
    after = before.copy()
    context = PassContext(Options(compress=("lce-first", "lce-parts")))
    assert PASSES["lce-first"].function(after.gm, context) == 1
    assert PASSES["lce-parts"].function(after.gm, context) == 1
    assert calls(after, own.lce_parts.default) == 1
    verify_graph(after.gm, deep=True)
    assert_same(before, after, make_inputs, exact=False)


# --- dot compress -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dot_compress(dtype):
    two = lambda x, y, w: torch.matmul(torch.matmul(x, y.transpose(1, 2)), w).relu()  # noqa: E731
    assert_rewritten(two, tensors((B, 6, 2), (B, 5, 2), (5, 2), dtype=dtype), compress.DOT_RULES, 1)
    assert_rewritten(two, tensors((B, 6, 2), (B, 5, 2), (B, 5, 2), dtype=dtype), compress.DOT_RULES, 1)
    one = lambda x, w: (x @ x.mT @ w).relu()  # noqa: E731
    assert_rewritten(one, tensors((B, 6, 2), (6, 2), dtype=dtype), compress.DOT_RULES, 1)


@pytest.mark.parametrize(("features", "fires"), [(3, 1), (4, 0), (5, 0)])
def test_dot_compress_where_it_takes_fewer_operations(features, fires):
    """With N = M = K = 4: 32 D < 16 (D + 4), so D < 4."""
    function = lambda x, y, w: (x @ y.mT @ w).relu()  # noqa: E731
    assert_rewritten(function, tensors((B, 4, features), (B, 4, features), (4, 4)), compress.DOT_RULES, fires)


@pytest.mark.parametrize(
    "between",
    [lambda s: s.softmax(-1), lambda s: s.masked_fill(s > 0, 0.0), lambda s: s * 0.5, lambda s: s.tril()],
    ids=["softmax", "mask", "scale", "triangle"],
)
def test_nothing_may_stand_between_the_products(between):
    function = lambda x, y, w: (between(x @ y.mT) @ w).relu()  # noqa: E731
    assert_rewritten(function, tensors((B, 6, 2), (B, 5, 2), (5, 2)), compress.DOT_RULES, 0)


# --- switches ---------------------------------------------------------------------------------------------------------


def everything(x, y, w, v, a, c):
    """Something for each of the five."""
    whole = torch.cat([x, y], 1)
    heads = (w @ whole).relu(), (v @ whole).relu()
    return *heads, (w @ a).relu(), (a @ a.mT @ c).relu()


def everything_inputs() -> list[torch.Tensor]:
    return tensors((B, 1, 2), (B, 5, 2), (K, 6), (K, 6), (B, 6, 2), (6, 2))()


@pytest.mark.parametrize("name", PASSES)
def test_the_names_are_separate_switches(name):
    for chosen in ((), (name,), tuple(each for each in PASSES if each != name)):
        graph = captured(everything, everything_inputs())
        fired = PASSES[name].function(graph.gm, PassContext(Options(compress=chosen)))
        expected = {"lce-first": 1, "lce-simple": 3, "dot-compress": 1}.get(name, 0) if name in chosen else 0
        assert fired == expected


# What each form fires on by the model, and the same too small, with few operations less, or with many results.
LARGE = ((2, 256, 4096), (2, 256, 4096))
BY_THE_MODEL: dict[str, tuple[Any, list[Any], list[Any]]] = {
    "lce-first": (lambda x, w, v: ((w @ x).relu(), (v @ x).relu()), [(X, W, W)], []),
    "lce-parts": (lambda x, y, w: w @ torch.cat([x, y], 1), [], [(*LARGE, (2, 512))]),
    "lce-matmul": (
        lambda x, y, w: w @ torch.cat([x, y], 1),
        [(*LARGE, (2, 512))],
        [(*LARGE, (8, 512)), ((2, 8, 64), (2, 8, 64), (2, 16)), ((512, 8, 64), (512, 8, 64), (2, 16))],
    ),
    "lce-simple": (
        lambda x, w, b: F.linear(x.mT, w, b).mT.contiguous().relu(),
        [((2, 16, 512), (4, 16), (4,))],
        [((8, 16, 511), (4, 16), (4,))],
    ),
    "dot-compress": (
        lambda x, w: x @ x.mT @ w,
        [((128, 64, 32), (64, 8))],
        [((2, 64, 32), (64, 8)), ((128, 64, 32), (64, 40))],
    ),
}


@pytest.mark.parametrize("name", PASSES)
@torch.no_grad()
def test_the_model_takes_what_was_measured_to_gain(name):
    function, taken, left = BY_THE_MODEL[name]
    for shapes in (*taken, *left):
        graph = captured(function, [torch.rand(shape) for shape in shapes])
        for chosen, fires in (((), False), (("auto",), shapes in taken), (("auto", name), True)):
            context = PassContext(Options(compress=chosen), is_inference=True)
            assert bool(PASSES[name].function(graph.copy().gm, context)) is fires, (shapes, chosen)
        kernels = PassContext(Options(compress=("auto",), kernel_rewrites="always"), is_inference=True)
        assert PASSES[name].function(graph.copy().gm, kernels), "a kernel takes all that is right"


def test_in_training_a_compression_alone_is_left_to_the_model():
    function, (shapes,), _ = BY_THE_MODEL["lce-simple"]
    graph = captured(function, [torch.rand(shape).requires_grad_() for shape in shapes])
    assert PASSES["lce-simple"].function(graph.gm, PassContext(Options(compress=("auto",)))) == 0


def test_in_training_a_join_is_cheap_where_it_is_compiled():
    function, (shapes,), _ = BY_THE_MODEL["lce-matmul"]
    for executor, fires in (("native", False), ("calls", True)):
        graph = captured(function, [torch.rand(shape).requires_grad_() for shape in shapes])
        context = PassContext(Options(compress=("auto",), executor=executor))
        assert bool(PASSES["lce-matmul"].function(graph.gm, context)) is fires


def test_an_unknown_name_is_the_users_error():
    for door in (Options, functools.partial(ferrite.compile, everything)):
        with pytest.raises(UserError, match="option 'compress' holds 'lce-simpel'") as caught:
            door(compress=("dot-compress", "lce-simpel"))
        assert "did you mean    lce-simple" in str(caught.value)
    with pytest.raises(UserError, match="option 'compress' holds 'lce'"):
        resolve(environ={"FERRITE_COMPRESS": "dot-compress,lce"})


def test_strict_numerics_leave_all_of_them_out():
    graph = captured(everything, everything_inputs())
    context = PassContext(Options(compress=tuple(PASSES), numerics="strict"))
    assert sum(step.function(graph.gm, context) for step in PASSES.values()) == 0


def test_helpers_run_alone_each_its_own_rewrite():
    def function(x, y, w, a):
        return (w @ torch.cat([x, y], 1)).relu(), (w @ a).relu()

    seen: list[Any] = []
    make_inputs = tensors((B, 1, D), (B, 2, D), W, X)
    graph = captured(function, make_inputs())
    assert compress.use_triton_lce_replace_normal_LCE_helper(graph.gm, seen.append) == 1
    assert calls(graph, own.lce_parts.default) == 1
    assert compress.use_triton_lce_replace_simple_LCE_helper(graph.gm, seen.append) == 1
    assert calls(graph, own.lce.default) == 1
    assert seen == [graph.gm, graph.gm]


@pytest.mark.parametrize("names", [tuple(PASSES), *((name,) for name in PASSES)])
def test_compiled(names):
    assert_same_as_eager(everything, everything_inputs, backward=True, options={"compress": names})
