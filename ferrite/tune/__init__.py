"""What was measured, as data: a problem, how long it takes, and the configuration that is fastest for it.

`products` has problems and configurations, `record` the text of what was found, `files` where it is kept. Nothing here
measures: see `ferrite.targets.tuning`.
"""

from ferrite.tune.files import add_to, merged_files, read_record, write
from ferrite.tune.products import CANDIDATES, WIDE_CANDIDATES, Along, ProductConfig, ProductProblem
from ferrite.tune.record import InvalidRecord, Measured, Record, Where, configurations, parsed

__all__ = [
    "CANDIDATES",
    "WIDE_CANDIDATES",
    "Along",
    "InvalidRecord",
    "Measured",
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
