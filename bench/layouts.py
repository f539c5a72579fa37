"""Whether constant weights pay in another layout than they have, for calls of torch's own kernels.

    python -m bench.layouts [--rounds N] [--threads N]

Figures are seconds per call to those of the call as it is: below 1 is faster. In float32: half precision is packed on
few processors only.

    linear          x @ W.t() + b       `transposed`: W.t() stored row by row; `packed`: in the blocks of oneDNN
    convolution     `channels last`: the weight alone; `packed`: in the blocks of oneDNN

`taken` says what the option weight_layouts does by itself; it should be what is below 0.77.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch

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


def is_taken(size: tuple[int, ...]) -> bool:
    if len(size) == 3:
        return False  # no product is
    batch, wide, out, side, kernel, groups = size
    work = batch * out * side**2 * (wide // groups) * kernel**2
    return gains_much((out, wide // groups, kernel, kernel), groups, work)


def row(label: str, taken: bool, calls: Calls, rounds: int) -> str:
    seconds = interleaved(calls, rounds)
    base = seconds["as it is"]
    others = [ratio(seconds[name], base) for name in calls if name != "as it is"]
    cells = [f"{median:.2f} ({low:.2f} to {high:.2f})" for median, low, high in others]
    return f"| {label} | {'yes' if taken else 'no'} | {statistics.median(base) * 1e6:.0f} | {' | '.join(cells)} |"


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
            lines += [f"| {title} | taken | as it is, microseconds | {' | '.join(names)} |", "|---|---|---|---|---|"]
            for size in sizes:
                lines.append(row(", ".join(map(str, size)), is_taken(size), make(*size), chosen.rounds))  # type: ignore[operator]
                print(lines[-1], flush=True)
            lines.append("")
    write("layouts", "Weights in other layouts", lines)


if __name__ == "__main__":
    main()
