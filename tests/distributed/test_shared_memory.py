"""Copies in memory that ranks share are made by all ranks of a group, or by none: one that cannot open the memory of
another is no reason to wait for ever."""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

import ferrite
from ferrite.capture import torch_runtime
from ferrite.options import resolve
from ferrite.passes.post_grad.distributed import agreement
from ferrite.passes.post_grad.distributed.settings import communication_identity
from tests.compare import compile_strict, reset
from tests.distributed.programs import c10d, gathered, passed, scattered
from tests.distributed.test_passes_on_ranks import shared_memory
from tests.graphs import traced_with_fakes
from tests.ranks import assert_none_failed, imagined_ranks, outcomes, told

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
RANKS = 2
COPIES: dict[str, Any] = {"low_contention": {"min_mb": 0, "ignore_overlap": True}}


def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gathered(x, ranks=RANKS) * 2, scattered(y, ranks=RANKS).sin()


def copied(rank: int, **more: Any) -> int:
    """How many collectives of the program are copies; its results are eager's."""
    torch.manual_seed(rank)
    args = torch.randn(4, 6), torch.randn(4, 6)
    wanted = program(*args)
    reset()
    with torch.no_grad():
        found = compile_strict(program, options={"distributed": COPIES, **more})(*args)
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, theirs)
    return ferrite.last_compile().graphs[-1].source.count("= op_symm_mem__low_contention")


def on_both(rank: int) -> int:
    with shared_memory():
        return copied(rank)


def asked_for_on_one(rank: int) -> int:
    if rank == 1:
        return copied(rank)
    with shared_memory():
        return copied(rank)


def cannot_be_opened_on_one(rank: int) -> int:
    with shared_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_runtime, "opens_symmetric_memory", lambda _group: rank == 0)
        return copied(rank)


def one_does_not_ask(rank: int) -> int:
    """It has no copies in its options, and so says nothing of its memory."""
    with shared_memory(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(agreement, "PATIENCE_SECONDS", 1.0)
        begin = time.monotonic()
        found = copied(rank, **({"distributed": "off"} if rank else {}))
        assert time.monotonic() - begin < 30
        return found


def fails_while_it_runs(rank: int) -> str:
    """What fails in shared memory says where in the model, as what fails in a process group does."""

    def no_memory(x: torch.Tensor, group: str) -> torch.Tensor:
        raise RuntimeError("no memory was mapped")

    reset()
    with shared_memory() as library, torch.no_grad():
        library.impl("_low_contention_all_gather", no_memory, "CPU", allow_override=True)
        try:
            compile_strict(lambda x: gathered(x, ranks=RANKS) * 2, options={"distributed": COPIES})(torch.randn(4, 6))
        except RuntimeError as problem:
            return str(problem)
    return ""


def another_graph_asks_again(rank: int) -> list[int]:
    """What was said is said for the job: a rank that can by now does not begin what others do not expect."""
    first = asked_for_on_one(rank)
    with shared_memory():
        return [first, copied(rank)]


def from_the_cache(rank: int) -> list[int]:
    """What was compiled before is there, for ranks that say the same as then."""
    folder = Path(os.environ["RANKS_FOLDER"]) / f"cache of {rank}"
    with shared_memory():
        found = [copied(rank, cache_dir=folder), copied(rank, cache_dir=folder)]
    assert "hit" in str(ferrite.last_compile().cache)
    return found


# --- what torch's operators do as collectives do it, and what they do not ---------------------------------------------


@dataclass(frozen=True)
class Case:
    """A program, what it is given, and how many operators in shared memory it calls. `why`: why there are not more.
    `settings`: the option `distributed`."""

    name: str
    function: Callable[..., Any]
    make_inputs: Callable[[], list[torch.Tensor]]
    calls: int
    why: str = ""
    settings: Mapping[str, Any] = field(default_factory=lambda: COPIES)


def randn(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Callable[[], list[torch.Tensor]]:
    return lambda: [torch.randn(shape).mul(3).to(dtype) for shape in shapes]


def gather(x: torch.Tensor) -> torch.Tensor:
    return gathered(x, ranks=RANKS)


def scatter(x: torch.Tensor, op: str = "sum") -> torch.Tensor:
    return scattered(x, op, ranks=RANKS)


def multiplied(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gather(x) @ w


def added_up(op: str) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    return lambda x, w: scatter(x @ w, op)


def on_a_list(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
    begun = c10d.all_gather_into_tensor_coalesced([x, y], RANKS, "0")
    return [c10d.wait_tensor(each) for each in begun]


def into_memory_that_is_there(x: torch.Tensor) -> torch.Tensor:
    whole = x.new_empty(RANKS * x.shape[0], x.shape[1])
    return c10d.wait_tensor(c10d.all_gather_into_tensor_out(x, RANKS, "0", out=whole))


def as_many_as_data_say(x: torch.Tensor) -> torch.Tensor:
    rows = (x[:, 0] < 100).nonzero().flatten()
    return gather(x[rows])


def beside_a_product(x: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gather of `p` is on its way while rows are gathered and multiplied."""
    begun = c10d.all_gather_into_tensor(p, RANKS, "0")
    y = gather(x) @ w
    return y, c10d.wait_tensor(begun)


def in_turns(x: torch.Tensor, w: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    y = gather(x) @ w
    return y, gather(p + y.sum())


ROW, ROWS, MATRIX = (4, 6), (8, 6), (6, 6)
BY_PARTS: dict[str, Any] = {"async_tp": {"chunks": 3}}
BOTH = COPIES | BY_PARTS
CASES = (
    Case("a gather", gather, randn(ROW), 1),
    Case("a gather of integers", gather, randn(ROW, dtype=torch.int32), 1),
    Case("a sum", scatter, randn(ROW), 1),
    Case("an average", lambda x: scatter(x, "avg"), randn(ROW), 1),
    Case("a sum of halves", scatter, randn(ROW, dtype=torch.bfloat16), 1),
    Case("greatest ones", lambda x: scatter(x, "max"), randn(ROW), 0, "sums and averages, no 'max'"),
    Case("least ones", lambda x: scatter(x, "min"), randn(ROW), 0, "sums and averages, no 'min'"),
    Case("a sum of integers", scatter, randn(ROW, dtype=torch.int32), 0, "not of torch.int32"),
    Case("a sum of complex numbers", scatter, randn(ROW, dtype=torch.complex64), 0, "not of torch.complex64"),
    Case("columns", lambda x: gather(x.t()), randn(ROW), 0, "does not lie in order"),
    Case("columns that are added up", lambda x: scatter(x.t()), randn(ROW), 0, "does not lie in order"),
    Case("the last rows", lambda x: gather(x[2:]), randn(ROW), 0, "does not lie in order"),
    Case("no rows", gather, randn((0, 6)), 0, "it is empty"),
    Case("on a list", on_a_list, randn(ROW, ROW), 0, "not one tensor of each rank"),
    Case("into memory", into_memory_that_is_there, randn(ROW), 0),
    Case("as data say", as_many_as_data_say, randn(ROW), 0, "its sizes follow from data"),
    Case("rows and products", multiplied, randn((6, 6), MATRIX), 1, settings=BY_PARTS),
    Case("rows of integers and products", multiplied, randn((6, 6), MATRIX, dtype=torch.int32), 1, settings=BY_PARTS),
    Case("a product that is added up", added_up("sum"), randn((12, 6), MATRIX), 1, settings=BY_PARTS),
    Case("a product that is averaged", added_up("avg"), randn((12, 6), MATRIX), 1, settings=BY_PARTS),
    Case("greatest of products", added_up("max"), randn((12, 6), MATRIX), 0, "averages, no 'max'", BY_PARTS),
    Case(
        "a product of integers",
        added_up("sum"),
        randn((12, 6), MATRIX, dtype=torch.int32),
        0,
        "not of torch.int32",
        BY_PARTS,
    ),
    Case(
        "columns and products", lambda x, w: gather(x.t()) @ w, randn(MATRIX, MATRIX), 0, "not lie in order", BY_PARTS
    ),
    Case("last rows and products", lambda x, w: gather(x[3:]) @ w, randn(MATRIX, MATRIX), 0, "not lie in", BY_PARTS),
    Case(
        "odd rows and products",
        multiplied,
        randn((3, 3), (3, 5), dtype=torch.bfloat16),
        0,
        "18 bytes of a rank are not a number of words",
        BY_PARTS,
    ),
    Case("copies beside a product", beside_a_product, randn((6, 6), MATRIX, ROW), 1, settings=BOTH),
    Case("copies behind a product", in_turns, randn((6, 6), MATRIX, ROW), 2, settings=BOTH),
)


def on_gpus() -> dict[str, Callable[[int], None]]:
    """Programs of many cases each, for ranks that do share memory; without products of integers, which no GPU has."""

    def run(cases: list[Case]) -> Callable[[int], None]:
        def program(rank: int) -> None:
            for case in cases:
                calls, reasons = work(case, in_test_mode=False)(rank)
                assert calls == case.calls, case.name
                assert case.why in " ".join(reasons), case.name

        return program

    products = [case for case in CASES if case.settings is not COPIES and "integers" not in case.name]
    copies = [case for case in CASES if case.settings is COPIES]
    return {"collectives as copies": run(copies), "products as one operator": run(products)}


def work(case: Case, in_test_mode: bool = True) -> Callable[[int], tuple[int, list[str]]]:
    """How many operators in shared memory were called on a rank, and why there were not more. `in_test_mode`: that
    memory is imagined."""

    def run(rank: int) -> tuple[int, list[str]]:
        torch.manual_seed(rank)
        args = case.make_inputs()
        wanted = tree_leaves(case.function(*args))
        reset()
        whole_graphs = torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
        with torch.no_grad(), whole_graphs, shared_memory() if in_test_mode else contextlib.nullcontext():
            options = {"distributed": dict(case.settings), "skip": ["reorder_for_locality"]}
            found = tree_leaves(compile_strict(case.function, options=options, dynamic=False)(*args))
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(
                mine, theirs, check_stride=True, rtol=2e-2 if mine.itemsize == 2 else 1e-5, atol=1e-4
            )
        record = ferrite.last_compile()
        reasons = [each.why for _, graph in record.communication.graphs for each in graph.collectives]
        return len(re.findall(r"op_symm_mem_\w+\(", record.graphs[-1].source)), reasons

    return run


def other_products(rank: int) -> str:
    """One rank adds up what the other averages, in products alone. They would wait for each other where no process
    group counts the seconds."""

    def of_this_rank(x: torch.Tensor, right: torch.Tensor, op: str, dim: int, group: str) -> torch.Tensor:
        return (x @ right)[: len(x) // RANKS].clone()

    reset()
    with torch.no_grad(), shared_memory() as library:
        library.impl("fused_matmul_reduce_scatter", of_this_rank, "CPU", allow_override=True)
        try:
            fn = added_up("avg" if rank else "sum")
            compile_strict(fn, options={"distributed": BY_PARTS}, dynamic=False)(torch.ones(12, 6), torch.ones(6, 6))
        except ferrite.UserError as problem:
            return str(problem)
    return ""


PROGRAMS = {
    **{case.name: work(case) for case in CASES},
    "on both": on_both,
    "asked for on one": asked_for_on_one,
    "cannot be opened on one": cannot_be_opened_on_one,
    "one does not ask": one_does_not_ask,
    "another graph asks again": another_graph_asks_again,
    "from the cache": from_the_cache,
    "fails while it runs": fails_while_it_runs,
    "other products": other_products,
}
COPIED: dict[str, Any] = {
    "on both": 2,
    "asked for on one": 0,
    "cannot be opened on one": 0,
    "one does not ask": 0,
    "another graph asks again": [0, 0],
    "from the cache": [2, 2],
}


@pytest.fixture(scope="module")
def answers() -> dict[str, list[Any]]:
    return outcomes(PROGRAMS)


@pytest.mark.parametrize("name", COPIED)
def test_all_ranks_copy_or_none(name, answers):
    assert_none_failed(answers[name])
    assert answers[name] == [COPIED[name]] * RANKS


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_operators_in_shared_memory_are_called_where_they_do_what_collectives_do(case, answers):
    assert_none_failed(answers[case.name])
    for calls, reasons in answers[case.name]:
        assert calls == case.calls
        assert case.why in " ".join(reasons)


def test_what_fails_in_shared_memory_says_where(answers):
    assert_none_failed(answers["fails while it runs"])
    for said in answers["fails while it runs"]:
        assert "no memory was mapped" in said
        assert "_low_contention_all_gather" in said
        assert "programs.py" in said


def test_copies_are_not_what_collectives_are():
    """By what is compared among ranks, so that a rank that would begin the one is told that others do the other."""
    from ferrite.passes.post_grad.distributed.exchanges import exchanges_in

    def signatures(distributed: Any) -> list[str]:
        gm = passed(
            lambda x: gathered(x, ranks=RANKS),
            torch.randn(4, 6),
            steps=("low_contention_collectives",),
            distributed=distributed,
        )
        return [agreement.signature(each) for each in exchanges_in(gm.graph)]

    with imagined_ranks(RANKS), shared_memory():
        assert signatures(COPIES) == [f"copies {each}" for each in signatures("off")]


def test_programs_are_kept_apart_by_whether_memory_is_shared():
    from torch.distributed import _symmetric_memory as symmetric

    def identity(distributed: Any) -> str:
        gm = traced_with_fakes(lambda x: gathered(x, ranks=RANKS), torch.randn(4, 6))
        return communication_identity(gm.graph, resolve({"distributed": distributed}, environ={}))

    with imagined_ranks(RANKS):
        without = identity(COPIES), identity("auto")
        with symmetric._test_mode():
            shared = identity(COPIES), identity("auto")
    assert without[0] != shared[0]
    assert without[1] == shared[1]


def test_products_in_shared_memory_are_compared_among_ranks(answers):
    text = told(answers["other products"])
    assert "fused_matmul_reduce_scatter avg along 0 of torch.float32 144" in text
    assert "fused_matmul_reduce_scatter sum along 0 of torch.float32 144" in text
