"""Judges programs in a process of its own, so that one that takes the process down is only one program lost.

Reads one line of JSON, {"kind": ..., "device": ..., "seeds": [...], "shrink": true} or {"program": ...}, and writes one
per fact: {"begin": 7}, {"seed": 7, "fault": ..., "detail": ...}, {"seed": 7, "smaller": ...}.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

OURS = {"FERRITE_CACHE": "0"}  # every program is compiled: what is judged is the compiler


def main() -> None:
    os.environ.update(OURS)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what anybody prints goes elsewhere

    def say(**fact: Any) -> None:
        answers.write(json.dumps(fact) + "\n")
        answers.flush()

    task = json.loads(sys.stdin.readline())
    import torch

    from bench.programs.generate import generate
    from bench.programs.judge import judge
    from bench.programs.program import Program
    from bench.programs.shrink import smaller

    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if "program" in task:
        verdict = judge(Program.from_json(task["program"]))
        say(seed=-1, fault=verdict.fault, detail=verdict.detail, family=verdict.family)
        return
    for seed in task["seeds"]:
        say(begin=seed)
        program = generate(task["kind"], seed, task.get("device", "cpu"))
        verdict = judge(program)
        say(seed=seed, fault=verdict.fault, detail=verdict.detail, program=program.as_json() if verdict.fault else None)
        if verdict.fault in ("wrong", "error") and task["shrink"]:
            small = smaller(program, lambda p, family=verdict.family: judge(p).family == family)
            say(seed=seed, smaller=small.as_json(), detail=judge(small).detail)


if __name__ == "__main__":
    main()
