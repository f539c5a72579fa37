"""What compiling costs here and in another checkout: ferrite's own stages, in fresh processes, in turns.

    python -m bench.compile_against CHECKOUT [--rounds 3] [--repeats 4] [--layers 4] [--calls]

A BERT, 256 wide, batch 2, 64 tokens, one thread, cache off, as inference and as a training step; of each process the
least of some compilations, in milliseconds; capture and partition, which are torch's, left out. With `--calls` calls of
ferrite's functions are counted instead: a busy machine does not change them, and one round is enough. To compare with
a commit: `git worktree add CHECKOUT COMMIT`.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
WORK = """
import json, os, sys, torch, ferrite
from transformers import BertConfig, BertModel

repeats, layers, counts_calls = json.loads(sys.argv[1])
torch.set_num_threads(1)
torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4, "vocab_size": 1000}
sizes |= {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
model = BertModel(BertConfig(num_hidden_layers=layers, **sizes))
tokens = torch.randint(0, 1000, (2, 64))
folder = os.path.dirname(ferrite.__file__) + os.sep
calls = 0

def count(frame, event, argument):
    global calls
    calls += event == "call" and frame.f_code.co_filename.startswith(folder)

def compiled(training):
    global calls
    torch.compiler.reset()
    before, calls = ferrite.recent_compiles(), 0
    function = torch.compile(model.train(training), backend="ferrite", options={"strict": True, "cache": False})
    with torch.set_grad_enabled(training):
        sys.setprofile(count if counts_calls else None)
        result = function(tokens).last_hidden_state
        if training:
            result.sum().backward()
        sys.setprofile(None)
    records = [record for record in ferrite.recent_compiles() if not any(record is old for old in before)]
    stages = [item for record in records for item in record.stages.items()]
    own = 1e3 * sum(seconds for stage, seconds in stages if stage not in ("capture", "partition"))
    return calls if counts_calls else own

compiled(False)  # loads what compiling needs
print(json.dumps({name: min(compiled(training) for _ in range(repeats))
                  for name, training in (("inference", False), ("training step", True))}))
"""


def measured(checkout: Path, request: Sequence[object]) -> dict[str, float]:
    environment = {**os.environ, "PYTHONPATH": str(checkout), "CUDA_VISIBLE_DEVICES": "", "PYTHONHASHSEED": "0"}
    command = [sys.executable, "-W", "ignore", "-c", WORK, json.dumps(request)]
    done = subprocess.run(command, cwd=checkout, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="the other one")
    parser.add_argument("--rounds", type=int, default=3, help="processes of each (3)")
    parser.add_argument("--repeats", type=int, default=4, help="compilations in a process (4)")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--calls", action="store_true", help="count calls of functions instead of milliseconds")
    chosen = parser.parse_args(argv)
    request = (1 if chosen.calls else chosen.repeats, chosen.layers, chosen.calls)
    sides = {"there": chosen.checkout.resolve(), "here": ROOT}
    found = {(side, name): list[float]() for name in ("inference", "training step") for side in sides}
    for _ in range(1 if chosen.calls else chosen.rounds):
        for side, checkout in sides.items():
            for name, value in measured(checkout, request).items():
                found[side, name].append(value)
    for name in ("inference", "training step"):
        there, here = found["there", name], found["here", name]
        rows = ["; ".join(f"{value:,.0f}" for value in side) for side in (there, here)]
        print(f"{name}: there {rows[0]}, here {rows[1]}: {min(here) / min(there):.3f} times the least there")
    return 0


if __name__ == "__main__":
    sys.exit(main())
