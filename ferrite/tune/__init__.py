"""What was measured, as data: a problem, and the configuration that is fastest for it."""

from ferrite.tune.products import CANDIDATES, WIDE_CANDIDATES, Along, ProductConfig, ProductProblem

__all__ = ["CANDIDATES", "WIDE_CANDIDATES", "Along", "ProductConfig", "ProductProblem"]
