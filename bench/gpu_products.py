"""Matrix products on a GPU: torch's call, torch's call with our kernel for what follows, and kernels of our own with
every configuration that may be the fastest.

    python -m bench.gpu_products [--only PATTERN ..] [--seconds 200] [--most 10] [--out FOLDER] [--tf32]
                                 [--compile-only --part 0/4]

Microseconds between two events, with the cache of the GPU emptied before each, medians. A result that is farther from
double precision than torch's is no result. `--compile-only` in several processes first, each with a part of the
cases, fills the cache, since compiling takes longest. Writes gpu-products.md, and gpu-products.txt: the record of what
was fastest, which `options={"tuning": ...}` reads.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

import ferrite.passes  # noqa: F401  # registers torch.ops.ferrite
from ferrite.errors import Refusal
from ferrite.schedule.gpu import candidates
from ferrite.targets.cuda import CUDA
from ferrite.targets.trials import Stopwatch, compiled_trials, farthest, reason_against
from ferrite.targets.tuning import where
from ferrite.tune import Measured, ProductConfig, ProductProblem, Record, configurations

RESULTS = Path(__file__).parent / "results"
NAMES = {torch.bfloat16: "bf16", torch.float16: "f16", torch.float32: "f32"}
Function = Callable[..., Any]


@dataclass
class Case:
    """`epilogue`: what follows the product, given it, a bias and a residual, as a user writes it."""

    kind: str
    batch: int
    rows: int
    columns: int
    summed: int
    epilogue: str = ""
    weight_first: bool = True  # the right factor lies along what is summed, as the weight of a linear layer
    dtype: torch.dtype = torch.bfloat16
    scaled: bool = False  # factors of 8 bits, with a scale for each row and column
    trials: list[tuple[ProductConfig, Any]] = field(default_factory=list)

    @property
    def name(self) -> str:
        sizes = " x ".join(map(str, (self.rows, self.columns, self.summed)))
        batch = f"{self.batch} of " if self.batch > 1 else ""
        return f"{self.kind} {batch}{sizes}{f', {self.epilogue}' if self.epilogue else ''}"

    @property
    def problem(self) -> ProductProblem:
        right = "summed" if self.weight_first else "columns"
        return ProductProblem(
            NAMES[self.dtype],
            self.batch,
            self.rows,
            self.columns,
            self.summed,
            "summed",
            right,  # type: ignore[arg-type]
        )

    def inputs(self) -> list[torch.Tensor]:
        batch = [self.batch] if self.batch > 1 else []

        def made(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, device="cuda", dtype=torch.float32).to(self.dtype)

        right = [self.columns, self.summed] if self.weight_first else [self.summed, self.columns]
        found = [made(*batch, self.rows, self.summed), made(*batch, *right)]
        if self.scaled:
            found = [each.to(torch.float8_e4m3fn) for each in found]
            return [*found, made(self.rows, 1).float().abs(), made(1, self.columns).float().abs(), made(self.columns)]
        if self.epilogue:
            found += [made(self.columns), made(*batch, self.rows, self.columns)]
        return found

    def function(self, own: bool) -> Function:
        def run(x: torch.Tensor, w: torch.Tensor, *more: torch.Tensor) -> Any:
            w = w.transpose(-1, -2) if self.weight_first else w
            if self.scaled:
                return scaled_product(own, x, w, *more)
            bias = more[0] if self.epilogue else None
            if own and bias is not None:
                y = (torch.ops.ferrite.wide_product(x, w) + bias).to(x.dtype)
            elif own:
                y = torch.ops.ferrite.product(x, w)
            elif bias is not None:
                y = torch.addmm(bias, x, w) if x.ndim == 2 else torch.baddbmm(bias, x, w)
            else:
                y = x @ w
            if "gelu" in self.epilogue:
                y = F.gelu(y)
            if "relu" in self.epilogue:
                y = F.relu(y)
            return y + more[1] if "residual" in self.epilogue else y

        return run


def scaled_product(
    own: bool, x: torch.Tensor, w: torch.Tensor, of_rows: torch.Tensor, of_columns: torch.Tensor, bias: torch.Tensor
) -> torch.Tensor:
    if x.dtype is torch.float64:  # what is exact
        return x @ w * of_rows * of_columns + bias
    if not own:
        return torch._scaled_mm(x, w, of_rows, of_columns, bias=bias, out_dtype=bias.dtype)
    sums = torch.ops.ferrite.wide_product(x.bfloat16(), w.bfloat16())
    return (sums * (of_rows * of_columns) + bias).to(bias.dtype)


def cases() -> Iterator[Case]:
    for size in (512, 1024, 2048, 4096, 8192, 16384):
        yield Case("square", 1, size, size, size)
    yield Case("square, both along rows", 1, 4096, 4096, 4096, weight_first=False)
    yield Case("tall", 1, 16384, 1024, 1024)
    yield Case("tall", 1, 8192, 256, 4096)
    yield Case("flat", 1, 256, 8192, 4096)
    yield Case("long sums", 1, 256, 256, 16384)
    yield Case("batched", 64, 512, 512, 64)
    yield Case("batched", 32, 512, 64, 512, weight_first=False)
    yield Case("batched", 16, 1024, 1024, 1024)
    for rows in (1, 2, 4, 8, 16, 32, 64):
        yield Case("decode", 1, rows, 4096, 4096)
    yield Case("decode", 1, 1, 14336, 4096)
    yield Case("decode", 1, 8, 14336, 4096)
    yield Case("decode", 1, 8, 4096, 14336)
    yield Case("decode", 1, 8, 768, 768)
    yield Case("layer", 1, 8, 4096, 4096, "bias, gelu")
    yield Case("layer", 1, 64, 4096, 4096, "bias, residual")
    yield Case("layer", 1, 2048, 3072, 768, "bias, gelu")
    yield Case("layer", 1, 2048, 768, 3072, "bias, residual")
    yield Case("layer", 1, 4096, 4096, 1024, "bias, gelu")
    yield Case("layer", 1, 8192, 4096, 4096, "bias, gelu")
    yield Case("layer", 1, 8192, 4096, 4096, "bias, relu")
    yield Case("layer", 1, 16384, 1024, 1024, "bias, residual")
    for rows in (1, 8, 16, 32, 64):
        yield Case("in float8", 1, rows, 4096, 4096, scaled=True)
    yield Case("in float8", 1, 1, 14336, 4096, scaled=True)
    yield Case("in float8", 1, 8, 14336, 4096, scaled=True)
    yield Case("in float8", 1, 8, 4096, 14336, scaled=True)
    yield Case("in float8", 1, 8, 1024, 1024, scaled=True)
    yield Case("layer in float32", 1, 8, 4096, 4096, "bias, gelu", dtype=torch.float32)
    for rows in (1, 2, 4, 8, 16, 32):
        yield Case("in float32", 1, rows, 4096, 4096, dtype=torch.float32)
    yield Case("in float32", 1, 1, 14336, 4096, dtype=torch.float32)
    yield Case("in float32", 1, 8, 768, 768, dtype=torch.float32)
    yield Case("in float32", 1, 16, 3072, 768, dtype=torch.float32)


def prepared(case: Case, most: int, also: Sequence[str] = ()) -> None:
    """Compiles what is to be measured."""
    more = [config for config in map(ProductConfig.parsed, also) if config is not None]
    configs = [*candidates(case.problem, CUDA.scheduling.machine)[:most], *more]
    function = case.function(own=True)
    graph = make_fx(lambda *given: [function(*given)], tracing_mode="fake")(*case.inputs())
    tuned = [configurations({case.problem: Measured(0, 0, config)}) for config in configs]
    case.trials = list(zip(configs, compiled_trials(graph, CUDA, tuned), strict=True))


def measured(case: Case, watch: Stopwatch) -> dict[str, Any]:
    inputs, plain = case.inputs(), case.function(own=False)
    exact = plain(*(each.double() for each in inputs)) if case.rows * case.columns * case.summed < 2**36 else None
    eager = plain(*inputs)
    found: dict[str, Any] = {"case": case.name, "torch": watch.microseconds(plain, *inputs)}
    if case.epilogue:
        torch._dynamo.reset()
        with_ours = torch.compile(plain, backend="ferrite", options={"own_products": "off"})
        found["torch and ours"] = watch.microseconds(with_ours, *inputs)
    reference = eager.double() if exact is None else exact
    allowed = [farthest(eager, reference) if exact is not None else 2.0**-7 * reference.abs().max().item()]
    ours = {}
    for config, trial in case.trials:
        if isinstance(trial, Refusal):
            found.setdefault("refused", []).append(f"{config}: {trial.reason[:80]}")
            continue
        wrong = reason_against(trial(*inputs), [reference], allowed)
        if wrong:
            found.setdefault("wrong", []).append(f"{config}: {wrong}")
            continue
        ours[str(config)] = watch.microseconds(trial, *inputs)
    if ours:
        best = min(ours, key=ours.__getitem__)
        if not case.epilogue and not case.scaled:
            config = next(config for config, _ in case.trials if str(config) == best)
            found |= {"problem": case.problem, "measured": Measured(found["torch"], ours[best], config)}
        found |= {"ours": ours[best], "by": best, "likely": ours.get(str(case.trials[0][0])), "all": ours}
    return found


def line(row: dict[str, Any]) -> str:
    numbers = [row.get(key) for key in ("torch", "torch and ours", "ours", "likely")]
    cells = ["" if number is None else f"{number:.1f}" for number in numbers]
    other = row.get("torch and ours", row["torch"])
    ratio = f"{row['ours'] / min(other, row['torch']):.2f}" if "ours" in row else "refused"
    return f"| {row['case']} | {' | '.join(cells)} | {ratio} | {row.get('by', '')} |"


HEAD = """| product | torch | torch and our kernel | ours | ours, not measured | to torch's | configuration |
|---|---|---|---|---|---|---|"""


def write(rows: list[dict[str, Any]], folder: Path) -> None:
    title = f"# Matrix products on a GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}"
    (folder / "gpu-products.md").write_text("\n".join([title, "", HEAD, *map(line, rows), ""]))
    record = Record(where(), {row["problem"]: row["measured"] for row in rows if "measured" in row})
    (folder / "gpu-products.txt").write_text(str(record))
    every = ["\n".join([row["case"], *(f"{us:10.1f}  {by}" for by, us in row.get("all", {}).items())]) for row in rows]
    (folder / "gpu-products-all.txt").write_text("\n".join(every) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="*", default=[])
    parser.add_argument("--seconds", type=float, default=200)
    parser.add_argument("--most", type=int, default=10)
    parser.add_argument("--also", nargs="*", default=[], help="configurations, as records have them")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--tf32", action="store_true", help="torch may round factors of 32 bits")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--part", default="0/1", help="of the cases: every fourth one, from the first on, is 0/4")
    chosen = parser.parse_args()
    torch.set_float32_matmul_precision("high" if chosen.tf32 else "highest")
    began = time.perf_counter()
    wanted = [case for case in cases() if not chosen.only or any(each in case.name for each in chosen.only)]
    first, step = map(int, chosen.part.split("/"))
    wanted = wanted[first::step]
    if chosen.compile_only:
        for case in wanted:
            with contextlib.suppress(Exception):  # measuring it says what is wrong
                prepared(case, chosen.most, chosen.also)
                print(f"compiled: {case.name}", flush=True)
            case.trials = []
        return
    watch, rows = Stopwatch(), []
    print(HEAD)
    with torch.no_grad():
        for case in wanted:
            if time.perf_counter() - began > chosen.seconds:
                print(f"no time for {case.name}")
                continue
            try:
                prepared(case, chosen.most, chosen.also)
                row = measured(case, watch)
            except Exception as problem:
                print(f"{case.name}: {type(problem).__name__}: {str(problem)[:300]}", flush=True)
                continue
            case.trials = []
            rows.append(row)
            print(line(row), flush=True)
            for key in ("refused", "wrong"):
                for each in row.get(key, []):
                    print(f"    {key}: {each}"[:200])
            write(rows, chosen.out)


if __name__ == "__main__":
    main()
