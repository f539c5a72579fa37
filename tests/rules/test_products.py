"""Products: our operators against plain ones, the predicates as tables, and rules that must not undo each other."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from ferrite.options import Options
from ferrite.passes.post_grad import b2b_gemm, products
from ferrite.passes.post_grad.b2b_gemm import B2B_GEMM, is_worth_it, load_ratio
from ferrite.passes.post_grad.operators import run_pointwise, write_pointwise
from ferrite.passes.post_grad.patterns import ADDMM
from ferrite.passes.post_grad.products import (
    UNFUSE_BIAS,
    bias_stays_behind,
    check_shape_cuda_and_fused_int_mm_mul_enabled,
    should_prefer_unfused_addmm,
)
from ferrite.passes.post_grad.thin_products import DECOMPOSE_MEM_BOUND_MM, THIN_PRODUCT_GROUPS
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_no_farther
from tests.graphs import targets

pytestmark = pytest.mark.quick
aten, ops = torch.ops.aten, torch.ops.ferrite
CHECKS = ("test_schema", "test_faketensor")
FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


def find(gm, target) -> torch.fx.Node:
    return next(node for node in gm.graph.nodes if node.target is target)


def rewritten(function, *inputs, rules, mode="fake", **options):
    before = make_fx(function, tracing_mode=mode)(*inputs)
    after = copy.deepcopy(before)
    return before, after, apply_rules(after, rules, PassContext(Options(**options)))


def meta(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


# --- the operators ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize(("m", "k", "l", "n"), [(3, 4, 4, 5), (3, 4, 7, 5), (1, 64, 64, 1), (0, 4, 4, 5), (3, 0, 2, 5)])
def test_the_sum_of_two_products(m, k, l, n, dtype):  # noqa: E741
    # positive numbers: where products cancel, a rounded one may by chance meet the exact sum better
    inputs = [torch.rand(shape).to(dtype) for shape in ((m, k), (k, n), (m, l), (l, n))]
    a, b, c, d = inputs
    ours, exact = ops.mm_plus_mm(a, b, c, d), a.double() @ b.double() + c.double() @ d.double()
    assert_no_farther(ours, a @ b + c @ d, exact, "sum of products")
    torch.library.opcheck(ops.mm_plus_mm.default, tuple(inputs), test_utils=CHECKS)


@pytest.mark.parametrize("shape", [(32, 1), (1, 32), (32, 32), (1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_scaled_integer_product(shape, dtype):
    a, b = (torch.randint(-9, 9, (32, 32), dtype=torch.int8) for _ in range(2))
    scale = torch.rand(shape).to(dtype)
    ours = ops.int_mm_mul(a, b, scale)
    assert torch.equal(ours, (a.int() @ b.int()) * scale)
    assert ours.dtype == dtype
    torch.library.opcheck(ops.int_mm_mul.default, (a, b, scale), test_utils=CHECKS)


def pointwise_text(function) -> str:
    gm = make_fx(function, tracing_mode="fake")(torch.rand(2, 2))
    operand = gm.graph.find_nodes(op="placeholder")[0]
    return write_pointwise(operand, [node for node in gm.graph.nodes if node.op == "call_function"])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x,
        torch.relu,
        lambda x: x.half().float(),
        lambda x: torch.sigmoid(x) * 0.5 + x.relu(),
        lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
        lambda x: x.clamp(-1.5, None),
    ],
    ids=["nothing", "relu", "rounded", "two branches", "a keyword", "none"],
)
@pytest.mark.parametrize("left", [True, False])
def test_a_function_between_two_products(function, left):
    a, b, c = torch.randn(5, 4), torch.randn(4, 6), torch.randn(6, 3)
    text = pointwise_text(function)
    x = torch.randn(3, 3)
    assert torch.equal(run_pointwise(text, x), function(x))
    eager = function(a @ b) @ c if left else a @ function(b @ c)
    assert torch.equal(ops.b2b_gemm(a, b, c, text, left), eager)
    torch.library.opcheck(ops.b2b_gemm.default, (a, b, c, text, left), test_utils=CHECKS)


def test_a_function_of_something_else_has_no_text():
    gm = make_fx(lambda x, y: x + y, tracing_mode="fake")(torch.rand(2), torch.rand(2))
    assert write_pointwise(gm.graph.find_nodes(op="placeholder")[0], [find(gm, aten.add.Tensor)]) is None


# --- where the bias goes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("readers", "device", "preferred"),
    [
        (lambda y: y.relu(), "meta", True),
        (lambda y: y.relu(), "cpu", False),
        (lambda y: (y.relu(), y.sigmoid()), "meta", True),
        (lambda y: y.view(-1).relu(), "meta", True),
        (lambda y: [part.relu() for part in y.split(1)], "meta", True),
        (lambda y: y.view(-1), "meta", False),
        (lambda y: (y.relu(), y), "meta", False),
        (lambda y: y @ y.t(), "meta", False),
        (lambda y: (y.relu(), y.sum()), "meta", False),
        (lambda y: torch.ones(1), "meta", True),
    ],
    ids=["pointwise", "cpu", "two", "view", "items", "a view returned", "returned", "product", "sum", "nobody"],
)
def test_where_a_bias_is_better_added(readers, device, preferred):
    tensors = [torch.empty(5, device=device), torch.empty(3, 4, device=device), torch.empty(4, 5, device=device)]
    gm = make_fx(lambda bias, a, b: readers(torch.addmm(bias, a, b)), tracing_mode="fake")(*tensors)
    node = find(gm, aten.addmm.default)
    assert should_prefer_unfused_addmm(node, node.args[0]) is preferred


@pytest.mark.parametrize("fused_first", [True, False])
def test_fusing_and_unfusing_do_not_undo_each_other(fused_first):
    fuse = dataclasses.replace(ADDMM, when=(*ADDMM.when, bias_stays_behind))
    inputs = [meta(5), meta(3, 4), meta(4, 5)]
    function = (lambda c, a, b: torch.addmm(c, a, b).relu()) if fused_first else (lambda c, a, b: (a @ b + c).relu())
    _, after, count = rewritten(function, *inputs, rules=(UNFUSE_BIAS, fuse))
    assert count == (1 if fused_first else 0)
    assert aten.addmm.default not in targets(after)
    _, after, count = rewritten(lambda c, a, b: a @ b + c, *inputs, rules=(UNFUSE_BIAS, fuse))
    assert (count, targets(after)) == (1, [aten.addmm.default])


@pytest.mark.parametrize(("beta", "alpha"), [(1, 1), (3, 2), (0.5, 1), (0, 1), (0.0, 2), (1, 0)])
@pytest.mark.parametrize("bias", [torch.rand(5), torch.rand(3, 1), torch.rand(()), torch.full((5,), torch.nan)])
def test_an_unfused_bias_counts_as_much(beta, alpha, bias, monkeypatch):
    monkeypatch.setattr(products, "should_prefer_unfused_addmm", lambda root, bias: True)
    a, b = torch.rand(3, 4), torch.rand(4, 5)
    function = lambda bias, a, b: torch.addmm(bias, a, b, beta=beta, alpha=alpha)  # noqa: E731
    before, after, count = rewritten(function, bias, a, b, rules=(UNFUSE_BIAS,))
    assert count == 1
    exact = before(bias.double(), a.double(), b.double())
    assert_no_farther(after(bias, a, b), before(bias, a, b), exact, "addmm")


def test_the_gate_of_the_integer_product():
    gate = check_shape_cuda_and_fused_int_mm_mul_enabled
    assert gate(meta(4, 1))
    assert not gate(meta(4, 1), enabled=False)
    assert not gate(meta(4))
    assert not gate(meta(1, 4, 1))
    assert not gate(torch.rand(4, 1))
    assert not gate(2.0)


# --- thin products ----------------------------------------------------------------------------------------------------


def thin(*inputs, mode="fake", **settings):
    fusions = {"decompose_mm_pass": settings}
    return rewritten(torch.mm, *inputs, rules=DECOMPOSE_MEM_BOUND_MM, mode=mode, post_grad_fusions=fusions)


def test_what_is_thin_is_asked_in_each_compile():
    inputs = [torch.rand(4, 6), torch.rand(6, 5)]
    assert rewritten(torch.mm, *inputs, rules=THIN_PRODUCT_GROUPS["decompose_mm_pass"])[2] == 0
    before, after, count = thin(*inputs, cpu_max_rows=4)
    assert count == 1
    assert aten.mm.default not in targets(after)
    exact = before(*(item.double() for item in inputs))
    assert_no_farther(after(*inputs), before(*inputs), exact, "thin product")


@pytest.mark.parametrize("allowed", [False, True])
def test_unknown_sizes_are_thin_only_where_that_is_allowed(allowed):
    inputs = [torch.rand(4, 6), torch.rand(6, 5)]
    before, after, count = thin(*inputs, mode="symbolic", allow_unknown_sizes=allowed)
    # a symbol is never one row: two rows or more are provable
    assert count == 0
    before, after, count = thin(*inputs, mode="symbolic", cpu_max_rows=64, allow_unknown_sizes=allowed)
    assert count == int(allowed)
    assert_no_farther(after(*inputs), before(*inputs), before(*(item.double() for item in inputs)), "thin product")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_thin_products_of_half_precision_add_up_in_single(dtype):
    inputs = [torch.full((1, 2048), 1.01).to(dtype), torch.full((2048, 3), 1.01).to(dtype)]
    before, after, count = thin(*inputs)
    assert count == 1
    assert_no_farther(after(*inputs), before(*inputs), before(*(item.double() for item in inputs)), "thin product")


def test_thin_products_of_integers_wrap_as_eager():
    inputs = [torch.full((1, 8), 100, dtype=torch.int8), torch.full((8, 3), 100, dtype=torch.int8)]
    before, after, count = thin(*inputs)
    assert count == 1
    assert torch.equal(after(*inputs), before(*inputs))


# --- products back to back --------------------------------------------------------------------------------------------


def test_loads_of_one_and_of_two_kernels():
    # one tile of everything: the fused kernel loads each matrix once and the value between not at all
    assert load_ratio(True, (32, 16, 16, 16), (32, 16, 16, 16)) == (512 + 256 + 512 + 256) / (256 + 512 + 256)
    assert load_ratio(False, (32, 16, 16, 16), (32, 16, 16, 16)) == (256 + 256 + 512 + 256) / (512 + 256 + 256)
    # two tiles of columns on the right: everything on the left is loaded twice
    assert load_ratio(True, (32, 16, 16, 32), (32, 16, 16, 16)) == (512 + 256 + 512 + 512) / (2 * (256 + 512 + 256))
    assert load_ratio(True, (0, 16, 16, 16), (32, 16, 16, 16)) == 0
    assert is_worth_it(True, (4096, 16, 16, 16))
    assert not is_worth_it(True, (1024, 1024, 1024, 1024))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("left", [True, False])
def test_back_to_back_products_compute_the_same(left, dtype, monkeypatch):
    monkeypatch.setattr(b2b_gemm, "on_cpu", lambda value: False)
    thin, small = torch.randn(512, 16).to(dtype), torch.randn(16, 16).to(dtype)
    if left:
        function = lambda a, b: (((a @ b).relu() + (a @ b).sigmoid()) @ b.t()).relu()  # noqa: E731
    else:
        function = lambda a, b: b @ (b.t() @ a.t()).float().sin().to(a.dtype)  # noqa: E731
    before, after, count = rewritten(function, thin, small, rules=(B2B_GEMM,))
    assert count == (0 if left else 1)  # two equal products are two until somebody merges them
    assert torch.equal(after(thin, small), before(thin, small))


def test_dtypes_must_agree(monkeypatch):
    monkeypatch.setattr(b2b_gemm, "on_cpu", lambda value: False)
    tensors = [torch.randn(512, 16).half(), torch.randn(16, 16).half(), torch.randn(16, 16)]
    assert rewritten(lambda a, b, c: (a @ b).float() @ c, *tensors, rules=(B2B_GEMM,))[2] == 0


def test_a_draw_between_is_no_function():
    def function(a, b, c):
        return torch.bernoulli((a @ b).sigmoid()) @ c

    assert rewritten(function, meta(512, 16), meta(16, 16), meta(16, 16), rules=(B2B_GEMM,))[2] == 0
