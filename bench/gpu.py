"""Kernels, launches and models on a GPU: eager, Inductor and ferrite, turn by turn in one process.

    python -m bench.gpu [kernels] [launches] [optimizer] [models] [fresh] [dynamic]
                        [--only PATTERN ..] [--seconds 60]
    python -m bench.gpu kernels --size large --backends eager ferrite "ferrite, dynamic"

Kernels: see `bench/gpu_kernels.py`. Launches: what a run of many small kernels costs, on the host and until it is done.
Optimizer: the step of one over the parameters of BERT, as microseconds on the host and until it is done, with the
launches that take part in it. Models: milliseconds of a forward pass, or of forward and backward, until done; with what
compiling took, the most memory beyond the model, and what the host launches. Compiling Inductor takes minutes: `models
--compile-only` in several processes at once fills the caches first. Fresh: what compiling takes in a process of its
own, with empty caches and with full ones, and the most memory of a step (`bench/gpu_fresh.py`). Dynamic: kernels for
any sizes beside those for the sizes at hand. Writes gpu-NAME.json and gpu-NAME.md.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from bench.gpu_fresh import dynamic, fresh
from bench.gpu_kernels import DEVICE, ROUNDS, SIZES, Clock, Function, backends_for, compiled, kernels, median

RESULTS = Path(__file__).parent / "results"
BACKENDS = ("eager", "inductor", "ferrite")


# --- launches ---------------------------------------------------------------------------------------------------------


def host_and_total(function: Callable[[], Any], count: int = 100) -> tuple[float, float]:
    """Microseconds of a call: until Python goes on, and until the GPU is done."""
    for _ in range(10):
        function()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        function()
    host = time.perf_counter()
    torch.cuda.synchronize()
    return (host - start) / count * 1e6, (time.perf_counter() - start) / count * 1e6


def apart(count: int) -> tuple[Function, list[torch.Tensor]]:
    """Independent kernels, of different sizes so that none becomes part of another: each has a tensor of its own, which
    the host asks for its address, and a result, which the host makes."""
    given = [torch.randn(1024 + 64 * place, device=DEVICE) for place in range(count)]
    return lambda *tensors: [tensor.cos() + place for place, tensor in enumerate(tensors)], given


def chain(count: int) -> tuple[Function, list[torch.Tensor]]:
    """Each kernel needs all of what the last one made: sums along rows, then along columns. One tensor comes in, one
    goes out, so that launching is all there is for the host to do."""

    def function(x: torch.Tensor) -> list[torch.Tensor]:
        for place in range(count):
            x = x.cumsum(place % 2) * 0.125
        return [x]

    return function, [torch.randn(256, 256, device=DEVICE)]  # of fewer elements all would be one kernel


def at_new_addresses(function: Function, given: Sequence[torch.Tensor]) -> Callable[[], None]:
    """A call with other inputs than the last one, while its results are still held."""
    inputs = itertools.cycle([given, [each.clone() for each in given]])
    held: deque[Any] = deque(maxlen=2)
    return lambda: held.append(function(*next(inputs)))


def measured_launches(function: Function, given: Sequence[torch.Tensor]) -> list[float]:
    return [round(each, 1) for each in host_and_total(at_new_addresses(function, given))]


def captured_launches(function: Function, given: Sequence[torch.Tensor]) -> Any:
    """The same as one CUDA graph with fixed addresses, by torch's own means: what is left is the time of the GPU."""
    found, notes = backends_for(function, given, ("ferrite",))
    if not found:
        return notes
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = found["ferrite"](*given)
    numbers = [round(each, 1) for each in host_and_total(graph.replay)]
    del kept
    return numbers


def launches(chosen: argparse.Namespace) -> dict[str, Any]:
    rows = []
    for name, make, counts in (("apart", apart, (1, 2, 3, 4, 8, 16, 32, 100)), ("a chain", chain, (8, 32, 100))):
        for count in counts:
            function, given = make(count)
            row: dict[str, Any] = {"kernels": f"{count}, {name}"}
            for mode, least in (("ferrite, one by one", 1 << 30), ("ferrite, a graph", 1)):
                row[mode] = with_graphs_from(least, function, given)
            row["ferrite, captured"] = captured_launches(function, given)
            for backend in chosen.backends:
                if backend != "ferrite" and (backend == "eager" or count <= 32):
                    found, notes = backends_for(function, given, (backend,))
                    row[backend] = found and measured_launches(found[backend], given)
                    row["notes"] = notes
            rows.append(row)
            print(row, flush=True)
    return {"rows": rows}


def with_graphs_from(least: int, function: Function, given: Sequence[Any]) -> Any:
    from ferrite.runtime.cuda import runs

    machine = dataclasses.replace(runs.gpu_machine(), min_graph_launches=least)
    with mock.patch.object(runs, "gpu_machine", return_value=machine):
        found, notes = backends_for(function, given, ("ferrite",))
        return measured_launches(found["ferrite"], given) if found else notes


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": functools.partial(torch.optim.Adam, lr=1e-3),
    "AdamW": functools.partial(torch.optim.AdamW, lr=1e-3),
    "SGD, momentum": functools.partial(torch.optim.SGD, lr=1e-3, momentum=0.9),
}
STEPS: dict[str, tuple[str, dict[str, bool]]] = {
    "eager, one by one": ("eager", {"foreach": False}),
    "eager, foreach": ("eager", {"foreach": True}),
    "eager, fused": ("eager", {"fused": True}),
    "inductor": ("inductor", {}),
    "ferrite": ("ferrite", {}),
}


def bert_parameters(hidden: int = 768, layers: int = 12) -> list[tuple[int, ...]]:
    sizes: list[tuple[int, ...]] = [(VOCABULARY, hidden), (512, hidden), (2, hidden), (hidden,), (hidden,)]
    for _ in range(layers):
        sizes += [(hidden, hidden), (hidden,)] * 4 + [(hidden,), (hidden,)]
        sizes += [(4 * hidden, hidden), (4 * hidden,), (hidden, 4 * hidden), (hidden,), (hidden,), (hidden,)]
    return [*sizes, (hidden, hidden), (hidden,)]


def optimizer(chosen: argparse.Namespace) -> dict[str, Any]:
    rows: list[dict[str, Any]] = []
    clock, began = Clock(), time.perf_counter()
    bandwidth = clock.copy_bandwidth()
    for name, make in OPTIMIZERS.items():
        for model, sizes in {"BERT": bert_parameters(), "a small BERT": bert_parameters(128, 12)}.items():
            if chosen.only and not any(pattern in f"{name} over {model}" for pattern in chosen.only):
                continue
            if time.perf_counter() - began > chosen.seconds:
                break
            row: dict[str, Any] = {"optimizer": name, "parameters of": model, "notes": {}}
            moved = 0
            for way, (backend, more) in STEPS.items():
                if backend not in chosen.backends:
                    continue
                torch._dynamo.reset()
                parameters = [torch.nn.Parameter(torch.randn(size, device=DEVICE)) for size in sizes]
                for parameter in parameters:
                    parameter.grad = torch.randn_like(parameter)
                state = make(parameters, **more)
                start = time.perf_counter()
                try:
                    step = compiled(step_of(state), backend)
                    for _ in range(3):  # the first call makes the state, and another graph may be made for what is then
                        step()
                    torch.cuda.synchronize()
                except Exception as problem:
                    row["notes"][way] = f"{type(problem).__name__}: {str(problem)[:200]}"
                    continue
                row["notes"][way] = round(time.perf_counter() - start, 2)
                numbers = [round(each, 1) for each in host_and_total(step, 50)]
                on_gpu = median([clock.microseconds(step, ()) for _ in range(ROUNDS)])
                row[way] = [*numbers, round(on_gpu, 1), launches_of(step)]
                moved = 4 * sum(map(torch.Tensor.numel, parameters)) * (5 if "SGD" in name else 7)
                del state, step, parameters
            row["limit"] = round(moved / bandwidth * 1e6, 1)
            rows.append(row)
            print(row, flush=True)
    return {
        "each": "microseconds of the host / until done, 50 in a row / on the GPU / kernels on the GPU",
        "rows": rows,
    }


def step_of(state: torch.optim.Optimizer) -> Callable[[], Any]:
    return lambda: state.step()


def launches_of(step: Callable[[], Any]) -> int:
    """Kernels that the GPU runs in one step."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    return sum(event.count for event in seen.key_averages() if event.self_device_time_total > 0)


# --- models -----------------------------------------------------------------------------------------------------------

WAYS: dict[str, tuple[str, str | None]] = {
    "eager": ("eager", None),
    "inductor": ("inductor", None),
    "inductor, reduce-overhead": ("inductor", "reduce-overhead"),
    "ferrite": ("ferrite", None),
    "ferrite, reduce-overhead": ("ferrite", "reduce-overhead"),
}
VOCABULARY = 30522


def words(batch: int, length: int, *names: str) -> dict[str, torch.Tensor]:
    return {name: torch.randint(4, VOCABULARY, (batch, length), device=DEVICE) for name in names}


def images(batch: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 224, 224, device=DEVICE)}


def padded(batch: int, length: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(batch, length, dtype=torch.long, device=DEVICE)
    mask[-1, length - 16 :] = 0
    return {**words(batch, length, "input_ids"), "attention_mask": mask}


def model_cases() -> dict[str, tuple[Callable[[], torch.nn.Module], Callable[[], dict[str, torch.Tensor]]]]:
    """The sizes that people know these by; random weights, nothing is downloaded. Dropout is as each has it."""
    import os

    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers as hf

    text = {"vocab_size": VOCABULARY, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False}
    small = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "intermediate_size": 2048}
    return {
        "bert": (lambda: hf.BertModel(hf.BertConfig()), lambda: padded(16, 128)),
        "gpt2": (lambda: hf.GPT2LMHeadModel(hf.GPT2Config(**text)), lambda: words(8, 256, "input_ids")),
        "llama": (lambda: hf.LlamaForCausalLM(hf.LlamaConfig(**text, **small)), lambda: words(8, 256, "input_ids")),
        "t5": (
            lambda: hf.T5ForConditionalGeneration(hf.T5Config(use_cache=False, decoder_start_token_id=0)),
            lambda: words(16, 128, "input_ids", "decoder_input_ids"),
        ),
        "vit": (lambda: hf.ViTForImageClassification(hf.ViTConfig()), lambda: images(32)),
        "resnet": (lambda: hf.ResNetForImageClassification(hf.ResNetConfig()), lambda: images(32)),
        "convnext": (lambda: hf.ConvNextForImageClassification(hf.ConvNextConfig()), lambda: images(32)),
    }


def tensors_in(results: Any) -> list[torch.Tensor]:
    values = results.values() if isinstance(results, dict) else results
    return [each for each in values if isinstance(each, torch.Tensor) and each.is_floating_point()]


def one_step(model: torch.nn.Module, run: Function, inputs: dict[str, torch.Tensor], training: bool) -> Any:
    torch.compiler.cudagraph_mark_step_begin()
    with torch.set_grad_enabled(training):
        results = run(**inputs)
    if training:
        sum(each.float().square().mean() for each in tensors_in(results)[:1]).backward()  # type: ignore[union-attr]
        model.zero_grad(set_to_none=True)
    return results


def profiled(step: Callable[[], Any]) -> dict[str, Any]:
    """What a step is to the GPU: how often the host starts something (kernels, copies, whole graphs), how many kernels
    run and for how long, and which take longest."""
    kinds = ("LaunchKernel", "GraphLaunch", "Memcpy", "Memset")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            step()
            torch.cuda.synchronize()
    except RuntimeError as problem:
        return {"problem": str(problem)[:80]}
    times: dict[str, list[float]] = {}
    launches = 0
    for event in profile.events():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            times.setdefault(event.name, []).append(event.device_time)
        elif event.name.startswith("cu") and any(kind in event.name for kind in kinds):
            launches += 1
    longest = sorted(times.items(), key=lambda item: -sum(item[1]))[:12]
    return {
        "launches": launches,
        "kernels": sum(map(len, times.values())),
        "busy ms": round(sum(map(sum, times.values())) / 1000, 3),
        "longest": [f"{round(sum(each))} us in {len(each)}: {name[:90]}" for name, each in longest],
    }


def measured(name: str, training: bool, chosen: argparse.Namespace) -> dict[str, Any]:
    make, make_inputs = model_cases()[name]
    dtype = getattr(torch, chosen.dtype)
    torch.manual_seed(0)
    model = make().to(DEVICE, dtype).train(training)
    inputs = {key: x.to(dtype) if x.is_floating_point() else x for key, x in make_inputs().items()}
    torch._dynamo.reset()
    row: dict[str, Any] = {"model": name, "training": training, "notes": {}, "profiles": {}}
    steps: dict[str, Callable[[], Any]] = {}
    for way in chosen.ways:
        backend, mode = WAYS[way]
        torch.cuda.synchronize()
        before, start = torch.cuda.memory_allocated(), time.perf_counter()
        try:
            run = model if backend == "eager" else torch.compile(model, backend=backend, mode=mode)
            for _ in range(3 if mode else 1):
                one_step(model, run, inputs, training)
            torch.cuda.synchronize()
            row["notes"][way] = [round(time.perf_counter() - start, 1)]
            if not chosen.compile_only:
                kept = torch.cuda.memory_allocated() - before
                torch.cuda.reset_peak_memory_stats()
                at = torch.cuda.memory_allocated()
                one_step(model, run, inputs, training)
                peak = torch.cuda.max_memory_allocated() - at + kept
                seen = profiled(lambda: one_step(model, run, inputs, training))  # noqa: B023
                row["profiles"][way] = {"peak MiB": peak >> 20, **seen}
            if backend == "ferrite" and mode:
                import ferrite

                records = [ferrite.last_compile()]
                replayed = [(each.recordings, each.replayed) for record in records for each in record.recordings]
                row["notes"][way] += [str(replayed), *records[0].not_recorded[:2]]
        except Exception as problem:
            row["notes"][way] = f"{type(problem).__name__}: {str(problem)[:300]}"
            continue
        steps[way] = functools.partial(one_step, model, run, inputs, training)
    taken: dict[str, list[float]] = {way: [] for way in steps}
    for turn in range(0 if chosen.compile_only else chosen.rounds + 3):
        for way, step in steps.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            step()
            torch.cuda.synchronize()
            if turn >= 3:
                taken[way].append(time.perf_counter() - start)
    row |= {way: round(1000 * median(numbers), 3) for way, numbers in taken.items()}
    return row


def models(chosen: argparse.Namespace) -> dict[str, Any]:
    """After each model the pages are written: what runs out of time has lost nothing."""
    result: dict[str, Any] = {"dtype": chosen.dtype, "rows": []}
    began = time.perf_counter()
    for name in model_cases():
        for training in (False, True):
            if chosen.only and not any(pattern in name for pattern in chosen.only):
                continue
            if (
                time.perf_counter() - began > chosen.seconds
                or ("training" if training else "inference") in chosen.without
            ):
                continue
            row = measured(name, training, chosen)
            result["rows"].append(row)
            print(row, flush=True)
            if not chosen.compile_only:
                write("models", result, chosen.write)
    return result


# --- pages ------------------------------------------------------------------------------------------------------------


def page(name: str, result: dict[str, Any]) -> str:
    """The rows as a table; what compiling took, or why it failed, behind them."""
    rows = result["rows"]
    columns = list(dict.fromkeys(key for row in rows for key in row if key not in ("notes", "profiles")))
    command = name.replace("-large", " --size large")
    title = f"# {name.removesuffix('-large').capitalize()} on a GPU{', large ones' if '-large' in name else ''}"
    lines = [title, "", f"Command: `python -m bench.gpu {command}`  ", f"Machine: {machine()}"]
    facts = [f"{key}: {value}" for key, value in result.items() if key != "rows"]
    lines += ["", ", ".join(facts), ""] if facts else [""]
    lines += ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(text(row.get(column, "")) for column in columns) + " |" for row in rows]
    noted = [(row, way, note) for row in rows for way, note in (row.get("notes") or {}).items() if name == "models"]
    if noted:
        lines += ["", "Seconds to compile, and what a step is to the GPU:", ""]
        for row, way, note in noted:
            seen = {key: value for key, value in row["profiles"].get(way, {}).items() if key != "longest"}
            facts = "".join(f", {key} {value}" for key, value in seen.items())
            lines += [f"- {row['model']}{', training' * row['training']}, {way}: {text(note)}{facts}"]
    return "\n".join(lines) + "\n"


def text(value: Any) -> str:
    return " / ".join(map(str, value)) if isinstance(value, list) else str(value)


def machine() -> str:
    import triton

    return f"{torch.cuda.get_device_name()}, torch {torch.__version__}, Triton {triton.__version__}"


def write(name: str, result: dict[str, Any], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"gpu-{name}.json").write_text(json.dumps({"machine": machine(), **result}, indent=1) + "\n")
    (folder / f"gpu-{name}.md").write_text(page(name, result))


PARTS: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {
    "kernels": kernels,
    "launches": launches,
    "optimizer": optimizer,
    "models": models,
    "fresh": fresh,
    "dynamic": dynamic,
}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="*", default=["kernels", "launches", "models"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", default=[], metavar="PATTERN")
    parser.add_argument("--seconds", type=float, default=600, help="no new case is begun after so long")
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS))
    parser.add_argument("--size", choices=SIZES, default="usual", help="of kernels' tensors")
    parser.add_argument("--part", default="0/1", help="of kernels: every n-th case, to compile in several processes")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), help="of models")
    parser.add_argument("--without", nargs="+", default=[], choices=["inference", "training"], help="of models")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of models")
    parser.add_argument("--compile-only", action="store_true", help="fill the caches, measure nothing")
    parser.add_argument("--write", type=Path, default=RESULTS)
    chosen = parser.parse_args(argv)
    chosen.without = {name == "training" for name in chosen.without}
    torch.manual_seed(0)
    for name in chosen.what:
        result = PARTS[name](chosen)
        if not chosen.compile_only:
            write(f"{name}-large" if (name, chosen.size) == ("kernels", "large") else name, result, chosen.write)


if __name__ == "__main__":
    main()
