"""Several processes that compute together: children of this one, with gloo on the loopback; or imagined ones."""

from __future__ import annotations

import contextlib
import datetime
import os
import pickle
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist

PATIENCE = 160  # seconds until a child is taken for hanging, and killed


@contextlib.contextmanager
def imagined_ranks(world: int) -> Iterator[None]:
    """A process group in which this process is the first of so many, and nobody else is there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def on_ranks(work: Callable[[int], Any], world: int = 2, timeout: float = 60, allow_failure: bool = False) -> list[Any]:
    """What some work gives on each rank of a gloo group. An exception of a rank is raised here, or returned if that is
    allowed; a rank that ends by itself gives None."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_begin(work, rank, world, folder, timeout) for rank in range(world)]
        answers = [_answer(child, reading) for child, reading in children]
    for answer in answers:
        if isinstance(answer, Failed) and not allow_failure:
            raise AssertionError(f"a rank failed:\n{answer.text}")
    return answers


class Failed:
    """What became of a rank that raised."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text


def _begin(work: Callable[[int], Any], rank: int, world: int, folder: str, timeout: float) -> tuple[int, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    signal.alarm(PATIENCE)  # ends the process, whatever it waits for
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.FileStore(os.path.join(folder, "store"), world)  # type: ignore[attr-defined]
        limit = datetime.timedelta(seconds=timeout)
        dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
        torch.manual_seed(0)
        _send(writing, work(rank))
    except BaseException as problem:
        _send(writing, Failed(type(problem).__name__, traceback.format_exc()))
    finally:
        os._exit(0)


def _send(writing: int, answer: Any) -> None:
    with os.fdopen(writing, "wb") as answers:
        pickle.dump(answer, answers)


def _answer(child: int, reading: int) -> Any:
    with os.fdopen(reading, "rb") as answers:
        data = answers.read()
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) != -signal.SIGALRM, "a rank hung"
    return pickle.loads(data) if data else None
