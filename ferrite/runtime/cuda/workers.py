"""Kernels compiled side by side: Triton holds Python's lock, so other processes help, and this one does not wait.

A worker runs `compile.py` by its path: it knows Triton alone, has no GPU's context, and costs no import of torch. It
takes a request when it is ready; until then, and besides, this process compiles. One that dies costs nothing but the
time: what it had is compiled here. Workers go when nobody asks for a while, and with the process that started them.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ferrite.runtime.code_memory import kernels_done
from ferrite.runtime.cuda import compile as triton_compiler

MAX_WORKERS = 8
MAX_KERNELS_WITHOUT_WORKER = 2  # so many kernels are compiled sooner than a worker begins
Request = dict[str, Any]
Answer = dict[str, Any]


class Worker:
    """One process."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, triton_compiler.__file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self.is_ready = False

    @property
    def is_alive(self) -> bool:
        return self.process.poll() is None

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def became_ready(self) -> bool:
        """Whether it can take requests from now on. Does not wait."""
        assert self.process.stdout is not None
        if self.is_ready or not select.select([self.process.stdout], [], [], 0)[0]:
            return False
        self.is_ready = self.line() == f"{triton_compiler.READY}\n"
        return self.is_ready

    def answer(self, request: Request) -> Answer | None:
        """None where the process has ended."""
        try:
            assert self.process.stdin is not None
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            answer: Answer = json.loads(self.line())
        except (OSError, ValueError):
            return None
        return answer


class Workers:
    """Those of this process."""

    def __init__(self) -> None:
        self.found: list[Worker] = []
        self.pid = os.getpid()
        self.lock = threading.Lock()

    def some(self, count: int) -> list[Worker]:
        if self.pid != os.getpid():  # the parent of a fork goes on using its own
            self.found, self.pid = [], os.getpid()
        self.found = [worker for worker in self.found if worker.is_alive]
        most = min(count, MAX_WORKERS, max((os.cpu_count() or 1) - 1, 0))
        try:
            while len(self.found) < most and sys.executable and sys.platform != "win32":
                self.found.append(Worker())
        except OSError:  # no more processes to be had
            pass
        return self.found[:most]

    def answers(self, requests: Sequence[Request], compiled: Callable[[Request], Answer]) -> list[Answer]:
        """In the order of the requests, begun in that order. `compiled`: how this process does it."""
        few = len(requests) <= MAX_KERNELS_WITHOUT_WORKER
        if few or not self.lock.acquire(blocking=False):  # another thread has the workers
            return [compiled(request) for request in requests]
        try:
            return self.shared(requests, compiled)
        finally:
            self.lock.release()

    def shared(self, requests: Sequence[Request], compiled: Callable[[Request], Answer]) -> list[Answer]:
        found: dict[int, Answer] = {}
        left = iter(range(len(requests)))
        turn = threading.Lock()

        def take() -> int | None:
            with turn:
                return next(left, None)

        def help_out(worker: Worker) -> None:
            while (place := take()) is not None:
                answer = worker.answer(requests[place])
                if answer is None:
                    return
                found[place] = answer

        workers = self.some(len(requests) - 1)
        idle = {worker for worker in workers if worker.is_ready}
        with ThreadPoolExecutor(max(len(workers), 1)) as pool:
            while True:
                for worker in [*idle, *(worker for worker in workers if worker.became_ready())]:
                    pool.submit(help_out, worker)
                idle.clear()
                if (place := take()) is None:
                    break
                found[place] = compiled(requests[place])
                kernels_done(len(found), len(requests))
        return [found[place] if place in found else compiled(requests[place]) for place in range(len(requests))]


WORKERS = Workers()
