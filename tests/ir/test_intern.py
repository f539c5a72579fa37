"""Nodes exist once, whoever makes them, as long as somebody holds them."""

from __future__ import annotations

import gc
import sys
import threading
import weakref

import pytest
import torch

from ferrite.ir import intern
from ferrite.ir.expr import Cast, Const, Expr, Load, const, load, op
from ferrite.ir.index.algebra import axis, forget, symbol


def make(count: int) -> list[object]:
    i, j, n = axis("i", 8), axis("j", symbol("n", 1, None)), symbol("n", 1, None)
    made: list[object] = []
    for place in range(count):
        index = (i * n + j * place + 7) // (n * 2) + j % (place + 1)
        value = op("add", load("x", (index, j), torch.float32), const(place, torch.float32))
        made += [index, value, op("sin", value)]
    return made


def made_at_once(threads: int) -> list[list[object]]:
    """The same nodes, made by many threads that start together."""
    results = [list[object]() for _ in range(threads)]
    start = threading.Barrier(threads)

    def work(place: int) -> None:
        start.wait()
        results[place] = make(60)

    workers = [threading.Thread(target=work, args=(place,)) for place in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return results


def test_threads_get_the_same_nodes():
    """From nothing, many times, with the interpreter switching between threads as often as it can."""
    switching = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(2):
            forget()
            gc.collect()
            first, *others = made_at_once(8)
            for other in others:
                assert all(one is two for one, two in zip(first, other, strict=True))
            del first, others, other
    finally:
        sys.setswitchinterval(switching)


def test_what_nobody_holds_is_collected():
    value = op("sin", load("nobody_else", (), torch.float32))
    gone = weakref.ref(value)
    before = len(intern._table)
    del value
    gc.collect()
    assert gone() is None
    assert len(intern._table) < before


@pytest.mark.quick
def test_fields_decide_identity():
    zero, minus = const(0.0, torch.float32), const(-0.0, torch.float32)
    assert zero is not minus
    assert const(1, torch.int64) is not const(1, torch.int32)
    assert const(True, torch.bool) is const(True, torch.bool)
    assert Const.intern(torch.float32, 0) is zero
    assert load("x", (), torch.float32) is not load("y", (), torch.float32)


@pytest.mark.quick
def test_kinds_do_not_mix():
    value = load("x", (), torch.float32)
    made: list[Expr] = [Cast.intern(value, torch.float64), op("neg", value), Load.intern("x", (), torch.float64)]
    assert len(set(made)) == 3


@pytest.mark.quick
def test_nodes_cannot_be_changed():
    value = load("x", (), torch.float32)
    with pytest.raises(AttributeError, match="cannot be changed"):
        value.buffer = "y"


@pytest.mark.quick
def test_nodes_survive_pickling():
    import copy
    import pickle

    value = make(2)[-1]
    assert pickle.loads(pickle.dumps(value)) is value
    assert copy.deepcopy(value) is value
