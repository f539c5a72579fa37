"""Arguments written on a command line: `f32[8,16]` is a tensor, anything else a Python literal.

f32[8,16]        random normal numbers
i64[4,10]<100    random integers from 0 to 99 (below 2 without a bound)
bool[3]          random truth values
3   0.5   None   the value itself
"""

from __future__ import annotations

import ast
import re
from typing import Any

import torch

from ferrite.errors import UserError, nearest
from ferrite.graph import SHORT_NAMES

DTYPES = {name: dtype for dtype, name in SHORT_NAMES.items()}
TENSOR = re.compile(r"(?P<dtype>\w+)\[(?P<shape>[\d,\s]*)\](?:<(?P<bound>\d+))?$")


def parse_argument(text: str, requires_grad: bool = False) -> Any:
    found = TENSOR.match(text.strip())
    if found is None:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError):
            raise UserError(
                f"cannot read the argument {text!r}",
                {"expected": "a tensor such as f32[8,16] or i64[4]<100, or a Python literal such as 3 or None"},
            ) from None
    dtype = DTYPES.get(found["dtype"])
    if dtype is None:
        known = ", ".join(DTYPES)
        raise UserError(
            f"unknown dtype {found['dtype']!r} in {text!r}",
            {"did you mean": nearest(found["dtype"], DTYPES), "known": known},
        )
    shape = [int(size) for size in found["shape"].split(",") if size.strip()]
    if dtype.is_floating_point or dtype.is_complex:
        wide = torch.complex64 if dtype.is_complex else torch.float32
        return torch.randn(shape, dtype=wide).to(dtype).requires_grad_(requires_grad)
    return torch.randint(0, int(found["bound"] or 2), shape).to(dtype)
