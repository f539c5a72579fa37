"""What was measured, as data: a problem, how long it takes, and the configuration that is fastest for it.

`products` and `calls` have problems, `record` the text of what was found, `files` where it is kept. Nothing here
measures: see `ferrite.targets.tuning`.
"""

from ferrite.tune.calls import CallProblem, CallTimes
from ferrite.tune.files import add_to, merged_files, read_record, write
from ferrite.tune.products import CANDIDATES, WIDE_CANDIDATES, Along, ProductConfig, ProductProblem
from ferrite.tune.record import (
    MAX_RATIO,
    Found,
    InvalidRecord,
    Measured,
    Problem,
    Record,
    Where,
    configurations,
    parsed,
)

__all__ = [
    "CANDIDATES",
    "MAX_RATIO",
    "WIDE_CANDIDATES",
    "Along",
    "CallProblem",
    "CallTimes",
    "Found",
    "InvalidRecord",
    "Measured",
    "Problem",
    "ProductConfig",
    "ProductProblem",
    "Record",
    "Where",
    "add_to",
    "configurations",
    "merged_files",
    "parsed",
    "read_record",
    "write",
]
