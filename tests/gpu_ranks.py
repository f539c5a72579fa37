"""The programs of `tests/distributed`, each on ranks that are processes of their own, with the process groups that GPUs
have: NCCL, which takes one rank for each GPU; gloo and memory that ranks share, for which two ranks may have one GPU.

A rank that takes longer than it may prints where each of its threads is, and ends: nothing here waits for ever. What a
program prints on its way, and how long it was on it, is there when it fails.
"""

from __future__ import annotations

import datetime
import faulthandler
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.fresh_process import FreshProcess

Program = Callable[[int], Any]
PATIENCE = float(os.environ.get("RANKS_PATIENCE", "30"))  # seconds that a rank may take
NOT_IN_EAGER = 77  # how a rank ends that failed before anything was compiled
LOGS = os.environ.get("RANKS_LOGS")  # a folder for what ranks print, for a look at times and at hangs
OF_SEVERAL = ("random", "agreements")  # programs that say nothing on one rank
COMPILES = "eager was there; compiled from now on"
CODE = "from tests.gpu_ranks import main; main()"


@dataclass(frozen=True)
class Setting:
    """Some ranks with a process group of a kind, whose tensors are on a device. `shares_memory`: ranks read each
    other's memory."""

    backend: str
    ranks: int
    device: str = "cuda"
    shares_memory: bool = False


SETTINGS: Mapping[str, Setting] = {
    "nccl": Setting("nccl", 1),
    "gloo": Setting("gloo", 2),
    "shared memory": Setting("gloo", 2, shares_memory=True),
    "cpu": Setting("gloo", 2, "cpu"),
    "one on a cpu": Setting("gloo", 1, "cpu"),
}


# --- from outside -----------------------------------------------------------------------------------------------------


def assert_runs(setting: str, program: str, patience: float = PATIENCE) -> None:
    """A program that is eager's on each rank. Skipped is one that torch itself cannot run there, uncompiled: which
    raises on a rank before any has compiled it."""
    with tempfile.TemporaryDirectory() as folder:
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "RANKS_FOLDER": folder, "RANKS_PATIENCE": str(patience)}
        env |= {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "FERRITE_CACHE": "0"}
        ranks = range(SETTINGS[setting].ranks)
        children = [FreshProcess("-c", CODE, setting, program, str(rank), env=env) for rank in ranks]
        ends = [child.result(patience + 20) for child in children]
    text = "\n".join(f"--- rank {rank}: {end.returncode}\n{end.stderr}" for rank, end in enumerate(ends))
    codes = [end.returncode for end in ends]
    if LOGS is not None:
        Path(LOGS, f"{setting}, {program}.txt".replace("/", "-")).write_text(text)
    if NOT_IN_EAGER in codes and COMPILES not in text:
        pytest.skip(f"torch itself cannot: {text[-2000:]}")
    assert not any(codes), text[-20_000:]


# --- on a rank --------------------------------------------------------------------------------------------------------


def main() -> None:
    from ferrite.runtime.cuda import workers

    name, program, number = sys.argv[1:4]
    setting, rank, patience = SETTINGS[name], int(number), float(os.environ["RANKS_PATIENCE"])
    workers.MAX_WORKERS = 2  # many ranks of many programs compile side by side
    faulthandler.enable()
    faulthandler.dump_traceback_later(patience, exit=True)
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"{time.perf_counter() - begin:6.2f} s  {what}", file=sys.stderr, flush=True)

    # long before the others give up, so that whoever waits for a rank that failed says so itself
    join(setting, rank, patience / 2)
    if setting.backend == "gloo" and setting.device == "cuda":
        gather_on_the_cpu()
    say(f"{setting.backend} of {setting.ranks}, on {setting.device}; group {dist.group.WORLD.group_name}")
    torch.manual_seed(0)
    compiles: list[Any] = []
    compile = torch.compile

    def noted(function: Any = None, **how: Any) -> Any:
        if not compiles:
            say(COMPILES)
        compiles.append(function)
        return compile(function, **how)

    torch.compile = noted
    try:
        programs(setting)[program](rank)
        say("compared with eager")
    except BaseException:
        traceback.print_exc()
        say("failed")
        sys.stderr.flush()
        os._exit(1 if compiles else NOT_IN_EAGER)
    if setting.device == "cuda":
        torch.cuda.synchronize()
        say("the GPU is idle")
    if not setting.shares_memory:  # torch has no way to give that memory back in order
        dist.destroy_process_group()
        say("the process group is gone")
        return
    dist.barrier()
    os._exit(0)


def join(setting: Setting, rank: int, seconds: float) -> None:
    if setting.device == "cuda":
        torch.cuda.set_device(0)
    torch.set_default_device(setting.device)
    store = dist.FileStore(os.path.join(os.environ["RANKS_FOLDER"], "store"), setting.ranks)  # type: ignore[attr-defined]
    limit = datetime.timedelta(seconds=seconds)
    if setting.ranks == 1:
        store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group(setting.backend, rank=rank, world_size=setting.ranks, store=store, timeout=limit)
    if setting.shares_memory:
        import warnings

        from torch.distributed._symmetric_memory import enable_symm_mem_for_group

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(dist.group.WORLD.group_name)
    dist.barrier()


_library = torch.library.Library("_c10d_functional", "IMPL")


def gather_on_the_cpu() -> None:
    """Torch 2.11 dies of a segmentation fault where gloo gathers tensors that are on a GPU by a functional operator,
    in eager, too. From here on such tensors are gathered on the CPU."""
    functional = torch.ops._c10d_functional

    def together(inputs: list[torch.Tensor], ranks: int, group: str) -> list[torch.Tensor]:
        given = functional.all_gather_into_tensor_coalesced([each.cpu() for each in inputs], ranks, group)
        return [functional.wait_tensor(each).to(inputs[0].device) for each in given]

    def alone(x: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
        return functional.wait_tensor(functional.all_gather_into_tensor(x.cpu(), ranks, group)).to(x.device)

    def into(x: torch.Tensor, ranks: int, group: str, *, out: torch.Tensor) -> torch.Tensor:
        return out.copy_(alone(x, ranks, group))

    for name, kernel in {"": alone, "_out": into, "_coalesced": together}.items():
        _library.impl(f"all_gather_into_tensor{name}", kernel, "CUDA")


# --- programs ---------------------------------------------------------------------------------------------------------


def programs(setting: Setting) -> Mapping[str, Program]:
    """Those that say something in a setting."""
    found = shared_memory_programs() if setting.shares_memory else all_programs()
    return {**found, "hangs": hangs, "fails": fails}


def names(setting: str) -> list[str]:
    found = SETTINGS[setting]
    listed = shared_memory_programs() if found.shares_memory else all_programs()
    return [name for name in listed if found.ranks > 1 or not name.startswith(OF_SEVERAL)]


def all_programs() -> dict[str, Program]:
    """First those with lists of tensors, in place, and of whole layers."""
    from tests.distributed import test_contracts as contracts
    from tests.distributed import test_data_parallel_training as data_parallel
    from tests.distributed import test_model_parallel_training as model_parallel
    from tests.distributed import test_random_graphs as random_graphs
    from tests.distributed.test_two_ranks import STYLES, assert_same
    from tests.distributed.training import of_one_layer

    found: dict[str, Program] = {}
    operations = {**random_graphs.FORWARD, **random_graphs.TRAINING}
    for name in operations:
        found[f"operation {name}"] = one_operation(name)
    for name, program in model_parallel.PROGRAMS.items():
        if "pipeline" not in name and "uneven" not in name:
            found[name] = of_one_layer(program)
    for name, program in data_parallel.PROGRAMS.items():
        found[name] = of_one_layer(program)
    for style, settings in {"auto": "auto", **STYLES}.items():
        found[f"every kind, {style}"] = lambda rank, settings=settings: assert_same(settings, rank)
    found["agreements"] = contracts.same_collectives_otherwise_bound
    found |= rule_programs()
    for seed in range(4):
        found[f"random {seed}"] = random_graphs.check([seed])
    found["a CUDA graph beside collectives"] = recorded_beside_collectives
    found["several groups, made late"] = groups_made_late
    return found


def rule_programs() -> dict[str, Program]:
    from tests.distributed.rule_programs import NEAR_MISSES, PROGRAMS
    from tests.distributed.test_passes_on_ranks import work

    chosen = [each for each in (*PROGRAMS, *NEAR_MISSES) if not each.has_memory]
    return {f"rule {each.name}": must_fire(work(each), each) for each in chosen}


def shared_memory_programs() -> dict[str, Program]:
    from tests.distributed.rule_programs import PROGRAMS
    from tests.distributed.test_passes_on_ranks import work
    from tests.distributed.test_shared_memory import on_gpus

    chosen = [each for each in PROGRAMS if each.has_memory or "async_tp" in each.distributed]
    found = {f"rule {each.name}": must_fire(work(each, in_test_mode=False), each) for each in chosen}
    return found | on_gpus()


def must_fire(program: Program, described: Any) -> Program:
    """On ranks that exchange data, what a program is there to show happens, too."""

    def run(rank: int) -> None:
        fired = program(rank)
        if dist.get_world_size() > 1:
            assert fired >= set(described.fires)
            assert fired.isdisjoint(described.not_here)

    return run


def one_operation(name: str) -> Program:
    """One collective with a gradient, or without, and something to compute before and after it."""
    from tests.distributed import test_random_graphs as random_graphs

    is_training = name not in random_graphs.FORWARD
    operation, many = (random_graphs.TRAINING if is_training else random_graphs.FORWARD)[name]

    def run(rank: int) -> None:
        from tests.compare import compile_strict, reset

        group = dist.group.WORLD.group_name

        def fn(*inputs: torch.Tensor) -> list[torch.Tensor]:
            return [torch.sin(operation(*(torch.cos(each) for each in inputs[:many]), group))]

        def inputs() -> list[torch.Tensor]:
            draws = torch.Generator("cpu").manual_seed(rank)
            side = random_graphs.SIDE
            drawn = [torch.randn(side, side, generator=draws, device="cpu") for _ in range(2)]
            return [each.to(torch.get_default_device()) for each in drawn]

        program = random_graphs.Program((), (), is_training)
        wanted = random_graphs.results(fn, program, inputs())
        reset()
        compiled = compile_strict(fn)
        near = 4e-3 if "halves" in name else 1e-4
        for _ in range(3):
            found = random_graphs.results(compiled, program, inputs())
            for mine, theirs in zip(found, wanted, strict=True):
                torch.testing.assert_close(mine, theirs, rtol=near, atol=near)

    return run


def recorded_beside_collectives(rank: int) -> None:
    """Parts of a program are recorded while collectives are on their way, and replayed."""
    from tests.compare import compile_strict, reset
    from tests.distributed.programs import gathered, reduced

    def fn(x: torch.Tensor, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        whole = gathered(p, ranks=dist.get_world_size())
        for _ in range(4):
            x = torch.nn.functional.gelu(x @ p.t()).softmax(-1) @ p + x
        y = x @ whole.t()
        total = reduced(y.sum(0))
        for _ in range(4):
            x = torch.nn.functional.gelu(x @ p.t()).softmax(-1) @ p + x
        return total, x

    x, p = torch.randn(16, 32), torch.randn(32, 32) / 8
    wanted = fn(x, p)
    reset()
    compiled = compile_strict(fn, options={"cuda_graphs": x.is_cuda})
    for _ in range(5):
        for mine, theirs in zip(compiled(x, p), wanted, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)


def groups_made_late(rank: int) -> None:
    """Process groups that are made after the first program has run, and are gone before the last."""
    from tests.compare import compile_strict, reset
    from tests.distributed.programs import reduced

    for _ in range(3):
        group = dist.new_group(list(range(dist.get_world_size())))

        def fn(x: torch.Tensor, name: str = group.group_name) -> torch.Tensor:
            return reduced(torch.sin(x), group=name) + reduced(torch.cos(x))

        x = torch.randn(8, 8)
        wanted = fn(x)
        reset()
        torch.testing.assert_close(compile_strict(fn)(x), wanted)
        dist.destroy_process_group(group)


def hangs(rank: int) -> None:
    """For the tests of this file: one rank never comes."""
    torch.compile(torch.sin, backend="ferrite")(torch.ones(3))
    a_place_to_hang_at(rank)


def a_place_to_hang_at(_rank: int) -> None:
    time.sleep(3600)


def fails(rank: int) -> None:
    raise RuntimeError(f"rank {rank} cannot")
