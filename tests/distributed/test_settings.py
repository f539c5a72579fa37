"""Every setting of the passes over collectives, through `torch.compile` on two ranks: the value that it has by default
and another one, what each makes of the same program, and that both compute what eager does."""

from __future__ import annotations

import contextlib
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import ferrite
from ferrite.passes.post_grad.distributed import SETTINGS
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d, gathered, reduced, scattered
from tests.distributed.rule_programs import tensor_parallel_layer
from tests.distributed.test_passes_on_ranks import shared_memory
from tests.ranks import assert_none_failed, outcomes, told

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
RANKS = 2
Inputs = list[torch.Tensor]
# What is read of a host program: what begins a collective, what waits for one, and what is computed.
STEP = re.compile(r"op_(?:_c10d_functional_|symm_mem_|aten_|ferrite_)(\w+)\(")
SHORT = {
    "all_gather_into_tensor": "gather",
    "all_gather_into_tensor_coalesced": "gathers",
    "reduce_scatter_tensor": "scatter",
    "reduce_scatter_tensor_coalesced": "scatters",
    "all_reduce": "sum",
    "all_reduce_": "sum",
    "all_reduce_coalesced": "sums",
    "all_reduce_coalesced_": "sums",
    "wait_tensor": "wait",
    "mm": "mm",
    "mm_out": "mm",
    "pack_bucket": "pack",
    "_low_contention_all_gather": "copies",
}


@dataclass(frozen=True)
class Case:
    """`settings` of one pass by its name, and what comes of them: the steps of the host program,
    and how many collectives each of those was that there are now."""

    program: Callable[..., Any]
    inputs: Callable[[], Inputs]
    settings: Mapping[str, Any]
    steps: str


def randn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], Inputs]:
    return lambda: [torch.randn(shape, dtype=dtype) for shape in shapes]


# --- programs ---------------------------------------------------------------------------------------------------------


def gather(x: torch.Tensor) -> torch.Tensor:
    return gathered(x, ranks=RANKS)


def scatter(x: torch.Tensor) -> torch.Tensor:
    return scattered(x, ranks=RANKS)


def gathers(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    """Of two parameters, and of what is computed from two."""
    return gather(a), gather(b), gather(a + c)


def two_types(a: torch.Tensor, b: torch.Tensor) -> Any:
    return gather(a), gather(b.to(torch.bfloat16))


def scatters(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    """Two that are returned, and one that is computed with."""
    part = scatter(c)
    return scatter(a), scatter(b), part + part.sum()


def sums(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
    return reduced(a), reduced(b), reduced(c) @ c


def averages(x: torch.Tensor, *weights: torch.Tensor) -> Any:
    found = []
    for weight in weights:
        x = x @ weight
        found.append(reduced(torch.ops.aten.div.Tensor(x, RANKS)))
    return *found, x @ weights[0]


def large_averages(*tensors: torch.Tensor) -> Any:
    return averages(*tensors)


def gathered_late(x: torch.Tensor, y: torch.Tensor, p: torch.Tensor) -> Any:
    return ((x @ y) @ y) @ gather(p)


def behind_the_peak(x: torch.Tensor, y: torch.Tensor, p: torch.Tensor) -> Any:
    """What is gathered is needed where little else is held; before that a lot is."""
    return (x.repeat(8, 1) @ y).sum(0, keepdim=True) @ gather(p)


def summed_early(x: torch.Tensor, y: torch.Tensor) -> Any:
    z = x @ y
    return scatter(z), (z @ y) @ y


def copied(x: torch.Tensor, p: torch.Tensor) -> Any:
    begun = c10d.all_gather_into_tensor(p, RANKS, "0")
    y = x @ x
    return c10d.wait_tensor(begun) * 2, y, gather(x)


BLOCKS = randn((64, 64), (64, 64), (64, 64))  # 16,384 bytes each
PAIR = randn((64, 64), (64, 64))
ROWS = randn((8, 6), (6, 10), (10, 6))
LAYER = randn((64, 64), (64, 64), (32, 64))


def megabytes() -> Inputs:
    """Each of them as large as the first bucket of averages may be."""
    return [torch.randn(512, 512) / 23 for _ in range(5)]


MB = 1e6
CASES: tuple[Case, ...] = (
    Case(gathers, BLOCKS, {"bucket_ag": {}}, "gather wait / 3"),
    Case(gathers, BLOCKS, {"bucket_ag": {"which": "fsdp"}}, "gather wait gather wait / 1 2"),
    Case(gathers, BLOCKS, {"bucket_ag": {"cap_mb": 70_000 / MB}}, "gather wait gather wait / 1 2"),
    Case(gathers, BLOCKS, {"bucket_ag": {"cap_mb": 0}}, "gather wait gather wait gather wait / 1 1 1"),
    Case(gathers, BLOCKS, {"bucket_ag": {"first_mb": 40_000 / MB}}, "gather wait gather wait / 1 2"),
    Case(gathers, BLOCKS, {"bucket_ag": {"style": "traced"}}, "gather wait / 3"),
    Case(gathers, BLOCKS, {"bucket_ag": {"style": "opaque"}}, "pack gather wait / 3"),
    Case(gathers, BLOCKS, {"bucket_ag": {"style": "coalesced"}}, "gathers wait wait wait / 3"),
    Case(two_types, PAIR, {"bucket_ag": {"style": "opaque"}}, "gather wait gather wait / 1 1"),
    Case(two_types, PAIR, {"bucket_ag": {"style": "opaque_multidtype"}}, "pack gather wait / 2"),
    Case(scatters, BLOCKS, {"bucket_rs": {}}, "scatter wait / 3"),
    Case(scatters, BLOCKS, {"bucket_rs": {"which": "fsdp"}}, "scatter scatter wait wait / 2 1"),
    Case(scatters, BLOCKS, {"bucket_rs": {"cap_mb": 40_000 / MB}}, "scatter scatter wait wait / 2 1"),
    Case(scatters, BLOCKS, {"bucket_rs": {"first_mb": 10_000 / MB}}, "scatter scatter wait wait / 2 1"),
    Case(scatters, BLOCKS, {"bucket_rs": {"style": "opaque"}}, "scatter wait / 3"),
    Case(
        scatters,
        BLOCKS,
        {"bucket_rs": {"style": "opaque_multidtype"}},
        "scatter wait scatter wait scatter wait / 1 1 1",
    ),
    Case(scatters, BLOCKS, {"bucket_rs": {"style": "coalesced"}}, "scatters wait wait wait / 3"),
    Case(sums, BLOCKS, {"bucket_ar": {}}, "sum wait mm / 3"),
    Case(sums, BLOCKS, {"bucket_ar": {"which": "fsdp"}}, "sum sum wait mm wait / 2 1"),
    Case(sums, BLOCKS, {"bucket_ar": {"cap_mb": 40_000 / MB}}, "sum sum wait mm wait / 2 1"),
    Case(sums, BLOCKS, {"bucket_ar": {"first_mb": 10_000 / MB}}, "sum sum wait wait mm / 2 1"),
    Case(sums, BLOCKS, {"bucket_ar": {"style": "opaque"}}, "pack sum wait mm / 3"),
    Case(sums, BLOCKS, {"bucket_ar": {"style": "opaque_multidtype"}}, "pack sum wait mm / 3"),
    Case(sums, BLOCKS, {"bucket_ar": {"style": "coalesced"}}, "sums wait mm wait wait / 3"),
    Case(large_averages, megabytes, {"ddp_fuse": {}}, "mm sum wait mm mm mm sum mm wait / 1 3"),
    Case(
        large_averages,
        megabytes,
        {"ddp_fuse": {"bucket_mb": 0}},
        "mm sum wait mm sum wait mm sum wait mm sum wait mm / 1 1 1 1",
    ),
    Case(averages, BLOCKS, {"ddp_fuse": {}}, "mm mm sum mm wait / 2"),
    Case(averages, BLOCKS, {"ddp_fuse": {"style": "coalesced"}}, "mm mm sums mm wait wait / 2"),
    Case(averages, BLOCKS, {"ddp_fuse": {"delay_waits": False}}, "mm mm sum wait mm / 2"),
    Case(
        tensor_parallel_layer,
        ROWS,
        {"async_tp": {}},
        "gather gather wait mm wait mm mm scatter mm scatter wait wait / 1 1 1 1",
    ),
    Case(
        tensor_parallel_layer,
        ROWS,
        {"async_tp": {"chunks": 4}},
        "gather gather gather gather wait mm wait mm wait mm wait mm "
        "mm scatter mm scatter mm scatter mm scatter wait wait wait wait / 1 1 1 1 1 1 1 1",
    ),
    Case(copied, PAIR, {"low_contention": {}}, "gather mm wait gather wait / 1 1"),
    Case(copied, PAIR, {"low_contention": {"min_mb": 0}}, "copies mm wait gather wait / 1 1"),
    Case(copied, PAIR, {"low_contention": {"min_mb": 0, "ignore_overlap": True}}, "copies mm wait copies wait / 1 1"),
    Case(gathered_late, LAYER, {"overlap": {}}, "gather mm mm wait mm / 1"),
    Case(gathered_late, LAYER, {"overlap": {"in_flight_mb": 0}}, "mm mm gather wait mm / 1"),
    Case(gathered_late, LAYER, {"overlap": {"prefetch": 0}}, "mm mm gather wait mm / 1"),
    Case(gathered_late, LAYER, {"overlap": {"prefetch": 1}}, "mm gather mm wait mm / 1"),
    Case(gathered_late, LAYER, {"overlap": {"compute": 1e6}}, "mm gather mm wait mm / 1"),
    Case(behind_the_peak, LAYER, {"overlap": {}}, "gather mm wait mm / 1"),
    Case(behind_the_peak, LAYER, {"overlap": {"memory_mb": 0}}, "mm gather wait mm / 1"),
    Case(behind_the_peak, LAYER, {"overlap": {"memory_mb": 0, "memory_percent": 50}}, "gather mm wait mm / 1"),
    Case(behind_the_peak, LAYER, {"overlap": {"memory_mb": 0, "limits_memory": False}}, "gather mm wait mm / 1"),
    Case(summed_early, PAIR, {"overlap": {}}, "mm scatter mm mm wait / 1"),
    Case(summed_early, PAIR, {"overlap": {"in_flight_mb": 0}}, "mm scatter wait mm mm / 1"),
    Case(summed_early, PAIR, {"overlap": {"compute": 1e6}}, "mm scatter mm wait mm / 1"),
)


def steps(record: Any) -> str:
    names = (
        match[1] for row in record.graphs[-1].source.splitlines() for match in STEP.finditer(row.partition("#")[0])
    )
    members = " ".join(str(each.members) for _, graph in record.communication.graphs for each in graph.collectives)
    return " ".join(SHORT[name] for name in names if name in SHORT) + " / " + members


def named(case: Case) -> str:
    (name, settings), *_ = case.settings.items()
    told = ", ".join(
        f"{key} {value:g}" if isinstance(value, float) else f"{key} {value}" for key, value in settings.items()
    )
    return f"{case.program.__name__}: {name} {told}"


def work(case: Case) -> Callable[[int], str]:
    def run(rank: int) -> str:
        torch.manual_seed(rank)
        args = case.inputs()
        wanted = case.program(*args)
        reset()
        shares = shared_memory() if "low_contention" in case.settings else contextlib.nullcontext()
        with torch.no_grad(), shares:
            # which would put products behind collectives of its own accord
            options = {"distributed": dict(case.settings), "skip": ["reorder_for_locality"]}
            found = compile_strict(case.program, options=options, fullgraph=True)(*args)
        for one, other in zip(tree_leaves(found), tree_leaves(wanted), strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)
        return steps(ferrite.last_compile())

    return run


# --- what ranks that differ are told ----------------------------------------------------------------------------------


def differs(on_mismatch: str) -> Callable[[int], list[str]]:
    """One rank adds up, the other takes the greatest, so that both go on if nobody stops them."""

    def run(rank: int) -> list[str]:
        op = "max" if rank else "sum"
        options = {"distributed": {"spmd_check": {"on_mismatch": on_mismatch}}}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            compile_strict(lambda x: reduced(x, op), options=options)(torch.ones(3))
        return [str(each.message) for each in caught if "would not send" in str(each.message)]

    return run


# --- waits ------------------------------------------------------------------------------------------------------------


def hidden_by_many(x: torch.Tensor, y: torch.Tensor) -> Any:
    total = scatter(x)
    for _ in range(32):
        x = x @ y
    return total, x


def products_before_wait(slack: float) -> Callable[[int], int]:
    def run(rank: int) -> int:
        reset()
        options = {"distributed": {"overlap": {"slack": slack, "compute": 20}}, "skip": ["reorder_for_locality"]}
        with torch.no_grad():
            compile_strict(hidden_by_many, options=options)(torch.eye(64), torch.eye(64))
        return steps(ferrite.last_compile()).partition("wait")[0].count("mm")

    return run


PROGRAMS: Mapping[str, Callable[[int], Any]] = {
    **{named(case): work(case) for case in CASES},
    "on_mismatch raise": differs("raise"),
    "on_mismatch warn": differs("warn"),
    "slack 0": products_before_wait(0.0),
    "slack 1": products_before_wait(1.0),
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return outcomes(PROGRAMS, timeout=20)


@pytest.mark.parametrize("case", CASES, ids=named)
def test_a_setting_does_what_it_says(case, answers):
    assert_none_failed(answers[named(case)])
    assert answers[named(case)] == [case.steps] * RANKS


def test_a_difference_is_an_error_or_a_warning(answers):
    assert told(answers["on_mismatch raise"])
    assert_none_failed(answers["on_mismatch warn"])
    assert told(answers["on_mismatch warn"])
    assert sum(map(len, answers["on_mismatch warn"])) == 1


def test_slack_puts_waits_off(answers):
    few, many = answers["slack 0"], answers["slack 1"]
    assert few[0] == few[1] < many[0] == many[1] <= 32


def test_every_setting_is_tried():
    tried = {(name, key) for case in CASES for name, settings in case.settings.items() for key in settings}
    tried |= {("spmd_check", "on_mismatch"), ("overlap", "slack")}
    assert tried == {(name, field.name) for name, kind in SETTINGS.items() for field in fields(kind)}
