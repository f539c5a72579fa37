"""The kernels that `bench.kernels` measures: small functions as models have them, with inputs in two sizes."""

from bench.cases.case import Case, tensors_of
from bench.cases.moving import MOVING
from bench.cases.pointwise import POINTWISE
from bench.cases.rows import ROWS

CASES: tuple[Case, ...] = (*POINTWISE, *ROWS, *MOVING)

__all__ = ["CASES", "Case", "tensors_of"]
