"""When collectives began and were over in the last run, beside what was forecast."""

from __future__ import annotations

import time

import pytest
import torch
import torch.distributed as dist

import ferrite
from ferrite.runtime import CollectiveTimes
from tests.compare import compile_strict
from tests.distributed.programs import c10d
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="torch without distributed")
ROWS = [
    "buf1 = op__c10d_functional_all_gather_into_tensor(buf0, 8, '0')",
    "buf2, buf3 = op__c10d_functional_all_reduce_coalesced([buf4, buf5], 'sum', '0')",
    "op__c10d_functional_wait_tensor(buf1)",
    "op__c10d_functional_wait_tensor(buf2)",
    "op__c10d_functional_wait_tensor(buf3)",
]


def test_waits_are_those_of_what_they_wait_for():
    times = CollectiveTimes(ROWS)
    assert times.run() is None
    calls = [(0, 1.0, 2.0), (1, 2.0, 3.0), (2, 5.0, 9.0), (3, 9.0, 10.0), (4, 10.0, 12.0)]
    times.last = 0.5, 20.5, calls
    found = times.run()
    assert found is not None
    gather, sums = found.collectives
    assert (gather.operator, gather.begin, gather.end, gather.waited) == ("all_gather_into_tensor", 0.5, 8.5, 4.0)
    assert (sums.operator, sums.begin, sums.end, sums.waited) == ("all_reduce_coalesced", 1.5, 11.5, 3.0)
    assert (found.seconds, found.waited) == (20.0, 7.0)


def test_the_last_run_stands_beside_the_forecast():
    def fn(x: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(p, 2, "0"))
        return c10d.wait_tensor(c10d.all_reduce(x @ whole, "sum", "0"))

    def work(rank: int) -> tuple[str, str, list[float]]:
        run = compile_strict(fn)
        args = torch.randn(4, 8), torch.randn(4, 8)
        with torch.no_grad():
            run(*args)
            first = ferrite.last_compile().communication
            dist.barrier()
            if rank == 1:
                time.sleep(0.3)
            run(*args)
        found = ferrite.last_compile().communication
        assert first.measured != found.measured
        return str(found), found.timeline(), [each.waited for each in found.measured[-1].collectives]

    (text, picture, waits), _ = on_ranks(work)
    assert "measured" in text
    assert "us in waits; all" in text
    assert "graph, measured" in picture
    assert waits[0] > 0.2, "rank 0 waits in the first collective for the other, which is late"
    assert waits[1] < 0.2


def test_a_graph_that_never_ran_has_a_forecast_alone():
    def work(rank: int) -> str:
        run = compile_strict(lambda x: c10d.wait_tensor(c10d.all_reduce(x, "sum", "0")))
        run(torch.ones(3))
        communication = ferrite.last_compile().communication
        without = type(communication)(communication.graphs, (None,) * len(communication.graphs))
        return str(without) + without.timeline()

    text = on_ranks(work)[0]
    assert "graph, measured" not in text
    assert "in waits" not in text


def test_copies_in_shared_memory_are_measured_and_products_with_collectives_are_products():
    rows = [
        "buf1 = op_symm_mem__low_contention_all_gather(buf0, '0')",
        "buf2, buf3 = op_symm_mem_fused_all_gather_matmul(buf0, [buf5], 0, '0', return_A=True)",
        "op__c10d_functional_wait_tensor(buf1)",
    ]
    times = CollectiveTimes(rows)
    times.last = 0.0, 9.0, [(0, 1.0, 2.0), (1, 2.0, 6.0), (2, 6.0, 8.0)]
    found = times.run()
    assert found is not None
    (copies,) = found.collectives
    assert (copies.operator, copies.begin, copies.end, copies.waited) == ("_low_contention_all_gather", 1.0, 8.0, 2.0)
