"""What every pass over collectives keeps: ranks send the same in the same order (K9), and nothing that reads memory is
moved over what writes there (K5).

A program for each pass, on two ranks that exchange data. A pass that has none here is missed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

from ferrite.options import resolve
from ferrite.passes.post_grad import POST_GRAD
from ferrite.passes.post_grad.distributed.agreement import signature
from ferrite.passes.post_grad.distributed.exchanges import exchanges_in
from ferrite.pipeline import PassContext, Pipeline, run_pipeline
from tests.compare import compile_strict, reset
from tests.distributed.programs import gathered, reduced, scattered
from tests.distributed.test_passes_on_ranks import shared_memory
from tests.graphs import traced_with_fakes
from tests.ranks import assert_none_failed, on_ranks, outcomes

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
RANKS = 2
Write = Callable[[torch.Tensor], None]
Program = Callable[..., Any]  # of three tensors and a `Write`


def whole(x: torch.Tensor) -> torch.Tensor:
    return gathered(x, ranks=RANKS)


def shared(x: torch.Tensor) -> torch.Tensor:
    return scattered(x, ranks=RANKS)


@dataclass(frozen=True)
class Case:
    """`program` is given a batch, two parameters, and a function that it calls on what may be written at that place.
    `settings`: the option `distributed`. `any_batch`: what it sends does not depend on the batch. `has_memory`: ranks
    share memory, where copies are collectives."""

    program: Program
    settings: Any
    any_batch: bool = True
    has_memory: bool = False


def parameter_in_an_input(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    import torch.distributed.fsdp  # defines its operators

    torch.ops.inductor.resize_storage_bytes_.default(p, p.numel() * 4)
    torch.ops.fsdp.copy_.default(p, reduced(q))
    y = x @ p
    write(q)
    z = y @ p + q.sum()
    torch.ops.inductor.resize_storage_bytes_.default(p, 0)
    return z


def averages(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    first = reduced(torch.ops.aten.div.Tensor(p, RANKS))
    write(p)
    return first, reduced(torch.ops.aten.div.Tensor(p * 2 + q, RANKS)), x @ q


def products_beside_collectives(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    rows = whole(x)
    write(x)
    y = rows @ p
    write(p)
    write(q)
    z = torch.relu(y) @ q
    write(q)
    return shared(z), x + 1


def shared_rows(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    rows = whole(q)
    write(q)
    for _ in range(2):
        rows = rows @ (rows.t() @ rows) * 0.1
    return rows.split(q.shape[0])[dist.get_rank()], x @ p


def sums_of_sums(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    first = shared(p)
    write(p)
    return first + shared(q), x @ p


def gathers(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    first = whole(p)
    write(q)
    second = whole(q)
    y = x @ first[:16]
    write(p)
    return y @ second[:16], whole(p)


def sums_by(collective: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    def sums(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
        first = collective(p)
        write(p)
        second = collective(p * 2)
        y = x @ q
        write(q)
        return first, second, collective(q), y

    return sums


def moved(x: torch.Tensor, p: torch.Tensor, q: torch.Tensor, write: Write) -> Any:
    y = x @ p
    write(q)
    z = y @ whole(q)[:16]
    total = shared(z.t() @ z)
    write(p)
    return total, reduced(p), z @ p


COPIES = {"low_contention": {"min_mb": 0, "ignore_overlap": True}}
CASES: Mapping[str, tuple[Case, ...]] = {
    "remove_fsdp2_unsharded_param_graph_input_usage": (Case(parameter_in_an_input, "auto"),),
    "micro_pipeline_tp_pass": (
        Case(products_beside_collectives, {"async_tp": {}}, any_batch=False),
        Case(products_beside_collectives, {"async_tp": {}}, any_batch=False, has_memory=True),
    ),
    "fuse_ddp_communication": (Case(averages, {"ddp_fuse": {}}), Case(averages, "auto")),
    "decompose_collectives": (Case(shared_rows, ["decompose_comms"]),),
    "dedup_reduce_scatter": (Case(sums_of_sums, ["dedup_reduce_scatter"]), Case(sums_of_sums, "auto")),
    "bucket_reduce_scatter": (
        *(Case(sums_by(shared), {"bucket_rs": {"style": style}}) for style in ("traced", "opaque", "coalesced")),
        Case(sums_by(shared), "auto"),
    ),
    "bucket_all_reduce": (
        *(Case(sums_by(reduced), {"bucket_ar": {"style": style}}) for style in ("traced", "opaque", "coalesced")),
        Case(sums_by(reduced), "auto"),
    ),
    "bucket_all_gather": (
        *(Case(gathers, {"bucket_ag": {"style": style}}) for style in ("traced", "opaque", "coalesced")),
        Case(gathers, "auto"),
    ),
    "overlap_scheduling": (Case(moved, {"overlap": {}}), Case(moved, "auto")),
    "low_contention_collectives": (Case(moved, COPIES, has_memory=True), Case(gathers, COPIES, has_memory=True)),
}


def distributed_passes() -> list[str]:
    """Every pass of the stage that this package defines, by where its function is."""
    home = "ferrite.passes.post_grad.distributed"
    return [step.name for step in POST_GRAD.passes if step.function.__module__.startswith(home)]


def test_every_pass_has_a_program():
    assert len(distributed_passes()) >= 10, "the check itself finds nothing"
    assert sorted(distributed_passes()) == sorted(CASES)


def inputs(rank: int, batch: int = 16) -> list[torch.Tensor]:
    draws = torch.Generator().manual_seed(rank)
    return [torch.randn(rows, 16, generator=draws) for rows in (batch, 16, 16)]


def after_pass(name: str, case: Case, write: Write, args: list[torch.Tensor]) -> tuple[torch.fx.GraphModule, int]:
    """The graph of a program after one pass, with all laws checked; how often that fired."""
    gm = traced_with_fakes(lambda *given: case.program(*given, write), *args)
    options = resolve({"strict": True, "distributed": case.settings}, environ={})
    step = next(each for each in POST_GRAD.passes if each.name == name)
    (record,) = run_pipeline(Pipeline("post_grad", (step,)), gm, PassContext(options, True))
    return gm, sum(record.rewrites.values())


def add_one(x: torch.Tensor) -> None:
    x.add_(1)


def assert_same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(found, wanted, strict=True):
        if other.untyped_storage().size() > 0:  # else its memory was given up
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


def work(name: str) -> Callable[[int], list[Any]]:
    """On each rank, for each case, without writes and with them: how often the pass fired, and what is sent then. What
    it computes is compared with what the program computes, what it leaves in its inputs too."""

    def on_rank(rank: int) -> list[Any]:
        found = []
        for case in CASES[name]:
            with shared_memory() if case.has_memory else contextlib.nullcontext():
                found += outcomes_of(case, rank)
        return found

    def outcomes_of(case: Case, rank: int) -> list[Any]:
        found = []
        for write in (lambda _: None, add_one):
            mine, theirs = inputs(rank), inputs(rank)
            gm, count = after_pass(name, case, write, mine)
            results, wanted = gm(*mine), case.program(*theirs, write)
            assert_same([*tree_leaves(results), *mine], [*tree_leaves(wanted), *theirs])
            found.append((count, [signature(each) for each in exchanges_in(gm.graph)]))
        if case.any_batch:  # one rank has a batch that takes far longer, by which it would decide otherwise
            gm, count = after_pass(name, case, lambda _: None, inputs(rank, 16 << (12 * rank)))
            found.append((count, [signature(each) for each in exchanges_in(gm.graph)]))
        return found

    return on_rank


@pytest.fixture(scope="module")
def on_two_ranks() -> dict[str, list[Any]]:
    return outcomes({name: work(name) for name in CASES}, patience=120)


@pytest.mark.parametrize("name", CASES)
def test_ranks_agree_and_writes_stay_where_they_are(name, on_two_ranks):
    assert_none_failed(on_two_ranks[name])
    first, second = on_two_ranks[name]
    assert first == second, "ranks would not send the same"
    assert any(count for count, _ in first), "it never fires: the programs show nothing"


def same_collectives_otherwise_bound(rank: int) -> None:
    """Three gathers that are free, and then three of the same sizes of which one needs the result of another, or is of
    memory that was written meanwhile: what was agreed on for the first graph is not for the others."""

    def free(p: torch.Tensor, q: torch.Tensor) -> Any:
        return whole(p), whole(q), whole(p * 2)

    def bound(p: torch.Tensor, q: torch.Tensor) -> Any:
        first = whole(p)
        second = whole(q + first[:16])
        return first, second, whole(p * second[16:])

    def written(p: torch.Tensor, q: torch.Tensor) -> Any:
        first = whole(p)
        p.add_(first[16:])
        return first, whole(p), whole(q)

    for distributed in ({"bucket_ag": {}, "overlap": {}}, "auto"):
        for fn in (free, bound, written):
            mine, theirs = inputs(rank)[1:], inputs(rank)[1:]
            reset()
            with torch.no_grad():
                found = compile_strict(fn, options={"distributed": distributed})(*mine)
            assert_same([*found, *mine], [*fn(*theirs), *theirs])


def test_agreements_are_about_what_is_possible():
    on_ranks(same_collectives_otherwise_bound)
