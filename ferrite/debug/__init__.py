"""Seeing what the compiler did: the record of each compilation, and the repro folder of a failure.

In: what the stages report. Out: objects and files for people. Nothing here changes what is compiled.
"""

from ferrite.debug.cache import age, differences_table, explain_cache, explained, side
from ferrite.debug.compilation import Compilation
from ferrite.debug.details import Compiled, GraphDetails, GraphRow, GraphStep
from ferrite.debug.dump import Dump, DumpFolder
from ferrite.debug.graph_record import as_data, from_data, plan_record
from ferrite.debug.partition import partition_record
from ferrite.debug.record import CompileRecord, GraphRecord, PeakMemory, last_compile, recent_compiles

__all__ = [
    "Compilation",
    "CompileRecord",
    "Compiled",
    "Dump",
    "DumpFolder",
    "GraphDetails",
    "GraphRecord",
    "GraphRow",
    "GraphStep",
    "PeakMemory",
    "age",
    "as_data",
    "differences_table",
    "explain_cache",
    "explained",
    "from_data",
    "last_compile",
    "partition_record",
    "plan_record",
    "recent_compiles",
    "side",
]
