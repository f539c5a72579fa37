"""Kernels compiled by other processes: the same code, in the order asked for, and nothing lost where one dies."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest

from ferrite.runtime.cuda import workers
from ferrite.runtime.cuda.kernels import unit_of
from tests.loop_kernels import KERNELS
from tests.targets.simulated_cuda import A100, H200
from tests.triton_kernels import kernel_of

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.fixture
def pool(monkeypatch):
    made = workers.Workers()
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    yield made
    for worker in made.found:
        worker.process.kill()


def requests():
    names = ("pointwise", "row softmax", "gather", "column sums")
    return [unit_of(kernel_of(KERNELS[name]), H200).request for name in names]


def slow(request):
    """As long as it takes until somebody else has done all the others."""
    time.sleep(0.05)
    return {"here": request["name"]}


def test_a_worker_compiles_what_this_process_would(pool):
    from ferrite.runtime.cuda.compile import answered

    wanted = requests()
    (worker,) = pool.some(4)
    for _ in range(1000):
        if worker.became_ready():
            break
        time.sleep(0.1)
    found = pool.answers(wanted, slow)
    there = [place for place, answer in enumerate(found) if "code" in answer]
    assert there
    assert found[there[0]] == answered(wanted[there[0]])
    assert all(found[place] == {"here": wanted[place]["name"]} for place in range(4) if place not in there)
    broken = {**wanted[0], "source": wanted[0]["source"].replace("tl.load", "tl.no_such_thing")}
    assert "no_such_thing" in worker.answer(broken)["error"]


def test_a_worker_that_dies_costs_nothing_but_time(pool):
    (worker,) = pool.some(4)
    worker.is_ready = True
    worker.process.kill()
    worker.process.wait()
    wanted = requests()
    found = [worker.answer(wanted[0])]
    assert found == [None]
    pool.found = [worker]
    pool.some = lambda count: [worker]
    assert pool.answers(wanted, slow) == [{"here": each["name"]} for each in wanted]


def test_few_kernels_need_no_worker(pool):
    assert pool.answers(requests()[:2], slow) == [{"here": each["name"]} for each in requests()[:2]]
    assert not pool.found


def test_requests_are_the_same_in_every_process():
    """By them code is found again: nothing in them may depend on the process."""
    first, second = (unit_of(kernel_of(KERNELS["row softmax"]), H200) for _ in range(2))
    assert first.text == second.text
    assert first.name == second.name
    assert unit_of(kernel_of(KERNELS["row softmax"]), A100).name != first.name
    assert first.request["types"][:2] == ["*fp32", "*fp32"]
