"""The names under which users ask for passes in the options `skip`, `extra` and `rounds`.

A pass has the name of its function. Other names lead to it too: with hyphens, without `_pass` at the end, and the short
names below. A pass may have parts with names of their own: each can be skipped by itself; who asks for one of them once
more gets the whole pass. Blanks around a name do not count, nor does an empty one; a name that leads nowhere is an
error.
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
    # Inside the pre-grad stage every call is an ATen operator: what other compilers do there twice is done once.
    "normalization_pass_aten": ("normalization_pass",),
    **{
        f"{name}_aten": (name,)
        for name in (
            *("remove_split_with_size_one_pass", "merge_splits_pass", "merge_stack_tahn_unbind_pass"),
            *("mutate_cat_pass", "merge_getitem_cat_pass", "split_cat_pass", "unbind_stack_pass"),
        )
    },
}


def with_full_names(options: Options, pipelines: Sequence[Pipeline]) -> Options:
    """The options with every pass in `skip`, `extra` and `rounds` by its own name, each once."""
    if not options.skip and not options.extra and not options.rounds:
        return options
    everywhere = [step for pipeline in pipelines for step in pipeline.passes]
    repeatable = [step for pipeline in pipelines for step in pipeline.repeatable]
    to_skip = {name: name for step in (*everywhere, *options.passes) for name in (step.name, *step.names)}
    to_repeat = {name: step.name for step in repeatable for name in (step.name, *step.names)}
    again = {each.name: full_names("rounds", [each.name], to_repeat) for each in options.rounds}
    return dataclasses.replace(
        options,
        skip=full_names("skip", options.skip, to_skip),
        extra=full_names("extra", options.extra, to_repeat),
        rounds=tuple(Rounds(full, each.times) for each in options.rounds for full in again[each.name]),
    )


def full_names(option: str, given: Iterable[str], passes: Mapping[str, str]) -> tuple[str, ...]:
    """What names lead to, each once; `passes` says for every full name which pass, or part of one, it stands for."""
    meaning: dict[str, tuple[str, ...]] = {plain(short): full for short, full in SHORT_NAMES.items()}
    meaning |= {plain(name.removesuffix("_pass")): (name,) for name in passes}
    meaning |= {plain(name): (name,) for name in passes}
    chosen: dict[str, None] = {}
    for name in filter(None, map(str.strip, given)):
        full = meaning.get(plain(name), ())
        if not full or not set(full) <= set(passes):
            raise UserError(
                f"option {option!r} names {name!r}, which is no pass" + (" to run again" if option != "skip" else ""),
                {
                    "did you mean": nearest(name.replace("-", "_"), list(passes)),
                    "all passes": "ferrite.passes.describe()",
                },
            )
        chosen |= dict.fromkeys(passes[each] for each in full)
    return tuple(chosen)


def plain(name: str) -> str:
    return name.strip().replace("-", "_").strip("_")
