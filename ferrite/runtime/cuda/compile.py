"""Triton source to machine code, for a GPU that need not be here.

Nothing but Triton is needed, with the assembler that comes with it: no C compiler, no driver, no torch. So this file
can also be run by its path, as a process that compiles what it is asked to (see `ferrite.runtime.cuda.workers`).
"""

from __future__ import annotations

import base64
import contextlib
import json
import linecache
import os
import re
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

ENTRY = re.compile(r"\.visible\s+\.entry\s+(\w+)\s*\(([^)]*)\)")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)")
READY = "ready"
IDLE_SECONDS = 60
ALIGNED_BYTES = 16  # what Triton calls divisible
_lock = threading.Lock()  # over Triton's settings, which are a process's


def compiled(request: dict[str, Any]) -> dict[str, Any]:
    """`request`: the source, the name of its function, the types of all arguments in order ("constexpr" where it is one
    of `constants`), places of pointers that are always multiples of 16 bytes, options, the capability, how many bytes a
    program can share, and how many it has for descriptors. Gives the code, in base 64, and what a launch has to know;
    or `refusal`, where the GPU has not enough of something."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    with _lock, own_cache():
        function = function_of(request["source"], request["name"])
        names = function.arg_names
        source = ASTSource(
            function,
            dict(zip(names, request["types"], strict=True)),
            {(names.index(name),): value for name, value in request["constants"].items()},
            {(place,): [["tt.divisibility", ALIGNED_BYTES]] for place in request["aligned"]},
        )
        target = GPUTarget("cuda", request["capability"], 32)
        made = triton.compile(source, target=target, options=dict(request["options"]))
    metadata = made.metadata
    if getattr(metadata, "global_scratch_size", 0) > request.get("memory", 0):
        return {"refusal": "its code asks for memory of its own"}
    if getattr(metadata, "profile_scratch_size", 0):
        return {"refusal": "its code asks for memory to write profiles to"}
    if metadata.shared > request["shared"]:
        return {"refusal": f"a program would share {metadata.shared} bytes; this GPU has {request['shared']}"}
    return {
        "code": base64.b64encode(made.asm["cubin"]).decode(),
        "entry": metadata.name,
        "threads": 32 * metadata.num_warps,
        "shared": metadata.shared,
        "parameters": parameters(made.asm["ptx"]),
    }


def parameters(ptx: str) -> list[str]:
    """The types of a kernel's parameters, as the assembler sees them: what Triton adds to those of the source differs
    from version to version."""
    found = ENTRY.search(ptx)
    if found is None:
        raise ValueError("the assembly has no kernel")
    return PARAMETER.findall(found[2])


def function_of(source: str, name: str) -> Any:
    """The function of a source, compiled, not interpreted. Its lines are kept where Triton looks for them."""
    from triton import knobs

    file = f"<triton {name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"ferrite_{name}"}
    with knobs.runtime.scope():
        knobs.runtime.interpret = False
        exec(compile(source, file, "exec"), namespace)
    return namespace[name]


@contextlib.contextmanager
def own_cache() -> Iterator[None]:
    """Triton keeps every stage of every kernel in files. There is a cache for code elsewhere: these go at once."""
    from triton import knobs

    made = tempfile.TemporaryDirectory(prefix="ferrite-triton-", ignore_cleanup_errors=True)
    with made as folder, knobs.cache.scope():
        knobs.cache.dir = folder
        yield


def answered(request: dict[str, Any]) -> dict[str, Any]:
    """The same; what goes wrong is `error` in the answer."""
    try:
        return compiled(request)
    except Exception as problem:  # the process that asked tells its user
        return {"error": f"{type(problem).__name__}: {problem}"}


def serve() -> None:
    """Answers requests, one line of JSON each, until nobody asks any more."""
    import select

    import triton.compiler  # noqa: F401  # most of the time before the first answer

    with os.fdopen(os.dup(sys.stdout.fileno()), "w") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what anything else prints is no answer
        print(READY, file=answers, flush=True)
        while select.select([sys.stdin], [], [], IDLE_SECONDS)[0] and (line := sys.stdin.readline()):
            print(json.dumps(answered(json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    serve()
