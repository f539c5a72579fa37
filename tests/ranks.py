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
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tests.compare import reset

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


def on_ranks(
    work: Callable[[int], Any],
    world: int = 2,
    timeout: float = 60,
    allow_failure: bool = False,
    patience: int = PATIENCE,
) -> list[Any]:
    """What some work gives on each rank of a gloo group. An exception of a rank is raised here, or returned if that is
    allowed; a rank that ends by itself gives None."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_begin(work, rank, world, folder, timeout, patience) for rank in range(world)]
        answers = [_answer(child, reading) for child, reading in children]
    for answer in answers:
        if isinstance(answer, Failed) and not allow_failure:
            raise AssertionError(f"a rank failed:\n{answer.text}")
    return answers


class Failed:
    """What became of a rank that raised."""

    def __init__(self, kind: str, text: str) -> None:
        self.kind, self.text = kind, text


def outcomes(
    programs: Mapping[str, Callable[[int], Any]], world: int = 2, timeout: float = 60, patience: int = PATIENCE
) -> dict[str, list[Any]]:
    """What each of several programs gives on each rank, all of them by the same children: one start for many programs.
    Each has a process group of its own, so that one that fails is not missed by the next."""

    def work(rank: int) -> dict[str, Any]:
        found = {}
        dist.destroy_process_group()
        for name, program in programs.items():
            try:
                join(rank, world, f"store of program {len(found)}", timeout)
                torch.manual_seed(0)
                found[name] = program(rank)
            except BaseException as problem:
                found[name] = Failed(type(problem).__name__, traceback.format_exc())
            if dist.is_initialized():
                dist.destroy_process_group()
            reset()
        return found

    answers = on_ranks(work, world, timeout, patience=patience)
    return {name: [answer[name] for answer in answers] for name in programs}


def join(rank: int, world: int, name: str, timeout: float) -> None:
    """Become a rank of a gloo group, in the folder that the children share."""
    store = dist.FileStore(os.path.join(os.environ["RANKS_FOLDER"], name), world)  # type: ignore[attr-defined]
    limit = datetime.timedelta(seconds=timeout)
    dist.init_process_group("gloo", rank=rank, world_size=world, store=store, timeout=limit)
    dist.barrier()  # all are connected: one that leaves at once is not missed


def assert_none_failed(answers: list[Any]) -> None:
    for rank, answer in enumerate(answers):
        assert not isinstance(answer, Failed), f"rank {rank} failed:\n{answer.text}"


def told(answers: Sequence[Any]) -> str:
    """What one of two ranks that send otherwise was told: the one that came second, whichever that is."""
    texts = [answer.text if isinstance(answer, Failed) else str(answer) for answer in answers]
    (found,) = [
        text for rank, text in enumerate(texts) if f"rank {rank} would not send the same as rank {1 - rank}" in text
    ]
    return found


def _begin(
    work: Callable[[int], Any], rank: int, world: int, folder: str, timeout: float, patience: int
) -> tuple[int, int]:
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
        child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    signal.alarm(patience)  # ends the process, whatever it waits for
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        os.environ["RANKS_FOLDER"] = folder
        join(rank, world, "store", timeout)
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
