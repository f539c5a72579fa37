"""The garbage collector waits while ferrite compiles, and goes on after."""

from __future__ import annotations

import gc

import pytest
import torch

from ferrite.collector import garbage_waits
from tests.compare import compile_strict
from tests.threads import in_threads

pytestmark = pytest.mark.quick


@pytest.fixture(autouse=True)
def collector_goes_on():
    yield
    gc.enable()


def test_it_goes_on_after_the_last():
    with garbage_waits():
        assert not gc.isenabled()
        with garbage_waits():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_one_that_is_off_stays_off():
    gc.disable()
    with garbage_waits():
        pass
    assert not gc.isenabled()


def test_it_goes_on_after_a_failure():
    with pytest.raises(ValueError, match="mine"), garbage_waits():
        raise ValueError("mine")
    assert gc.isenabled()


def test_many_threads_may_want_it():
    def wait_a_little() -> None:
        for _ in range(100):
            with garbage_waits():
                assert not gc.isenabled()

    in_threads([wait_a_little] * 4)
    assert gc.isenabled()


def test_passes_run_without_it_and_calls_with_it():
    seen: list[bool] = []

    def fn(x):
        return x.sin() + 1

    options = {"post_grad_custom_post_pass": lambda graph: seen.append(gc.isenabled())}
    x = torch.randn(3, requires_grad=True)
    compile_strict(fn, options=options)(x).sum().backward()
    assert seen == [False, False]  # forward, and backward later
    assert gc.isenabled()
