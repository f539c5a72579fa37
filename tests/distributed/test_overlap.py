"""Collectives begin early and are waited for late; the order is kept through lowering and scheduling."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import ferrite
from ferrite.ir.program import Collective, Wait
from ferrite.machines import Link, Network
from tests.compare import reset
from tests.distributed.programs import RANKS, c10d, collectives, count, gathered, passed, reduced, scattered
from tests.ranks import imagined_ranks

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="torch without distributed")
OVERLAP = ("overlap_scheduling",)


@pytest.fixture(autouse=True, scope="module")
def group() -> Iterator[None]:
    with imagined_ranks(RANKS):
        yield


def squares(number: int, side: int = 64) -> list[torch.Tensor]:
    return [torch.randn(side, side) for _ in range(number)]


def test_a_gather_begins_before_a_product_that_does_not_need_it():
    def fn(x, y, p):
        return (x @ y) @ gathered(p)

    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 64)]
    gm = passed(fn, *inputs, steps=OVERLAP, distributed={"overlap": {}})
    assert collectives(gm) == ["all_gather_into_tensor", "mm", "wait_tensor", "mm"]


def test_nothing_moves_where_nothing_may_be_in_flight():
    def fn(x, y, p):
        return (x @ y) @ gathered(p)

    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 64)]
    gm = passed(fn, *inputs, steps=OVERLAP, distributed={"overlap": {"in_flight_mb": 0}})
    assert collectives(gm) == ["mm", "all_gather_into_tensor", "wait_tensor", "mm"]


def test_without_a_limit_on_memory_it_works_too():
    def fn(x, y, p):
        return (x @ y) @ gathered(p)

    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 64)]
    gm = passed(fn, *inputs, steps=OVERLAP, distributed={"overlap": {"limits_memory": False}})
    assert collectives(gm)[0] == "all_gather_into_tensor"


def test_a_sum_of_gradients_is_waited_for_behind_what_follows():
    def fn(x, y):
        z = x @ y
        total = scattered(z)
        return total, z @ y

    gm = passed(fn, *squares(2), steps=OVERLAP, distributed={"overlap": {}})
    assert collectives(gm) == ["mm", "reduce_scatter_tensor", "mm", "wait_tensor"]


def test_nothing_passes_a_write():
    def fn(x, y, p):
        z = x @ y
        p.add_(1)
        return z @ gathered(p)

    gm = passed(fn, *squares(2), torch.randn(8, 64), steps=OVERLAP, distributed={"overlap": {}})
    names = [node.name for node in gm.graph.nodes]
    assert names.index("add_") < names.index("all_gather_into_tensor")


def test_two_groups_do_not_wait_for_each_other():
    other = torch.distributed.new_group(list(range(RANKS))).group_name

    def fn(x, y, p, q):
        return (x @ y) @ gathered(p), (y @ x) @ gathered(q, other)

    gm = passed(fn, *squares(2), torch.randn(8, 64), torch.randn(8, 64), steps=OVERLAP, distributed={"overlap": {}})
    assert collectives(gm)[:3] == ["all_gather_into_tensor", "all_gather_into_tensor", "mm"]


def test_it_is_done_once():
    """The same passes find nothing to do in what they made."""

    def fn(x, y, p):
        return (x @ y) @ gathered(p)

    from ferrite.options import resolve
    from ferrite.passes.post_grad import overlap_scheduling
    from ferrite.pipeline import PassContext

    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 64)]
    gm = passed(fn, *inputs, steps=OVERLAP, distributed={"overlap": {}})
    context = PassContext(resolve({"distributed": {"overlap": {}}}, environ={}), True)
    assert overlap_scheduling.function(gm, context) == 0


def compiled_program(fn: Any, inputs: list[torch.Tensor], distributed: Any = "auto") -> list[str]:
    """The steps of the host program, by what they call."""
    reset()
    with torch.no_grad():
        torch.compile(fn, backend="ferrite", options={"strict": True, "distributed": distributed})(*inputs)
    kept = {"_wait_tensor(": "wait", "op__c10d_functional_": "begin", "run_": "run", "op_aten_mm(": "mm"}
    rows = ferrite.last_compile().graphs[-1].source.splitlines()
    found = (next((name for text, name in kept.items() if text in row.partition("#")[0]), None) for row in rows)
    return [name for name in found if name is not None]


def test_kernels_run_between_begin_and_wait():
    def fn(x, p, q):
        y = torch.relu(torch.relu(x).exp() @ gathered(p))
        return torch.sin(y) @ gathered(q)

    steps = compiled_program(fn, [torch.randn(256, 128), torch.randn(16, 128), torch.randn(16, 128)], {"overlap": {}})
    last_begin = len(steps) - 1 - steps[::-1].index("begin")
    last_wait = len(steps) - 1 - steps[::-1].index("wait")
    assert {"run", "mm"} & set(steps[last_begin:last_wait]), steps


def test_memory_in_flight_is_nobodys(monkeypatch):
    """What a collective reads and writes is neither reused in place, nor lies in an arena, nor is freed, before the
    wait: kernels of the right sizes are there to take it."""
    from ferrite.schedule import plan as planning

    plans = []
    original = planning.plan_of
    monkeypatch.setattr(planning, "plan_of", lambda schedule: plans.append(original(schedule)) or plans[-1])

    def fn(x, p):
        sent = torch.sin(x)
        total = scattered(sent)
        y = torch.cos(sent)  # reads what is being sent, for the last time
        z = torch.exp(y)
        return total * 2, z, gathered(p * 2) + 1

    compiled_program(fn, [torch.randn(64, 64), torch.randn(8, 64)], {"overlap": {}})
    (plan,) = plans
    steps = list(plan.steps)
    held: dict[str, tuple[int, int]] = {}
    for place, step in enumerate(steps):
        if isinstance(step, Wait):
            for storage in step.holds:
                begun = max(at for at, each in enumerate(steps[:place]) if isinstance(each, Collective))
                held[storage] = (held.get(storage, (begun, 0))[0], place)
    assert held
    for storage, (_, waited) in held.items():
        assert storage not in plan.in_place
        assert storage not in plan.in_place.values()
        for place, step in enumerate(steps):
            if hasattr(step, "is_inside"):
                assert not step.is_inside(storage)
                assert all(host != storage for host, _ in step.borrowed_space.values()) or place > waited
            if storage in plan.last_uses[place]:
                assert place >= waited


@pytest.mark.parametrize("is_sent", [False, True])
def test_what_is_being_sent_is_not_overwritten(is_sent):
    """A sum that is the last to read a tensor is made in its memory: not while a gather of that is under way."""

    def fn(x):
        sent = torch.sin(x)
        whole = c10d.all_gather_into_tensor(sent, RANKS, "0") if is_sent else None
        total = c10d.all_reduce(sent, "sum", "0")
        return c10d.wait_tensor(whole) if is_sent else None, c10d.wait_tensor(total) + 1

    compiled_program(fn, [torch.randn(64, 64)], "off")
    assert ("all_reduce_(" in ferrite.last_compile().graphs[-1].source) != is_sent


def test_a_graph_without_collectives_is_not_looked_at():
    reset()
    torch.compile(lambda x: x + 1, backend="ferrite", options={"strict": True})(torch.ones(3))
    (graph,) = ferrite.last_compile().graphs
    notes = {step.name: step.note for step in graph.passes}
    assert {notes[name] for name in ("overlap_scheduling", "bucket_all_gather", "fuse_ddp_communication")} == {
        "no collectives"
    }
    assert graph.communication is None
    assert str(ferrite.last_compile().communication) == "no collectives"


def test_the_cost_model_decides_by_the_network(tmp_path):
    """A slow network is hidden as well as it goes; one that takes no time is left as it is."""

    def fn(x, y, p):
        return (x @ y) @ gathered(p), reduced(x)

    inputs = [torch.randn(64, 64), torch.randn(64, 64), torch.randn(8, 64)]
    moved = passed(fn, *inputs, steps=OVERLAP, distributed="auto")
    assert collectives(moved)[0] == "all_gather_into_tensor"
    fast = tmp_path / "network.txt"
    fast.write_text(str(Network({"any": Link(0.0, 1e18)}, {"any": Link(0.0, 1e18)}, 64)))
    with ferrite.using(network=fast):
        kept = passed(fn, *inputs, steps=OVERLAP, distributed="auto")
    assert collectives(kept)[0] == "mm"
    assert count(kept, "wait_tensor") == 2


def test_one_can_ask_why():
    """Of a collective that everything waits for, and of what there is none."""
    reset()
    with torch.no_grad():
        fn = lambda x: reduced(x) + 1  # noqa: E731
        torch.compile(fn, backend="ferrite", options={"strict": True})(torch.randn(64, 64))
    found = ferrite.last_compile().communication
    ((_, record),) = found.graphs
    (only,) = record.collectives
    said = f"{only.node} of the inference graph: there is no other that it could be merged with"
    assert found.why(only.node) == found.why(only.line.place) == said
    assert found.why("all_gather") == f"no collective is all_gather; there are: {only.node}"
