"""Attention with functions of the user on its scores: matrix products around the functions as elementwise loops."""

from __future__ import annotations

from ferrite.capture import torch_api, torch_operators
from ferrite.lower.table import composes

for _name in ("flex_attention", "flex_attention_backward"):
    if (_found := torch_api.higher_order(_name)) is not None:
        composes(_found, by=torch_operators.eager_form(_found))
