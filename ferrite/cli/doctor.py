"""`python -m ferrite doctor`: what this machine has, each item ok or with what to do."""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table

from ferrite import __version__
from ferrite.cache import Unusable, full_path, make_folders
from ferrite.cli import specs
from ferrite.cli.compile import find
from ferrite.errors import Refusal, UserError
from ferrite.options import Options, resolve
from ferrite.runtime.cuda import libcuda
from ferrite.targets import reason_against_gpus

Verdict = Literal["ok", "note", "bad"]
STYLES = {"ok": "green", "note": "yellow", "bad": "red"}


@dataclass(frozen=True)
class Examined:
    """One item: `bad` means that ferrite cannot compile here until `advice` is followed."""

    item: str
    verdict: Verdict
    found: str
    advice: str = ""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check what this machine has",
        description="Check torch, LLVM, the CPU, threads, GPU and Triton, and the cache folder; with MODULE:CALLABLE "
        "and arguments also what becomes of a model. Exits with 1 if something keeps ferrite from compiling here.",
        epilog=specs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "target", metavar="MODULE:CALLABLE", nargs="?", help="look at this model too: what becomes of it, what to try"
    )
    parser.add_argument("arguments", metavar="ARG", nargs="*", help="f32[8,16], i64[4]<100, 3, None, ...")
    parser.add_argument("--train", action="store_true", help="its backward, too")
    parser.set_defaults(run=run)


def run(chosen: argparse.Namespace) -> int:
    findings = list(examine())
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column in ("", "item", "found", "what to do"):
        table.add_column(column, overflow="fold")
    for finding in findings:
        style = STYLES[finding.verdict]
        table.add_row(f"[{style}]{finding.verdict}[/]", finding.item, finding.found, finding.advice)
    Console(highlight=False).print(table)
    bad = any(finding.verdict == "bad" for finding in findings)
    if chosen.target is not None and not bad:
        bad = not examine_model(chosen)
    return 1 if bad else 0


def examine_model(chosen: argparse.Namespace) -> bool:
    """Print what becomes of a model, and whether all of it is compiled."""
    import torch

    from ferrite.diagnosis import explain

    torch.manual_seed(0)
    model = find(chosen.target)
    inputs = [specs.parse_argument(text, requires_grad=chosen.train) for text in chosen.arguments]
    if not chosen.train and isinstance(model, torch.nn.Module):
        model.eval()
    with torch.set_grad_enabled(chosen.train):
        found = explain(model, *inputs)
    print(f"\n{chosen.target}\n{found}")
    return not any(graph.failure for record in found.records for graph in record.graphs)


def examine() -> Iterator[Examined]:
    """Every check, one after the other; a check that itself breaks is a finding too."""
    checks: tuple[Callable[[], Examined], ...] = (
        check_ferrite,
        check_python,
        check_torch,
        check_backend,
        check_llvm,
        check_cpu,
        check_threads,
        check_gpu,
        check_triton,
        check_cache,
    )
    for check in checks:
        try:
            yield check()
        except Exception as problem:
            yield Examined(check.__name__.removeprefix("check_"), "bad", f"{type(problem).__name__}: {problem}")


def check_ferrite() -> Examined:
    return Examined("ferrite", "ok", f"{__version__} in {os.path.dirname(os.path.dirname(__file__))}")


def check_python() -> Examined:
    return Examined("python", "ok", f"{platform.python_version()} on {platform.system()} {platform.machine()}")


def check_torch() -> Examined:
    import torch

    from ferrite.capture import check_torch_version, span

    try:
        warning = check_torch_version()
    except UserError as error:
        return Examined("torch", "bad", error.headline, error.lines["to change that"])
    if warning is not None:
        return Examined("torch", "note", torch.__version__, f"newer than tested ({span()}): report what breaks")
    return Examined("torch", "ok", torch.__version__)


def check_backend() -> Examined:
    found = importlib.metadata.entry_points(group="torch_dynamo_backends", name="ferrite")
    if not found:
        advice = 'pip install ferrite, or use ferrite.compile(...) in place of backend="ferrite"'
        return Examined("backend", "note", "not registered with torch.compile", advice)
    return Examined("backend", "ok", 'torch.compile(..., backend="ferrite") finds it')


def check_llvm() -> Examined:
    try:
        from llvmlite import binding
    except ImportError as problem:
        return Examined("LLVM", "note", str(problem), "pip install llvmlite: CPU kernels run in eager without it")
    version = ".".join(map(str, binding.llvm_version_info))
    return Examined("LLVM", "ok", f"{version} in llvmlite {importlib.metadata.version('llvmlite')}")


def check_cpu() -> Examined:
    try:
        from llvmlite import binding
    except ImportError:
        return Examined("CPU", "note", platform.machine(), "its features are read through llvmlite")
    features = binding.get_host_cpu_features()
    known = ("neon", "sve", "bf16", "fullfp16", "avx2", "avx512f", "avx512bf16", "amx-tile", "fma")
    have = [name for name in known if features.get(name)]
    return Examined("CPU", "ok", f"{binding.get_host_cpu_name()}: {' '.join(have) or 'no vector features known to us'}")


def check_threads() -> Examined:
    import torch

    threads, cores = torch.get_num_threads(), os.cpu_count() or 1
    if threads > cores:
        return Examined("threads", "note", f"{threads} on {cores} cores", f"torch.set_num_threads({cores})")
    return Examined("threads", "ok", f"{threads} on {cores} cores")


def check_gpu() -> Examined:
    import torch

    if torch.version.cuda is None and torch.version.hip is None:
        return Examined("GPU", "ok", "none: this torch is a CPU build")
    if not torch.cuda.is_available():
        return Examined("GPU", "note", "torch has GPU support but sees no device", "check the driver: nvidia-smi")
    names = [gpu_text(torch.cuda.get_device_properties(index)) for index in range(torch.cuda.device_count())]
    amd = Refusal("kernels are made for GPUs of NVIDIA") if torch.version.hip is not None else None
    if (refusal := amd or reason_against_gpus()) is not None:
        return Examined("GPU", "note", "; ".join(names), f"graphs on it run operator by operator: {refusal.reason}")
    return Examined("GPU", "ok", f"{'; '.join(names)}; driver for CUDA {libcuda().version() / 1000:.1f}")


def gpu_text(properties: Any) -> str:
    """`NVIDIA H200, compute 9.0, 132 multiprocessors, 140 GiB`"""
    return (
        f"{properties.name}, compute {properties.major}.{properties.minor}, "
        f"{properties.multi_processor_count} multiprocessors, {properties.total_memory / 2**30:.0f} GiB"
    )


def check_triton() -> Examined:
    import torch

    try:
        version = importlib.metadata.version("triton")
    except importlib.metadata.PackageNotFoundError:
        if torch.cuda.is_available():
            return Examined("Triton", "note", "not installed", "pip install triton: GPU code runs in eager without it")
        return Examined("Triton", "ok", "not installed, and not needed without a GPU")
    importlib.import_module("triton")
    return Examined("Triton", "ok", version)


def check_cache(options: Options | None = None) -> Examined:
    folder = (options or resolve()).cache_folder()
    advice = "set FERRITE_CACHE_DIR to a folder of your own; without one nothing is kept between runs"
    try:
        make_folders([full_path(folder)])
        with tempfile.TemporaryFile(dir=folder):
            pass
    except Unusable as problem:
        fact, semicolon, command = str(problem).partition("; to change that: ")
        return Examined("cache", "note", fact, command if semicolon else advice)
    except OSError as problem:
        return Examined("cache", "note", f"{folder}: {problem.strerror or problem}", advice)
    return Examined("cache", "ok", f"{folder}, {shutil.disk_usage(folder).free / 2**30:.1f} GiB free")
