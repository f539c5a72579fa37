"""Run Triton source on torch tensors: compiled on a GPU, in Triton's interpreter elsewhere.

The interpreter is for tests: it computes with NumPy, a program after the other.
"""

from __future__ import annotations

import functools
import linecache
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from ferrite.codegen.triton.emit import written
from ferrite.codegen.triton.float8 import FORMATS
from ferrite.codegen.triton.grouped import table_words
from ferrite.codegen.triton.interpreted import REPLACED, interpreter_mended
from ferrite.codegen.triton.launch import ALIGNMENT, FAILURE_WORDS, OPTIONS, LaunchConfig
from ferrite.ir import out_of_bounds
from ferrite.ir.kernel import Kernel


def run(kernel: Kernel, memory: Sequence[torch.Tensor], sizes: Sequence[int] = (), name: str = "kernel") -> None:
    """Run on this memory, in place: one flat tensor per pointer, all on one device."""
    made = written(kernel, name)
    start(made.source, made.launch, memory, sizes)


def start(source: str, launch: LaunchConfig, memory: Sequence[torch.Tensor], sizes: Sequence[int] = ()) -> None:
    """Run source with its launch. An index that points outside is the error that eager raises."""
    count = launch.instances(sizes)
    if count == 0:
        return
    device = memory[0].device
    interpreted = device.type == "cpu"
    function = loaded(source, launch.name, interpreted)
    failure = torch.zeros(FAILURE_WORDS, dtype=torch.int64, device=device)
    given = [each.view(torch.uint8) if each.dtype in FORMATS else each for each in memory]
    arguments = [*given, *sizes, *([failure] if launch.checks else [])]
    constants = launch.constants(sizes)
    if launch.rows:
        words = table_words([each.data_ptr() for each in memory], launch.rows)
        arguments, constants = [torch.tensor(words, device=device)], {ALIGNMENT: 1}
    with _mode(interpreted), nullcontext() if interpreted else torch.cuda.device(device):
        function[(count,)](*arguments, **constants, num_warps=launch.warps(sizes), **OPTIONS)
    number, value, extent, _ = failure.tolist() if launch.checks else (0, 0, 0, 0)
    if number:
        raise out_of_bounds(launch.checks[number - 1].complaint, value, extent)


@functools.lru_cache(maxsize=256)
def loaded(source: str, name: str, interpreted: bool) -> Any:
    """The function of a source. Its lines are kept where Triton looks for them."""
    file = f"<triton {name} {abs(hash(source)):x}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace: dict[str, Any] = {"__name__": f"ferrite_triton_{name}"}
    with _mode(interpreted):
        exec(compile(source, file, "exec"), namespace)
    if interpreted:
        namespace.update({name: made for name, made in REPLACED.items() if name in namespace})
    return namespace[name]


@contextmanager
def _mode(interpreted: bool) -> Iterator[None]:
    """Whether Triton interprets, for a while, whatever the environment says."""
    from triton import knobs

    with knobs.runtime.scope(), interpreter_mended() if interpreted else nullcontext():
        knobs.runtime.interpret = interpreted
        yield
