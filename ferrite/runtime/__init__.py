"""From host programs to callables.

In: the text of a host program, the kernels it runs and the objects it names. Out: a boxed function: it takes one list,
empties it, and returns the outputs in order. Holds what compiled code calls while it runs.
"""

from ferrite.runtime.boxed import Boxed, run_in_eager
from ferrite.runtime.code_memory import KernelStore, telling_kernels
from ferrite.runtime.collective_times import CollectiveTimes, MeasuredCollective, MeasuredRun
from ferrite.runtime.discard import discard
from ferrite.runtime.forks import ready_for_forks
from ferrite.runtime.frozen import Freezer, Frozen, call_frozen
from ferrite.runtime.host_code import functions_here, functions_of
from ferrite.runtime.host_program import bytecode_of, load_host
from ferrite.runtime.profiler_ranges import in_range, labels_of, one_by_one
from ferrite.runtime.step_times import StepTimes
from ferrite.runtime.stopwatch import least_seconds, wait_for_gpus

__all__ = [
    "Boxed",
    "CollectiveTimes",
    "Freezer",
    "Frozen",
    "KernelStore",
    "MeasuredCollective",
    "MeasuredRun",
    "StepTimes",
    "bytecode_of",
    "call_frozen",
    "discard",
    "functions_here",
    "functions_of",
    "in_range",
    "labels_of",
    "least_seconds",
    "load_host",
    "one_by_one",
    "ready_for_forks",
    "run_in_eager",
    "telling_kernels",
    "wait_for_gpus",
]
