"""Models in inference, float32: eager, ferrite, ferrite frozen, and the programs that people serve with on a processor.

    python -m bench.rivals [--filter resnet bert] [--batch N] [--threads N] [--rounds N] [--without NAME ...]
    python -m bench.rivals --without onnxruntime openvino       frozen beside not frozen, alone

In one process, turn by turn, with the same number of threads. `pip install ferrite[rivals]` brings ONNX Runtime and
OpenVINO; each is left out where it is not there, and so is a model that it does not take, with the reason in its place.
ONNX Runtime gets the model as torch exports it; OpenVINO reads torch's own graph where it can. What differs from eager
by more than a thousandth of the largest number is called wrong, and not timed. Figures: times eager, above 1 is faster;
`frozen to not` tells what freezing gains.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import ferrite
from bench.backends import EAGER, OURS, given_to, reason
from bench.measure import interleaved, ratio, write
from bench.report import selected, summary_lines, summary_of
from bench.zoo import MODELS, Inputs, Model, find, floats_of

FROZEN, ONNX_RUNTIME, OPENVINO = "frozen", "onnxruntime", "openvino"
NEEDS = {ONNX_RUNTIME: ("onnxruntime", "onnx", "onnxscript"), OPENVINO: ("openvino",)}
COLUMNS = (EAGER, OURS, FROZEN, *NEEDS)
TOLERANCE = 1e-3  # of the largest number: other libraries promise less than torch's own compilers
TURN = 0.05  # seconds: each library has threads of its own, which are asleep when its turn begins
Call = Callable[[], torch.Tensor]


class FirstOutput(torch.nn.Module):
    """A model of tensors in an order, which gives out the first tensor of floats that the model does."""

    def __init__(self, model: torch.nn.Module, names: Sequence[str]) -> None:
        super().__init__()
        self.model, self.names = model, tuple(names)

    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        return next(floats_of(self.model(**dict(zip(self.names, tensors, strict=True)))))


def missing(name: str) -> list[str]:
    """The packages that a rival needs and that are not there."""
    return [package for package in NEEDS.get(name, ()) if importlib.util.find_spec(package) is None]


def advice(name: str) -> str:
    return f"{name} is left out: {', '.join(missing(name))} not installed (pip install ferrite[rivals])"


# --- the model as each of them runs it --------------------------------------------------------------------------------


def in_onnx_runtime(module: torch.nn.Module, tensors: Sequence[torch.Tensor], threads: int) -> Call:
    import onnxruntime  # type: ignore[import-not-found, unused-ignore]

    names = names_of(tensors)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
    options.add_session_config_entry("session.force_spinning_stop", "1")  # threads leave the cores to the next turn
    with tempfile.TemporaryDirectory() as folder:
        path = exported(module, tensors, folder, names)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    taken = [each.name for each in session.get_inputs()]  # what a model does not need, an exporter leaves out
    feed = {name: tensor.numpy() for name, tensor in zip(names, tensors, strict=True) if name in taken}
    return lambda: torch.from_numpy(session.run(None, feed)[0])


def exported(module: torch.nn.Module, tensors: Sequence[torch.Tensor], folder: str, names: Sequence[str]) -> str:
    """The path of a model as ONNX."""
    path = str(Path(folder) / "model.onnx")
    torch.onnx.export(module, tuple(tensors), path, input_names=list(names), dynamo=True, verbose=False)
    return path


def in_openvino(module: torch.nn.Module, tensors: Sequence[torch.Tensor], threads: int) -> Call:
    import openvino  # type: ignore[import-not-found, unused-ignore]

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    sizes = [list(tensor.shape) for tensor in tensors]
    given: Any = [tensor.numpy() for tensor in tensors]
    with tempfile.TemporaryDirectory() as folder:
        try:
            with torch.no_grad():
                converted = openvino.convert_model(module, example_input=tuple(tensors), input=sizes)
        except Exception:  # an operator that it does not know: it may know what that is exported as
            if missing(ONNX_RUNTIME):
                raise
            converted = openvino.Core().read_model(exported(module, tensors, folder, names_of(tensors)))
            given = {name: each for name, each in zip(names_of(tensors), given, strict=True) if has(converted, name)}
        request = openvino.Core().compile_model(converted, "CPU", settings).create_infer_request()
    return lambda: torch.from_numpy(request.infer(given, share_inputs=True, share_outputs=True)[0])


def has(converted: Any, name: str) -> bool:
    """Whether a model still takes an input: what it does not need, an exporter leaves out."""
    return any(name in each.get_names() for each in converted.inputs)


def names_of(tensors: Sequence[torch.Tensor]) -> list[str]:
    return [f"x{place}" for place in range(len(tensors))]


def in_torch(call: Callable[..., torch.Tensor], tensors: Sequence[torch.Tensor]) -> Call:
    def run() -> torch.Tensor:
        with torch.no_grad():
            return call(*tensors)

    return run


def made(name: str, module: torch.nn.Module, tensors: Sequence[torch.Tensor], threads: int) -> Call:
    """A model as one of the columns runs it."""
    if name == ONNX_RUNTIME:
        return in_onnx_runtime(module, tensors, threads)
    if name == OPENVINO:
        return in_openvino(module, tensors, threads)
    if name == FROZEN:
        return in_torch(ferrite.freeze(module, dynamic=False), tensors)
    return in_torch(given_to(name, module), tensors)


# --- measuring --------------------------------------------------------------------------------------------------------


def difference(found: torch.Tensor, eager: torch.Tensor) -> str | None:
    """What is wrong with a result, or None."""
    if found.shape != eager.shape or found.dtype != eager.dtype:
        return f"wrong: {found.dtype} {tuple(found.shape)}"
    if not torch.equal(found.isfinite(), eager.isfinite()):
        return "wrong: other numbers are finite"
    error = (found - eager).nan_to_num(0, 0, 0).abs().max() / eager.nan_to_num(0, 0, 0).abs().max().clamp(min=1e-6)
    return None if error <= TOLERANCE else f"wrong: {error:.1e} of the largest number"


def measured(
    model: Model, batch: int, columns: Sequence[str], threads: int, rounds: int
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of each column, round by round, and why a column has none."""
    given: Inputs = model.inputs(batch, torch.float32, training=False)
    module = FirstOutput(model.ready(torch.float32, training=False), list(given)).eval()
    tensors = list(given.values())
    eager = in_torch(module, tensors)().clone()
    calls: dict[str, Call] = {}
    problems: dict[str, str] = {}
    for name in columns:
        torch.compiler.reset() if name == EAGER else None
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                call = made(name, module, tensors, threads)
                problem = difference(call().clone(), eager)
        except Exception as failure:  # whatever a library raises on a model is the cell's text
            problem = reason(failure)
        if problem is None:
            calls[name] = call
        else:
            problems[name] = problem
    return interleaved(calls, rounds, TURN), problems


def cells(seconds: Mapping[str, list[float]], problems: Mapping[str, str], columns: Sequence[str]) -> list[str]:
    """Milliseconds of eager, times eager of the others, and times not frozen of frozen."""
    found = []
    for name in columns:
        if name in problems:
            found.append(problems[name].replace("|", "/"))
        elif name == EAGER:
            found.append(f"{1e3 * statistics.median(seconds[EAGER]):.1f} ms")
        else:
            found.append(f"{ratio(seconds[EAGER], seconds[name])[0]:.2f}")
    both = OURS in seconds and FROZEN in seconds
    return [*found, f"{ratio(seconds[OURS], seconds[FROZEN])[0]:.2f}" if both else ""]


def best_rival(seconds: Mapping[str, list[float]]) -> str | None:
    there = [name for name in NEEDS if name in seconds]
    return min(there, key=lambda name: statistics.median(seconds[name]), default=None)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--filter", nargs="+", default=[])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", nargs="+", default=[], choices=list(NEEDS))
    parser.add_argument("--write", action="store_true", help="keep the page in bench/results")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(chosen.threads)
    for name in NEEDS:
        if name not in chosen.without and missing(name):
            print(advice(name), flush=True)
    columns = [name for name in COLUMNS if name not in chosen.without and not missing(name)]
    lines = [f"| model | {' | '.join(columns)} | frozen to not |", "|---" * (len(columns) + 2) + "|"]
    to_rival: dict[str, float] = {}
    to_plain: dict[str, float] = {}
    for model in selected([*MODELS.values(), find("resnet-50")], lambda item: item.name, chosen.filter):
        seconds, problems = measured(model, chosen.batch, columns, chosen.threads, chosen.rounds)
        lines.append(f"| {model.name} | {' | '.join(cells(seconds, problems, columns))} |")
        print(lines[-1], flush=True)
        if FROZEN in seconds and (rival := best_rival(seconds)) is not None:
            to_rival[model.name] = ratio(seconds[rival], seconds[FROZEN])[0]
        if FROZEN in seconds and OURS in seconds:
            to_plain[model.name] = ratio(seconds[OURS], seconds[FROZEN])[0]
    lines.append("")
    lines += summary_lines("Frozen, beside the better rival", summary_of(to_rival))
    lines += summary_lines("Frozen, beside not frozen", summary_of(to_plain))
    if chosen.write:
        write("rivals", f"Beside others that serve models, threads: {chosen.threads}", lines)
    else:
        print("\n".join(lines))


if __name__ == "__main__":
    main()
