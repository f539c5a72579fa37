"""Whether a compression of embeddings pays in its other form, for `auto` in the option `compress`.

There is no kernel of its own for any of the forms yet, so what counts is what they are in eager. As `python -m
bench.passes rewrites` has it, also `--compiled`, in time after the rewrite to time before; a range is of machines, and
of inference and training:

    lce-first       two on one input                        0.5 to 1.0      taken
    lce-matmul      few rows of large tables, on a CPU      0.6 to 1.0      taken
                    the same in training, compiled          1.0 to 1.1      left: there the concat is cheap
                    many rows, or small tables              1.0 to 1.9      left
    lce-parts       the same, as one operator               0.8 to 1.9      left: lce-matmul does better
    lce-simple      a layer between transposes, on a CPU,
                    of long samples                         0.4 to 0.8      taken in inference
                    of short ones                           1.0 to 1.2      left
                    in training, or on a GPU                0.8 to 1.9      left
    dot-compress    half the operations, on a CPU           0.4 to 0.6      taken
                    on a GPU                                1.2 to 1.3      left

Where the option kernel_rewrites says `always`, every form is taken wherever it is right, as if a kernel did it.
"""

from __future__ import annotations

import math

import torch

from ferrite.capture import torch_api
from ferrite.errors import Refusal
from ferrite.graph import fake_value, storage_bytes
from ferrite.machines import host_machine
from ferrite.options import Options
from ferrite.passes.pre_grad.compress_forms import ConcatParts, Dot, Lce
from ferrite.passes.pre_grad.horizontal import hints
from ferrite.rewrite import Site

LITTLE = Refusal("it gains too little, by the model of the option compress")


def way(options: Options, name: str) -> str:
    """Whoever names a form wants it wherever it is right; `auto` is for all of them, where they pay."""
    return "always" if name in options.compress else "auto" if "auto" in options.compress else "off"


def left_to_the_model(site: Site, name: str) -> bool:
    return way(site.options, name) == "auto" and site.options.kernel_rewrites != "always"


def on_cpu(node: torch.fx.Node) -> bool:
    return bool(fake_value(node).device.type == "cpu")


def simple_problem(site: Site, found: Lce) -> Refusal | None:
    if not left_to_the_model(site, "lce-simple"):
        return None
    long = torch_api.size_hint(fake_value(found.x).shape[2]) >= host_machine().compression.min_sample_columns
    pays = on_cpu(found.x) and found.form == "linear" and not found.swapped and site.is_inference and long
    return None if pays else LITTLE


def parts_problem(site: Site) -> Refusal | None:
    return LITTLE if left_to_the_model(site, "lce-parts") else None


def products_problem(site: Site, found: Lce, parts: ConcatParts) -> Refusal | None:
    if not left_to_the_model(site, "lce-matmul"):
        return None
    x, weight = fake_value(found.x), fake_value(found.weight)
    joined = torch_api.size_hint(storage_bytes(x))
    least = min(parts.widths) * torch_api.size_hint(x.shape[2]) * x.element_size()
    sizes, dear = host_machine().compression, site.is_inference or site.options.executor != "native"
    is_large = joined >= sizes.min_concat_bytes and least >= sizes.min_part_bytes
    pays = on_cpu(found.x) and weight.shape[0] <= sizes.max_weight_rows and dear and is_large
    return None if pays else LITTLE


def dot_problem(site: Site, found: Dot) -> Refusal | None:
    if not left_to_the_model(site, "dot-compress"):
        return None
    batch, n, d = hints(fake_value(found.x).shape)
    m, k = hints(fake_value(found.weight).shape[-2:])
    before, after = math.prod((batch, n, m, d + k)), math.prod((batch, d, k, m + n))
    sizes = host_machine().compression
    is_large = before >= sizes.min_dot_multiplications
    return None if on_cpu(found.x) and is_large and before >= sizes.least_times_fewer * after else LITTLE
