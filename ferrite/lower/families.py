"""The files of lowerings, one per family of operators; importing them fills the tables."""

from __future__ import annotations

import importlib

FAMILIES = (
    "pointwise",
    "powers",
    "comparisons",
    "special",
    "activations",
    "create",
    "complex",
    "random",
    "prims",
    "views",
    "concat",
    "strided",
    "index",
    "scatter",
    "pool",
    "adaptive_pool",
    "convolution",
    "dense_convolution",
    "resample",
    "pads",
    "grid",
    "bags",
    "distance",
    "reduce",
    "normalise",
    "batch_norm",
    "losses",
    "products",
    "byte_products",
    "scan",
    "order_statistics",
    "control",
    "attention",
    "collectives",
    "data_scalars",
    "effects",
    "foreach",
    "quantize",
)
LAST = ("library",)  # takes what no other family has


def load() -> None:
    for family in (*FAMILIES, *LAST):
        importlib.import_module(f"ferrite.lower.ops.{family}")
