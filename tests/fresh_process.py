"""Programs in processes that have compiled nothing yet.

Importing torch and ferrite takes five seconds, so it is done once: a server has imported them, and each process is a
fork of it. For tests of what imports do, `subprocess` it is.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from subprocess import CompletedProcess

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["torch", "torch._dynamo", "ferrite.backend", __name__])


class FreshProcess:
    """`python ARGUMENTS`, where these are `-c CODE` or a file and what it is given; it runs from now on."""

    def __init__(self, *arguments: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None) -> None:
        self.arguments = arguments
        self.folder = tempfile.TemporaryDirectory()
        self.files = [Path(self.folder.name, name) for name in ("stdout", "stderr")]
        place = os.getcwd() if cwd is None else str(cwd)
        environment = dict(os.environ if env is None else env)
        self.process = SERVER.Process(target=become, args=(arguments, environment, place, self.files))
        self.process.start()

    def result(self, timeout: float = 300) -> CompletedProcess[str]:
        """What it has printed, and its exit status; a process that hangs is killed."""
        self.process.join(timeout)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()
        printed = [file.read_text() if file.exists() else "" for file in self.files]
        self.folder.cleanup()
        assert self.process.exitcode is not None
        return CompletedProcess(self.arguments, self.process.exitcode, *printed)


def run_python(
    *arguments: str, env: Mapping[str, str] | None = None, cwd: str | Path | None = None
) -> CompletedProcess[str]:
    return FreshProcess(*arguments, env=env, cwd=cwd).result()


def become(arguments: Sequence[str], env: Mapping[str, str], cwd: str, files: Sequence[Path]) -> None:
    """Turn this process, a fork of the server, into the program that was asked for."""
    for stream, file in zip((1, 2), files, strict=True):
        os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT, 0o600), stream)
    sys.stdout, sys.stderr = (os.fdopen(stream, "w", buffering=1) for stream in (1, 2))
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    try:
        if arguments[0] == "-c":
            sys.argv = ["-c", *arguments[2:]]
            exec(compile(arguments[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv = list(arguments)
            sys.path.insert(0, str(Path(arguments[0]).parent))
            runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit:
        raise
    except BaseException:
        traceback.print_exc()
        sys.exit(1)
