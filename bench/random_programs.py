"""Random PyTorch programs, compiled and compared with eager; those that differ are made smaller and kept.

    python -m bench.random_programs --kind static --count 1000 --seed 0 --workers 4 --out programs.json
    python -m bench.random_programs --show programs.json

The file holds a row per kind and range of seeds, and every program that differed, as data and as the lines that run by
themselves; a table of it lies beside, as Markdown. A run that was stopped goes on where it was. `wrong`: other values,
strides, types or sharing than eager. `errors`: raised where eager does not, or otherwise. `crashed`: took its process
down, or hung. `torch's own`: `aot_eager` differs from eager in the same way, so that the fault is none of ours.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import glob
import json
import os
import platform
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bench.programs.generate import PROGRAMS
from bench.programs.program import Program
from bench.programs.shrink import smaller

MOST_IN_A_PROCESS = 400  # programs: a process takes as long to start as twenty programs take
PROCESSES_OF_A_WORKER = 4  # at least, where there are enough programs: workers shall end together
PATIENCE = 300.0  # seconds without a word from a process until it is taken for hanging
FAULTS = {"wrong": "wrong", "crashed": "crashed", "error": "errors", "torch": "torch's own"}
Fact = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=PROGRAMS, default="static")
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first program (0)")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--device", default="cpu", help="where tensors are: cuda")
    parser.add_argument("--threads", type=int, default=1, help="of torch, in each worker (1)")
    parser.add_argument("--out", type=Path, default=Path("random_programs.json"))
    parser.add_argument("--no-shrink", action="store_true", help="keep programs as they are")
    parser.add_argument("--show", type=Path, metavar="FILE", help="print the table and the programs of a file")
    chosen = parser.parse_args(argv)
    if chosen.show is not None:
        print(report(json.loads(chosen.show.read_text())))
        return 0
    book = Book(chosen.out, chosen.kind, chosen.device, chosen.seed, chosen.count)
    threads = chosen.threads
    with concurrent.futures.ThreadPoolExecutor(chosen.workers) as pool:
        work = [
            pool.submit(run_batch, book, seeds, threads, not chosen.no_shrink) for seeds in book.missing(chosen.workers)
        ]
        for done in concurrent.futures.as_completed(work):
            done.result()
            print(book.progress(), flush=True)
    print(table(book.content))
    row = book.row
    return 1 if row["wrong"] or row["crashed"] or row["errors"] else 0


# --- what is known ----------------------------------------------------------------------------------------------------


class Book:
    """The file of results: written after every batch, so that a run can be stopped at any time."""

    def __init__(self, path: Path, kind: str, device: str, seed: int, count: int) -> None:
        self.path, self.kind, self.device, self.seed, self.count = path, kind, device, seed, count
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": [], "found": []}
        self.row = self.find_row()
        self.before = float(self.row["seconds"])

    def find_row(self) -> dict[str, Any]:
        import torch

        machine = platform.machine() if self.device == "cpu" else torch.cuda.get_device_name()
        key = {"kind": self.kind, "seed": self.seed, "torch": torch.__version__, "machine": machine}
        for row in self.content["rows"]:
            if all(row[name] == value for name, value in key.items()):
                row["count"] = max(row["count"], self.count)
                return row
        row = {**key, "count": self.count, "seconds": 0.0, "done": [], **dict.fromkeys(FAULTS.values(), 0)}
        self.content["rows"].append(row)
        return row

    def missing(self, workers: int) -> Iterator[list[int]]:
        done = {seed for first, last in self.row["done"] for seed in range(first, last)}
        left = [seed for seed in range(self.seed, self.seed + self.row["count"]) if seed not in done]
        batch = min(MOST_IN_A_PROCESS, max(10, len(left) // (PROCESSES_OF_A_WORKER * workers)))
        for start in range(0, len(left), batch):
            yield left[start : start + batch]

    def add(self, seeds: list[int], facts: list[Fact]) -> None:
        with self.lock:
            for fact in facts:
                if fact["fault"] in FAULTS:
                    self.row[FAULTS[fact["fault"]]] += 1
                    self.content["found"].append({"kind": self.kind, **fact})
            self.row["done"] = ranges(self.row["done"] + [[seed, seed + 1] for seed in seeds])
            self.row["seconds"] = round(self.before + time.monotonic() - self.started, 1)
            temporary = self.path.with_suffix(".partial")
            temporary.write_text(json.dumps(self.content, indent=1))
            temporary.replace(self.path)
            self.path.with_suffix(".md").write_text(report(self.content))

    def progress(self) -> str:
        done = sum(last - first for first, last in self.row["done"])
        counts = ", ".join(f"{self.row[name]} {name}" for name in FAULTS.values())
        return f"{self.kind}: {done} of {self.row['count']} in {self.row['seconds']:.0f} s: {counts}"


def ranges(pairs: list[list[int]]) -> list[list[int]]:
    """[[0, 1], [1, 2], [5, 6]] as [[0, 2], [5, 6]]."""
    merged: list[list[int]] = []
    for first, last in sorted(pairs):
        if merged and first <= merged[-1][1]:
            merged[-1][1] = max(last, merged[-1][1])
        else:
            merged.append([first, last])
    return merged


def table(content: dict[str, Any]) -> str:
    heads = ["kind", "programs", "seeds", "torch", "machine", "seconds", *FAULTS.values()]
    lines = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for row in content["rows"]:
        done = sum(last - first for first, last in row["done"])
        seeds = f"{row['seed']} to {row['seed'] + row['count'] - 1}"
        cells = [row["kind"], done, seeds, row["torch"], row["machine"], row["seconds"]]
        lines.append("| " + " | ".join(str(cell) for cell in [*cells, *(row[name] for name in FAULTS.values())]) + " |")
    return "\n".join(lines)


def report(content: dict[str, Any]) -> str:
    """The table, and every program that differed through a fault of ours, the worst first."""
    parts = [table(content)]
    order = list(FAULTS)
    for fact in sorted(content["found"], key=lambda fact: order.index(fact["fault"])):
        if fact["fault"] != "torch" and fact.get("source"):
            title = f"## {fact['fault']}: {fact['kind']}, seed {fact['seed']}\n\n{fact['detail']}"
            parts.append(f"{title}\n\n```python\n{fact['source']}```")
    return "\n\n".join(parts) + "\n"


# --- processes --------------------------------------------------------------------------------------------------------


def run_batch(book: Book, seeds: list[int], threads: int, shrink: bool) -> None:
    """Judges some programs. Those after one that took its process down are judged by the next process."""
    facts: dict[int, Fact] = {}
    left = list(seeds)
    while left:
        under_way = None
        for fact in answers({"kind": book.kind, "device": book.device, "seeds": left, "shrink": shrink}, threads):
            if "begin" in fact:
                under_way = fact["begin"]
            elif "smaller" in fact:
                facts[fact["seed"]] |= {"program": fact["smaller"], "detail": fact["detail"]}
            else:
                facts[fact["seed"]] = fact
        if under_way is None:
            raise RuntimeError("a process ended before its first program: run python -m bench.programs.child")
        if under_way not in facts:
            before = [seed for seed in left if seed < under_way]
            facts[under_way] = the_one_that_crashed(book, before, under_way, threads, shrink)
        left = [seed for seed in left if seed > under_way]
    for fact in facts.values():
        if fact.get("program"):
            fact["source"] = Program.from_json(fact["program"]).source()
    book.add(seeds, list(facts.values()))


def the_one_that_crashed(book: Book, before: list[int], last: int, threads: int, shrink: bool) -> Fact:
    """Which program took a process down: the last one, or one before it that left its memory broken."""
    from bench.programs.generate import generate

    for seed in [last, *before]:
        program = generate(book.kind, seed, book.device)
        if crashes(program, threads):
            if shrink:
                program = smaller(program, lambda p: crashes(p, threads), seconds=300, trials=60)
            detail = "took its process down" + ("" if seed == last else f", found at program {last}")
            return {"seed": seed, "fault": "crashed", "detail": detail, "program": program.as_json()}
    detail = f"programs {[*before, last]}, one after the other, took their process down; none of them does so alone"
    return {
        "seed": last,
        "fault": "crashed",
        "detail": detail,
        "program": generate(book.kind, last, book.device).as_json(),
    }


def crashes(program: Program, threads: int) -> bool:
    return not list(answers({"program": program.as_json()}, threads))


def answers(task: Fact, threads: int) -> Iterator[Fact]:
    """What a new process says about a task, line by line, until it ends, is taken down, or hangs."""
    child = subprocess.Popen(
        [sys.executable, "-m", "bench.programs.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **surroundings(threads)},
        cwd=Path(__file__).parent.parent,
    )
    assert child.stdin is not None
    child.stdin.write(json.dumps(task) + "\n")
    child.stdin.flush()
    lines: queue.Queue[str | None] = queue.Queue()
    threading.Thread(target=read_into, args=(child.stdout, lines.put), daemon=True).start()
    try:
        while (line := lines.get(timeout=PATIENCE)) is not None:
            yield json.loads(line)
    except queue.Empty:
        pass
    finally:
        child.kill()
        child.wait()


def read_into(stream: Any, put: Callable[[str | None], None]) -> None:
    for line in stream:
        put(line)
    put(None)


def surroundings(threads: int) -> dict[str, str]:
    """The environment of a process: few threads, and memory that is checked when freed, where the C library can."""
    settings = {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": os.pathsep.join(
            [str(Path(__file__).parent.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        ),
        "MALLOC_PERTURB_": "85",
    }
    checking = glob.glob("/usr/lib/*/libc_malloc_debug.so.0") + glob.glob("/usr/lib64/libc_malloc_debug.so.0")
    if checking:
        settings |= {"LD_PRELOAD": checking[0], "MALLOC_CHECK_": "3"}
    return settings


if __name__ == "__main__":
    sys.exit(main())
