"""Padding of products: the cost model, and every layout and bias."""

from __future__ import annotations

import copy
import re
import sys
from dataclasses import replace

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite
from ferrite.graph.verify import verify_graph
from ferrite.machines import H200
from ferrite.options import Options
from ferrite.passes.joint.aligned_rows import AlignedRows
from ferrite.passes.joint.pad_mm import PAD_RULES, Sides, contiguous_sides, pad_mm, padding
from ferrite.pipeline import PassContext
from ferrite.rewrite import apply_rules
from tests.compare import assert_no_farther, assert_same_as_eager
from tests.graphs import assert_same_computation, operators

quick = pytest.mark.quick
aten = torch.ops.aten


def worth(m, k, n, itemsize=2, alignment=8, sides=(False, True, True)):
    more = tuple(padding(side, alignment) if pad else 0 for side, pad in zip((m, k, n), sides, strict=True))
    return Sides(1, m, k, n, more).worth(itemsize, H200.matrix_speeds)


@quick
def test_the_model_agrees_with_what_was_measured():
    """Times of both forms were taken on an H200, the copies included."""
    faster = [(4096, 4096, 4095), (4096, 4095, 4096), (4095, 4095, 4095), (8192, 8192, 50257)]
    slower = [(2047, 2047, 2047), (511, 511, 511), (63, 63, 63), (2047, 2047, 3), (16384, 1023, 64), (255, 4095, 255)]
    assert [sides for sides in faster if not worth(*sides)] == []
    assert [sides for sides in slower if worth(*sides)] == []


@quick
def test_sides_that_lie_contiguous_count():
    a, b = torch.empty(5, 7), torch.empty(7, 9)
    turned_a, turned_b = torch.empty(7, 5).t(), torch.empty(9, 7).t()
    assert contiguous_sides(a, b) == (False, True, True)
    assert contiguous_sides(turned_a, b) == (True, False, True)
    assert contiguous_sides(a, turned_b) == (False, True, True)
    assert contiguous_sides(turned_a, turned_b) == (True, True, True)


@quick
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_any_layout(turned, dtype, mode):
    def function(bias, a, b):
        return aten.addmm.default(bias, a, b, beta=2, alpha=0.5), aten.mm.default(a, b).relu()

    def inputs():
        a = torch.randn(7, 5).t() if turned else torch.randn(5, 7)
        return [torch.randn(9).to(dtype), a.to(dtype), torch.randn(7, 9).to(dtype)]

    before = make_fx(function, tracing_mode=mode)(*inputs())
    after = copy.deepcopy(before)
    count = apply_rules(after, PAD_RULES, PassContext(Options(pad_mm="always")))
    assert count == (2 if mode == "fake" else 0)
    assert_same_computation(before, after, inputs)
    if count:
        assert "constant_pad_nd.default" in operators(after)


@quick
def test_a_gradient_of_two_products_is_padded_once():
    """One of the two has it turned."""

    def gradients(tangent, x, w):
        return aten.mm.default(aten.permute.default(tangent, [1, 0]), x), aten.mm.default(tangent, w)

    def inputs():
        return [torch.randn(8, 13), torch.randn(8, 8), torch.randn(13, 8)]

    before = make_fx(gradients, tracing_mode="fake")(*inputs())
    after = copy.deepcopy(before)
    assert apply_rules(after, PAD_RULES, PassContext(Options(pad_mm="always"))) == 2
    assert_same_computation(before, after, inputs)
    paddings = [node for node in after.graph.nodes if node.target is aten.constant_pad_nd.default]
    assert len({(node.args[0], tuple(node.args[1])) for node in paddings}) == 2, "the gradient's, and one of a weight's"


@quick
def test_a_deterministic_torch_is_left_alone():
    gm = make_fx(aten.mm.default, tracing_mode="fake")(torch.rand(5, 7), torch.rand(7, 9))
    torch.use_deterministic_algorithms(True)
    try:
        assert apply_rules(gm, PAD_RULES, PassContext(Options(pad_mm="always"))) == 0
    finally:
        torch.use_deterministic_algorithms(False)


# --- on a GPU ---------------------------------------------------------------------------------------------------------

PADDED, ALIGNED, SMALL = (4095, 4093, 4091), (4096, 4096, 4096), (1023, 1021, 1019)


def matrices(sides: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    m, k, n = sides
    shapes = ((n,), (m, k), (k, n), (2, m, k), (2, k, n))
    return [torch.randn(shape, device="cuda").div_(k**0.5).to(dtype).requires_grad_() for shape in shapes]


def all_products(bias, a, b, batch, batch_b):
    return aten.mm.default(a, b), aten.addmm.default(bias, a, b), aten.bmm.default(batch, batch_b)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("sides", "fires"), [(PADDED, 3), (ALIGNED, 0), (SMALL, 0)])
def test_what_the_pass_does_on_a_gpu(sides, fires, dtype):
    """By itself it pads what is large and not aligned. The result is as near to the truth, dense, and alone."""
    inputs = [each.detach() for each in matrices(sides, dtype)]
    gm = make_fx(all_products, tracing_mode="fake")(*inputs)
    context = PassContext(Options(strict=True))
    assert pad_mm.function(gm, context) == fires
    verify_graph(gm, deep=True)
    gm.recompile()
    assert operators(gm).count("constant_pad_nd.default") == {3: 7, 0: 0}[fires]  # operands, and the bias
    ours, eager = gm(*inputs), all_products(*inputs)
    truth = all_products(*(each.double() for each in inputs))
    for mine, theirs, exact in zip(ours, eager, truth, strict=True):
        assert (mine.dtype, mine.shape, mine.stride()) == (theirs.dtype, theirs.shape, theirs.stride())
        assert mine.untyped_storage().nbytes() == theirs.untyped_storage().nbytes(), "no padding lies behind it"
        assert_no_farther(mine, theirs, exact, "product")


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["highest", "high"])
def test_single_precision_is_padded_where_it_runs_on_matrix_units(precision):
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        inputs = [torch.randn(4095, 4095, device="cuda") for _ in range(2)]
        gm = make_fx(aten.mm.default, tracing_mode="fake")(*inputs)
        assert pad_mm.function(gm, PassContext(Options())) == (precision == "high")
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_the_precision_may_be_that_of_gpus_alone(precision):
    """Set in that way, torch does not tell the precision of all backends at once."""
    with FakeTensorMode():
        inputs = [torch.empty(4095, 4095, device="cuda") for _ in range(2)]
        gm = make_fx(aten.mm.default, tracing_mode="fake")(*inputs)
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = precision
        assert pad_mm.function(gm, PassContext(Options(strict=True))) == (precision == "tf32")
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


@pytest.mark.gpu
def test_a_training_step_on_a_gpu_is_padded_in_both_directions():
    torch.manual_seed(0)
    x = torch.randn(4095, 4093, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(4091, 4093, device="cuda") / 64).bfloat16().requires_grad_()
    tangent = torch.randn(4095, 4091, device="cuda", dtype=torch.bfloat16)
    compiled = ferrite.compile(torch.nn.functional.linear, strict=True, dynamic=False)
    ours, eager = compiled(x, weight), torch.nn.functional.linear(x, weight)
    assert ferrite.last_compile().rewrites["pad_mm"] == 3, "the product and the two of its gradients"
    wide = [each.detach().double().requires_grad_() for each in (x, weight)]
    truth = torch.nn.functional.linear(*wide)
    assert_no_farther(ours, eager, truth, "result")
    gradients = [
        torch.autograd.grad(value, leaves, tangent.to(value.dtype))
        for value, leaves in ((ours, (x, weight)), (eager, (x, weight)), (truth, wide))
    ]
    for mine, theirs, exact in zip(*gradients, strict=True):
        assert mine.stride() == theirs.stride()
        assert_no_farther(mine, theirs, exact, "gradient")


def test_a_training_step_with_padding():
    model = torch.nn.Sequential(torch.nn.Linear(7, 9), torch.nn.ReLU(), torch.nn.Linear(9, 5))
    assert_same_as_eager(model, lambda: [torch.randn(3, 7)], backward=True, options={"pad_mm": "always"})


@quick
@pytest.mark.parametrize(("m", "n", "alignment"), [(24, 13, 4), (9, 30, 8), (17, 30522, 8), (8, 50257, 8), (5, 20, 8)])
def test_aligned_rows_cover_all_of_a_result(m, n, alignment):
    aligned = AlignedRows(m, n, alignment)
    covered = torch.zeros(m, n, dtype=torch.int64)
    for rows, columns in aligned.inner:
        part = covered[rows, columns]
        part += 1
        assert part.shape[1] % alignment == 0
        assert part.storage_offset() % alignment == part.stride(0) % alignment == 0
    assert covered.max() == 1
    for columns in aligned.edges:
        assert columns.stop - columns.start == alignment
        covered[:, columns] += 1
    assert covered.min() == 1


@quick
def test_it_is_worth_it_where_enough_rows_are_alike():
    def in_rows(m, k, n):
        sides = Sides(1, m, k, n, (0, 0, -n % 8))
        return sides.worth_in_rows(AlignedRows(m, n, 8), 2, H200.matrix_speeds)

    assert in_rows(2048, 768, 30522)
    assert in_rows(4096, 768, 50257)
    assert not in_rows(512, 768, 50257), "eight products that read all of the right matrix"
    assert not in_rows(256, 768, 30522)


def test_a_large_result_that_leaves_is_made_in_aligned_rows(monkeypatch, fresh_compiler):
    """It would be there twice: padded, and not."""
    module = sys.modules[PAD_RULES[0].rewrite.__module__]  # its name is that of the pass, too
    monkeypatch.setattr(module, "gpu_machine", lambda: replace(H200, min_bytes_in_rows=1 << 10))

    def logits(x, w):
        return (x.tanh().flatten(0, 1) @ w.t()).unflatten(0, (4, -1))

    def probabilities(x, w):
        return logits(x, w).softmax(-1)

    x, w = torch.randn(4, 8, 8), torch.randn(13, 8)
    for function, products in ((logits, 5), (probabilities, 1)):
        run = torch.compile(function, backend="ferrite", fullgraph=True, options={"strict": True, "pad_mm": "always"})
        assert_no_farther(run(x, w), function(x, w), function(x.double(), w.double()), function.__name__)
        (graph,) = ferrite.last_compile().graphs
        assert len(re.findall(r"op_aten_b?mm(_out)?\(", graph.source)) == products
        if function is logits:
            assert graph.source.count("op_aten_mm_out(") == products - 1, (
                "all but the edges is written where it belongs"
            )
            assert graph.source.count("op_aten_bmm(") == 1, "both edges are one call"
            runs = set(re.findall(r"run_\d+\(", graph.source))
            assert len(runs) == 2, "the input, and the products of the edges to their places"


@pytest.mark.gpu
def test_logits_on_a_gpu_are_not_kept_twice():
    torch.manual_seed(0)
    x = torch.randn(2048, 768, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(30522, 768, device="cuda") / 32).bfloat16()
    with torch.no_grad():
        compiled = ferrite.compile(torch.nn.functional.linear, strict=True, dynamic=False)
        compiled(x, weight)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        ours = compiled(x, weight)
        assert torch.cuda.max_memory_allocated() - before < 1.01 * ours.nbytes
        eager = torch.nn.functional.linear(x, weight)
        assert ours.stride() == eager.stride()
        assert_no_farther(ours, eager, torch.nn.functional.linear(x.double(), weight.double()), "logits")
