"""The components of keys: what compiled code depends on beside the graph, and the keys themselves.

captured_key  a graph of torch calls, before the passes that run on it
joint_key     forward and backward in one graph, before the passes that run on it
graph_key     a captured graph, before the stages that are still to run
kernel_key    one kernel as text
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ferrite.cache.graph_text import GraphText, contents
from ferrite.cache.identities import identity
from ferrite.cache.key import Key, digest_of
from ferrite.cache.store import DIGEST, EntryStore
from ferrite.cache.text_for_passes import captured_text, joint_text
from ferrite.capture import (
    CapturedGraph,
    GraphKind,
    has_arm_compute_library,
)
from ferrite.errors import NotCached
from ferrite.machines import thread_counts
from ferrite.options import FIELDS, TYPES, Options, plain

# Settings that ask for the stages themselves to run, and why.
NOT_WITH = {
    "dump_dir": "every stage is to be written down",
    "check_numerics": "the graph is to be checked while it is compiled",
    "fail_at": "a stage is to fail",
    "fuel": "rewrites are being counted",
}


def graph_key(
    graph: CapturedGraph,
    options: Options,
    *,
    target: str,
    sources: str,
    more: Mapping[str, str] | None = None,
) -> Key:
    """The key of what a graph compiles to. `target` describes the processor, with everything that code is chosen by;
    `sources` is `source_digest()`; `more` holds what else is baked in, such as a number of threads.

    NotCached says why there is none.
    """
    check_options(options)
    text = GraphText()
    text.add(graph.gm)
    looks = {f"input {place}": each + handed_over(graph, place) for place, each in enumerate(text.inputs)}
    strides = [None if each is None else [text.size(stride) for stride in each] for each in graph.output_strides]
    return Key.of(
        "graph",
        {
            "direction": graph.kind.value,
            **text.components(),
            "parameters": " ".join(contents(graph.parameters[place].tensor) for place in sorted(graph.parameters)),
            "strides": str(strides),
            **looks,
            **option_components(options),
            **dict(own_passes(options, stages_for(graph.kind))),
            **ambient(),
            **versions(target, sources),
            **(more or {}),
        },
    )


def captured_key(gm: torch.fx.GraphModule, options: Options, *, sources: str) -> Key:
    """The key of what the pre-grad passes make of a graph of torch calls."""
    check_options(options)
    return Key.of("captured", {**captured_text(gm), **around_passes("pre_grad", options, sources)})


def joint_key(gm: torch.fx.GraphModule, options: Options, *, sources: str) -> Key:
    """The key of what the joint passes make of a graph of forward and backward."""
    check_options(options)
    return Key.of("joint", {**joint_text(gm), **around_passes("joint", options, sources)})


def around_passes(stage: str, options: Options, sources: str) -> dict[str, str]:
    """What a stage of passes depends on beside the graph. They look at no processor."""
    return {
        **option_components(options),
        **dict(own_passes(options, (stage,))),
        **ambient(),
        "gradients": str(torch.is_grad_enabled()),
        "autocast": "; ".join(map(autocast, ("cpu", "cuda"))),
        **versions("any", sources),
    }


def check_options(options: Options) -> None:
    for name, reason in NOT_WITH.items():
        if getattr(options, name) != FIELDS[name].default:
            raise NotCached(f"{reason} (option {name})")


def autocast(device: str) -> str:
    if not torch.is_autocast_enabled(device):
        return f"{device} off"
    return f"{device} {torch.get_autocast_dtype(device)} cache {torch.is_autocast_cache_enabled()}"


def kernel_key(text: str, *, target: str, sources: str, more: Mapping[str, str] | None = None) -> Key:
    """The key of the object code of one kernel, by its canonical text."""
    return Key.of("kernel", {"text": digest_of(text), **versions(target, sources), **(more or {})})


def handed_over(graph: CapturedGraph, place: int) -> str:
    static, donated = place in graph.static_inputs, place in graph.donated_inputs
    return (" static" if static else "") + (" donated" if donated else "")


def option_components(options: Options) -> dict[str, str]:
    """The settings that change code and are not at their defaults. Callables have components of their own."""
    return {
        f"option {name}": repr(plain(value))
        for name, value in options.code_key()
        if value != FIELDS[name].default and not holds_callables(name)
    }


def holds_callables(name: str) -> bool:
    return TYPES[name] is Any or TYPES[name] == tuple[Any, ...]


def stages_for(kind: GraphKind) -> tuple[str, ...]:
    """The stages that are still to run; earlier ones show in the graph."""
    return ("joint", "freeze", "post_grad") if kind is GraphKind.INFERENCE else ("post_grad",)


def own_passes(options: Options, stages: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The identities of users' passes in some stages."""
    for place, step in enumerate(options.passes):
        if step.stage in stages:
            facts = f"{step.stage} {step.after} {step.before} {step.scope} {step.device} {step.required}"
            facts += " with collectives" if step.with_collectives else ""
            yield f"pass {step.name}", f"{place} {facts} {identity(step.function)}"
    for name in FIELDS:
        if TYPES[name] is Any and name.startswith(stages):
            for place, hook in enumerate(getattr(options, name)):
                yield f"option {name} {place}", identity(hook)


def ambient() -> dict[str, str]:
    """State of torch that rewrites, lowering or the library calls in compiled code look at."""
    backends: Any = torch.backends
    cuda, cudnn, mkldnn = backends.cuda.matmul, backends.cudnn, backends.mkldnn
    filling: Any = torch.utils.deterministic
    precision = {
        "float32": torch.get_float32_matmul_precision,
        "cuda": lambda: cuda.fp32_precision,
        "cuda fp16": lambda: cuda.allow_fp16_reduced_precision_reduction,
        "cuda bf16": lambda: cuda.allow_bf16_reduced_precision_reduction,
        "cudnn tf32": lambda: cudnn.allow_tf32,
        "mkldnn": lambda: mkldnn.matmul.fp32_precision,
    }
    deterministic = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        filling.fill_uninitialized_memory,
        cudnn.deterministic,
    )
    return {
        "default dtype": str(torch.get_default_dtype()),
        "deterministic": " ".join(map(str, deterministic)),
        "precision": ", ".join(f"{name} {answered(ask)}" for name, ask in precision.items()),
        "libraries": f"cudnn {cudnn.enabled}, mkldnn {mkldnn.enabled}",
        "cores": str(has_arm_compute_library() and thread_counts.works_with_all_of_few_cores()),
        "few threads": str(thread_counts.has_few_threads()),
        "inference mode": str(torch.is_inference_mode_enabled()),
    }


def answered(ask: Callable[[], Any]) -> str:
    """torch refuses to answer through its old settings once a new one was used."""
    try:
        return str(ask())
    except (RuntimeError, AttributeError):
        return "unanswered"


def versions(target: str, sources: str) -> dict[str, str]:
    import ferrite

    return {
        "ferrite": ferrite.__version__,
        "sources": sources,
        "torch": f"{torch.__version__} {torch.version.git_version}",
        "llvm": llvm_version(),
        "python": f"{sys.implementation.cache_tag} {platform.python_version()}",
        "system": f"{platform.system()} {platform.machine()}",
        "target": target,
    }


@functools.lru_cache
def llvm_version() -> str:
    """The version of llvmlite, which brings its own LLVM: known without loading either."""
    try:
        return f"llvmlite {importlib.metadata.version('llvmlite')}"
    except importlib.metadata.PackageNotFoundError:
        return "none"


# --- ferrite's own sources --------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=8)
def source_digest(store: EntryStore | None = None) -> str:
    """A digest of ferrite's sources. Reading them all takes as long as a warm start may, so it is remembered in the
    store under what the file system says of them: any change to a file gives it another time or another number."""
    folder = Path(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    files = sorted(python_files(folder), key=lambda item: item.path)
    stats = [(item.path, item.stat()) for item in files]
    seen = [f"{path} {at.st_size} {at.st_mtime_ns} {at.st_ctime_ns} {at.st_ino} {at.st_dev}" for path, at in stats]
    key = Key.of("sources", {"files": digest_of("\n".join(seen))})
    entry = store.fetch(key) if store is not None else None
    found = None if entry is None else entry.metadata.get("digest")
    if isinstance(found, str) and DIGEST.fullmatch(found):  # else what was kept is no digest, and is made anew
        return found
    texts = [f"{Path(item.path).relative_to(folder)} {digest_of(Path(item.path).read_bytes())}" for item in files]
    digest = digest_of("\n".join(texts))
    if store is not None:
        store.publish(key, {}, {"digest": digest})
    return digest


def python_files(folder: Path) -> Iterator[os.DirEntry[str]]:
    with os.scandir(folder) as items:
        for item in items:
            if item.is_dir() and item.name != "__pycache__":
                yield from python_files(Path(item.path))
            elif item.name.endswith(".py"):
                yield item
