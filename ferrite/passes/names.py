"""The names under which users ask for passes in the options `skip`, `extra` and `rounds`.

A pass has the name of its function. Other names lead to it too: with hyphens, without `_pass` at the end, and the short
names below. Blanks around a name do not count, nor does an empty one; a name that leads nowhere is an error.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ferrite.errors import UserError, nearest
from ferrite.options import Options, Rounds
from ferrite.pipeline import Pipeline

SHORT_NAMES: Mapping[str, tuple[str, ...]] = {
    "numpy-compat": ("numpy_compat_normalization",),
    "canonical-arguments": ("normalize_node_kwargs_pass",),
    "canonical-ops": ("normalization_pass",),
    "remove-split": ("remove_split_ops_pass",),
    "sink-cat": ("sink_cat_after_pointwise",),
    "fold-transpose": ("linear_permute_fusion", "permute_linear_fusion", "permute_matmul_fusion"),
    "split-linear-add": ("fuse_split_linear_add_pass",),
    "parallel-linear": ("fuse_parallel_linear_pass",),
    "lce-simple": ("use_triton_lce_replace_simple_LCE",),
    "lce-parts": ("use_triton_lce_replace_normal_LCE",),
    "lce-matmul": ("use_matmul_lce_replace_normal_LCE",),
    "lce-first": ("use_matmul_fuse_lce_replace_first_LCE",),
    "dot-compress": ("use_triton_dot_compress",),
    "fold-conv-bn": ("fuse_conv_bn",),
    "eval-conv-bn": ("efficient_conv_bn_eval",),
    "gumbel-argmax": ("apply_gumbel_max_trick",),
    "lift-quantize": ("quant_lift_up",),
}


def with_full_names(options: Options, pipelines: Sequence[Pipeline]) -> Options:
    """The options with every pass in `skip`, `extra` and `rounds` by its own name, each once."""
    if not options.skip and not options.extra and not options.rounds:
        return options
    everywhere = [step.name for pipeline in pipelines for step in pipeline.passes]
    repeatable = [step.name for pipeline in pipelines for step in pipeline.repeatable]
    own = [step.name for step in options.passes]
    return dataclasses.replace(
        options,
        skip=full_names("skip", options.skip, [*everywhere, *own]),
        extra=full_names("extra", options.extra, repeatable),
        rounds=tuple(
            Rounds(full, each.times)
            for each in options.rounds
            for full in full_names("rounds", [each.name], repeatable)
        ),
    )


def full_names(option: str, given: Iterable[str], passes: Sequence[str]) -> tuple[str, ...]:
    known: dict[str, tuple[str, ...]] = {plain(short): full for short, full in SHORT_NAMES.items()}
    known |= {plain(name.removesuffix("_pass")): (name,) for name in passes}
    known |= {plain(name): (name,) for name in passes}
    found: dict[str, None] = {}
    for name in filter(None, map(str.strip, given)):
        full = known.get(plain(name), ())
        if not full or not set(full) <= set(passes):
            raise UserError(
                f"option {option!r} names {name!r}, which is no pass" + (" to run again" if option != "skip" else ""),
                {"did you mean": nearest(name.replace("-", "_"), passes), "all passes": "ferrite.passes.describe()"},
            )
        found |= dict.fromkeys(full)
    return tuple(found)


def plain(name: str) -> str:
    return name.strip().replace("-", "_").strip("_")
