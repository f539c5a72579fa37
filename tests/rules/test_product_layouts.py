"""Compiled, products of rows with rows have one operand laid out anew, once for all that share it, and by the kernel
that makes it; by itself only where that was measured to gain."""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

import ferrite
from ferrite.cache.key_components import ambient
from ferrite.capture import product_libraries
from ferrite.machines import thread_counts
from ferrite.options import Options
from ferrite.passes.post_grad.product_layouts import PRODUCT_LAYOUT
from ferrite.rewrite import why
from tests.compare import assert_same_as_eager, compile_strict, reset

ALWAYS = {"product_layouts": "always"}


def attention(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Of two heads, behind a norm; with relu in place of softmax, so that it stays two products."""
    x = F.layer_norm(x, x.shape[-1:])
    q, k, v = (F.linear(x, each).reshape(*x.shape[:2], 2, -1).transpose(1, 2) for each in (query, key, value))
    return (q @ k.transpose(-1, -2)).relu() @ v


def feed_forward(x: torch.Tensor, wide: torch.Tensor, narrow: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    return x + F.linear(F.gelu(F.linear(x, wide)), narrow, bias)


def given(*shapes: tuple[int, ...]) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(shape).requires_grad_() for shape in shapes]


CASES: dict[str, tuple[Callable[..., torch.Tensor], Callable[[], list[torch.Tensor]]]] = {
    "attention": (attention, given((1, 12, 16), (32, 16), (32, 16), (32, 16))),
    "feed forward": (feed_forward, given((10, 16), (40, 16), (16, 40), (16,))),
    "one token": (feed_forward, given((1, 16), (40, 16), (16, 40), (16,))),
    "no token": (feed_forward, given((0, 16), (40, 16), (16, 40), (16,))),
}


@pytest.mark.parametrize(
    ("name", "dynamic"), [*((name, False) for name in CASES), ("attention", True), ("feed forward", True)]
)
def test_values_and_gradients_are_eager_s(name: str, dynamic: bool) -> None:
    fn, make = CASES[name]
    assert_same_as_eager(fn, make, backward=True, terms=64.0, dynamic=dynamic, options=ALWAYS)
    assert ("product_layout" in ferrite.last_compile().rewrites) == (name in ("attention", "feed forward"))


def compiled(fn: Callable[..., Any], inputs: list[torch.Tensor], **options: Any) -> Any:
    reset()
    with torch.no_grad():
        compile_strict(fn, dynamic=False, options=options)(*inputs)
    return ferrite.last_compile()


def projections(x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    x = F.layer_norm(x, x.shape[-1:])
    return [F.linear(x, each) for each in (query, key, value)]


def test_scores_of_attention_are_laid_out() -> None:
    record = compiled(attention, CASES["attention"][1](), **ALWAYS)
    assert record.rewrites["product_layout"] == 4  # three projections, and the scores
    operators = [call.operator for call in record.eager_calls]
    assert operators.count("aten.bmm.default") == 2


def test_products_of_one_operand_share_its_copy() -> None:
    """Which is all that is kept of the norm: it has no other reader."""
    inputs = given((12, 16), (32, 16), (32, 16), (32, 16))()
    record = compiled(projections, inputs, **ALWAYS)
    assert record.rewrites["product_layout"] == 3
    assert [call.operator for call in record.eager_calls] == ["aten.mm.default"] * 3
    before = compiled(projections, inputs, product_layouts="off")
    merged = record.rewrites["merge_equal_calls"] - before.rewrites.get("merge_equal_calls", 0)
    assert merged == 2 * 3, "two further copies, each with two views"
    assert len(record.kernels) <= len(before.kernels) + 1


def test_the_kernel_that_makes_an_operand_lays_it_out() -> None:
    """Nothing is copied: what gelu writes is read by the product alone."""
    record = compiled(feed_forward, CASES["feed forward"][1](), **ALWAYS)
    assert record.rewrites["product_layout"] == 2
    before = compiled(feed_forward, CASES["feed forward"][1](), product_layouts="off")
    assert len(record.kernels) == len(before.kernels) + 1  # of x, which is given


def left_for(function: Callable[..., Any], *shapes: tuple[int, ...], **options: Any) -> str | None:
    """Why the product in a function is left as it is; None if it is not."""
    with FakeTensorMode():
        gm = make_fx(function)(*map(torch.empty, shapes))
    (found,) = why(gm, PRODUCT_LAYOUT, Options(executor="native", **options))
    return found.reason or None


@pytest.mark.parametrize("sparse", [torch.Tensor.to_sparse, torch.Tensor.to_sparse_csr])
@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_sparse_operands_have_no_layout_to_change(sparse: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Here rather than with the rule: torch does not trace them with symbolic sizes."""
    found = left_for(lambda a, b: torch.mm(sparse(a), b.mT), (5, 4), (6, 4), product_layouts="always")
    assert found == "an operand is sparse"


# --- where it is done by itself ---------------------------------------------------------------------------------------


@pytest.fixture
def on_arm(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As on a machine where it was measured to gain."""
    monkeypatch.setattr(product_libraries, "uses_arm_compute_library", lambda: True)
    monkeypatch.setattr(thread_counts, "works_with_all_of_few_cores", lambda: True)
    return monkeypatch


def reason(*sizes: int, **options: Any) -> str | None:
    """Why a product of so many rows, inner elements and columns, perhaps in a batch, is left; None if it is not."""
    *batch, rows, inner, columns = sizes
    function: Any = torch.bmm if batch else torch.mm
    return left_for(lambda a, b: function(a, b.mT), (*batch, rows, inner), (*batch, columns, inner), **options)


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((64, 256, 256), None),
        ((9, 64, 64), None),
        ((8, 64, 64), "it is so small that the Arm Compute Library does not take it"),
        ((64, 64, 8), "it is so small that the Arm Compute Library does not take it"),
        ((16, 16, 32), "it is so small that the Arm Compute Library does not take it"),
        ((4, 64, 64, 64), None),
        ((12, 512, 64, 512), None),
        ((3000, 64, 64), None),  # of which the weight is copied
        ((196, 768, 768), "the copy is large"),
        ((32, 2048, 2048), "its rows are long"),
        ((9, 4000, 9), None),  # small
    ],
)
def test_by_itself_where_it_was_measured_to_gain(
    on_arm: pytest.MonkeyPatch, sizes: tuple[int, ...], expected: str | None
) -> None:
    assert reason(*sizes) == expected


def test_large_ones_only_if_torch_has_all_of_few_cores(on_arm: pytest.MonkeyPatch) -> None:
    on_arm.setattr(thread_counts, "works_with_all_of_few_cores", lambda: False)
    assert reason(64, 256, 256) == "it is large, and the Arm Compute Library has more threads"
    assert reason(64, 64, 64) is None


def test_nowhere_else(on_arm: pytest.MonkeyPatch) -> None:
    on_arm.setattr(product_libraries, "uses_arm_compute_library", lambda: False)
    assert reason(64, 256, 256) == "it is no product that the Arm Compute Library would take"
    assert reason(64, 256, 256, product_layouts="always") is None


@pytest.fixture
def arm_build(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As if torch was built for Arm."""
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mkldnn, "is_acl_available", lambda: True)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    return monkeypatch


def test_what_is_known_of_the_machine(arm_build: pytest.MonkeyPatch) -> None:
    with torch.backends.mkldnn.flags(enabled=False):
        assert product_libraries.has_arm_compute_library()
        assert not product_libraries.uses_arm_compute_library()
    with torch.backends.mkldnn.flags(enabled=True):
        assert product_libraries.uses_arm_compute_library()
        arm_build.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "SVE256")
        assert not product_libraries.uses_arm_compute_library()


def test_a_release_that_does_not_say_is_taken_for_one_without(arm_build: pytest.MonkeyPatch) -> None:
    arm_build.setattr(torch.backends, "mkldnn", types.SimpleNamespace(is_available=lambda: True))
    assert not product_libraries.has_arm_compute_library()


@pytest.fixture
def settings() -> Iterator[Any]:
    """torch's backends, whose precision of products is as it was afterwards."""
    backends: Any = torch.backends
    before = [each.matmul.fp32_precision for each in (backends.mkldnn, backends.cuda)]
    yield backends
    torch.set_float32_matmul_precision("highest")
    for backend, precision in zip((backends.mkldnn, backends.cuda), before, strict=True):
        backend.matmul.fp32_precision = precision


def test_a_user_s_wish_for_less_precision_counts(arm_build: pytest.MonkeyPatch, settings: Any) -> None:
    """Only the Arm Compute Library can fulfil it."""
    with settings.mkldnn.flags(enabled=True):
        assert product_libraries.uses_arm_compute_library()
        settings.mkldnn.matmul.fp32_precision = "bf16"
        assert not product_libraries.uses_arm_compute_library()
        torch.set_float32_matmul_precision("highest")
        assert product_libraries.uses_arm_compute_library()
        torch.set_float32_matmul_precision("medium")
        assert not product_libraries.uses_arm_compute_library()


def test_one_backend_s_precision_may_be_its_own(arm_build: pytest.MonkeyPatch, settings: Any) -> None:
    """Where backends differ torch raises an error when it is asked for the precision of all of them."""
    settings.cuda.matmul.fp32_precision = "tf32"
    with pytest.raises(RuntimeError, match="precision"):
        torch.get_float32_matmul_precision()
    assert product_libraries.uses_arm_compute_library() == bool(settings.mkldnn.enabled)
    assert [product_libraries.may_round_operands(device) for device in ("cpu", "cuda")] == [False, True]
    fn, make = CASES["attention"]
    reset()
    assert_same_as_eager(fn, make, backward=True, terms=64.0)
    settings.mkldnn.matmul.fp32_precision, settings.cuda.matmul.fp32_precision = "bf16", "ieee"
    assert [product_libraries.may_round_operands(device) for device in ("cpu", "cuda")] == [True, False]


@pytest.mark.parametrize(
    ("cores", "threads", "expected"), [(2, 2, True), (4, 4, True), (2, 1, False), (1, 1, False), (64, 64, False)]
)
def test_what_is_known_of_its_cores(monkeypatch: pytest.MonkeyPatch, cores: int, threads: int, expected: bool) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _process: set(range(cores)), raising=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert thread_counts.works_with_all_of_few_cores() is expected


def test_compiled_code_is_kept_apart(arm_build: pytest.MonkeyPatch) -> None:
    """What was decided for all cores is not for one."""
    seen = []
    for threads in (2, 1):
        arm_build.setattr(os, "sched_getaffinity", lambda _process: {0, 1}, raising=False)
        arm_build.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        seen.append(ambient()["cores"])
    assert seen == ["True", "False"]
