"""The most memory that one call holds beyond what was held before it.

Counted by torch's profiler, from every allocation and every release of tensor memory, in order. The figure is exact and
the same in every run. Resident memory of the process says less: allocators keep what is freed, so that the second call
of a function grows nothing, whatever it needs. What the profiler does not see is scratch that libraries such as oneDNN
take from the system themselves; and memory that a compiled function keeps between calls is held before, not during.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its notes of starting and stopping

from torch.profiler import ProfilerActivity, profile

# Event by event: what it writes of collectives is not always JSON.
MEMORY_EVENT = re.compile(r'\{[^{}]*"name": "\[memory\]"[^{}]*\{[^{}]*\}[^{}]*\}')


def peak_bytes(function: Callable[[], object]) -> int:
    """Bytes of the second call: what is made once, at the first, is not counted."""
    function()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as watched:
        function()
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json"
        watched.export_chrome_trace(str(trace))
        events = [json.loads(each) for each in MEMORY_EVENT.findall(trace.read_text())]
    held = peak = 0
    for event in sorted(events, key=order):
        held += int(event["args"]["Bytes"])
        peak = max(peak, held)
    return peak


def order(event: dict[str, object]) -> tuple[float, int]:
    arguments = event["args"]
    assert isinstance(arguments, dict)
    return float(str(event["ts"])), int(arguments.get("Ev Idx", 0))
