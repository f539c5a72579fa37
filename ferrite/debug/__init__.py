"""Seeing what the compiler did: the record of each compilation, and the repro folder of a failure.

In: what the stages report. Out: objects and files for people. Nothing here changes what is compiled.
"""

from ferrite.debug.compilation import Compilation
from ferrite.debug.details import Compiled, GraphDetails, GraphRow, KernelCode
from ferrite.debug.dump import Dump, DumpFolder, about_calls, about_graph
from ferrite.debug.explain_cache import age, differences_table, explain_cache, explained, side
from ferrite.debug.graph_record import as_data, from_data, plan_record
from ferrite.debug.partition import partition_record
from ferrite.debug.progress import Progress, log
from ferrite.debug.record import (
    CompileRecord,
    GraphRecord,
    PeakMemory,
    forget_compiles,
    kernel_names,
    last_compile,
    recent_compiles,
)
from ferrite.debug.repro import graph_file, input_source, missing, settings_of, stand_in

__all__ = [
    "Compilation",
    "CompileRecord",
    "Compiled",
    "Dump",
    "DumpFolder",
    "GraphDetails",
    "GraphRecord",
    "GraphRow",
    "KernelCode",
    "PeakMemory",
    "Progress",
    "about_calls",
    "about_graph",
    "age",
    "as_data",
    "differences_table",
    "explain_cache",
    "explained",
    "forget_compiles",
    "from_data",
    "graph_file",
    "input_source",
    "kernel_names",
    "last_compile",
    "log",
    "missing",
    "partition_record",
    "plan_record",
    "recent_compiles",
    "settings_of",
    "side",
    "stand_in",
]
