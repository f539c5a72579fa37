"""What was measured, as data: a problem, how long it takes, and the configuration that is fastest for it.

`products` has problems and configurations, `record` the text of what was found. Nothing here measures: see
`ferrite.targets.tuning`.
"""

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
    "configurations",
    "parsed",
]
