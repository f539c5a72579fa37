"""Whether weights, and operands of products, pay in another layout than they have, for calls of torch's own kernels.

    python -m bench.layouts [--rounds N] [--threads N]

Figures are seconds per call to those of the call as it is: below 1 is faster. In float32: half precision is packed on
few processors only.

    linear          x @ W.t() + b       `transposed`: W.t() stored row by row; `packed`: in the blocks of oneDNN
    convolution     `channels last`: the weight alone; `packed`: in the blocks of oneDNN
    product         x @ W.mT, compiled; `laid out`: one operand copied in each call, by a kernel of our own

`taken` says what the options do by themselves: weight_layouts what is below 0.77, product_layouts what is below 1.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence

import torch

import ferrite
from bench.backends import OURS, given_to, with_own_code
from bench.measure import interleaved, ratio, write
from ferrite.passes.freezing.layouts import gains_much

LINEAR = (  # rows, inner, columns
    (1, 768, 768),
    (8, 768, 3072),
    (128, 768, 768),
    (128, 768, 3072),
    (512, 768, 3072),
    (1, 4096, 4096),
)
CONVOLUTION = (  # batch, channels in, channels out, size, kernel, groups
    (1, 64, 64, 56, 3, 1),
    (1, 64, 256, 56, 1, 1),
    (1, 256, 64, 56, 1, 1),
    (8, 64, 256, 14, 1, 1),
    (1, 512, 2048, 7, 1, 1),
    (1, 16, 64, 32, 1, 1),
    (1, 96, 96, 56, 3, 96),
    (1, 32, 32, 112, 3, 32),
    (8, 384, 384, 14, 3, 384),
    (1, 384, 384, 14, 3, 384),
    (8, 64, 64, 28, 3, 1),
    (1, 256, 256, 14, 3, 1),
)
PRODUCT = (  # batch, rows, inner, columns
    (1, 8, 256, 256),
    (1, 16, 64, 64),
    (1, 16, 768, 3072),
    (1, 64, 256, 256),
    (1, 64, 256, 1024),
    (1, 64, 1024, 256),
    (1, 128, 768, 768),
    (1, 197, 384, 384),
    (1, 196, 768, 768),
    (1, 512, 768, 768),
    (1, 3136, 64, 64),
    (1, 32, 2048, 2048),
    (4, 64, 64, 64),
    (12, 128, 64, 128),
    (12, 512, 64, 512),
    (64, 49, 32, 49),
)
Calls = dict[str, Callable[[], object]]


def linear_calls(rows: int, inner: int, columns: int) -> Calls:
    x, weight, bias = (torch.randn(size) for size in ((rows, inner), (columns, inner), (columns,)))
    transposed = weight.t().contiguous()
    calls: Calls = {
        "as it is": lambda: torch.addmm(bias, x, weight.t()),
        "transposed": lambda: torch.addmm(bias, x, transposed),
    }
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, rows)
    calls["packed"] = lambda: torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return calls


def convolution_calls(batch: int, wide: int, out: int, size: int, kernel: int, groups: int) -> Calls:
    x = torch.randn(batch, wide, size, size)
    weight, bias = torch.randn(out, wide // groups, kernel, kernel), torch.randn(out)
    padding = [kernel // 2] * 2
    rest = (padding, [1, 1], [1, 1], groups)

    def convolved(weight: torch.Tensor) -> Callable[[], object]:
        return lambda: torch.conv2d(x, weight, bias, 1, padding, 1, groups)

    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, padding, [1, 1], [1, 1], groups, list(x.shape))
    return {
        "as it is": convolved(weight),
        "channels last": convolved(weight.to(memory_format=torch.channels_last)),
        "packed": lambda: torch.ops.mkldnn._convolution_pointwise(x, packed, bias, *rest, "none", [], ""),
    }


def product_calls(batch: int, rows: int, inner: int, columns: int) -> Calls:
    shapes = ((rows, inner), (columns, inner))
    x, weight = (torch.randn(batch, *shape) if batch > 1 else torch.randn(shape) for shape in shapes)

    def call(layouts: str) -> Callable[[], object]:
        compiled = given_to(OURS, with_own_code(product), product_layouts=layouts)
        return lambda: compiled(x, weight)

    return {"as it is": call("off"), "laid out": call("always"), "taken": call("auto")}


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight.mT


def is_laid_out(call: Callable[[], object]) -> bool:
    """Whether the compiler lays an operand out by itself."""
    torch.compiler.reset()
    call()
    return "product_layout" in ferrite.last_compile().rewrites


def is_taken(size: tuple[int, ...]) -> bool:
    if len(size) == 3:
        return False  # no linear layer is
    batch, wide, out, side, kernel, groups = size
    work = batch * out * side**2 * (wide // groups) * kernel**2
    return gains_much((out, wide // groups, kernel, kernel), groups, work)


def row(label: str, taken: bool, calls: Calls, rounds: int) -> str:
    seconds = interleaved(calls, rounds)
    base = seconds["as it is"]
    others = [ratio(seconds[name], base) for name in calls if name != "as it is"]
    cells = [f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in others]
    return f"| {label} | {'yes' if taken else 'no'} | {statistics.median(base) * 1e6:.0f} | {' | '.join(cells)} |"


def head(title: str, names: Sequence[str]) -> str:
    return f"| {title} | taken | as it is, microseconds | {' | '.join(names)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    torch.manual_seed(0)
    lines = [f"Threads: {chosen.threads}. Median and quartiles of the time to that of the call as it is.", ""]
    with torch.no_grad():
        for title, sizes, make, names in (
            ("linear: rows x inner x columns", LINEAR, linear_calls, ("transposed", "packed")),
            (
                "convolution: batch, in, out, size, kernel, groups",
                CONVOLUTION,
                convolution_calls,
                ("channels last", "packed"),
            ),
        ):
            lines += [head(title, names), "|---|---|---|---|---|"]
            for size in sizes:
                lines.append(row(", ".join(map(str, size)), is_taken(size), make(*size), chosen.rounds))  # type: ignore[operator]
                print(lines[-1], flush=True)
            lines.append("")
        lines += [head("product: batch, rows, inner, columns", ("laid out",)), "|---|---|---|---|"]
        for size in PRODUCT:
            calls = product_calls(*size)
            taken = is_laid_out(calls.pop("taken"))
            lines.append(row(", ".join(map(str, size)), taken, calls, chosen.rounds))
            print(lines[-1], flush=True)
    write("layouts", "Weights and operands in other layouts", lines)


if __name__ == "__main__":
    main()
