"""Rules whose result pays only where it becomes a kernel: which of them run, by the option kernel_rewrites.

As calls of torch such a form is right, but no faster than what it replaces. Some forms pay in kernels of any device;
some were made for the kernels of GPUs, where memory is the limit and atomics are dear, and are left alone on a CPU,
node by node. Others are slower as torch computes them than what ferrite makes of the parts, or were not measured
(`bench/results/kernel_rewrites-aarch64.md`): those run only where `always` asks for them.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferrite.errors import Refusal
from ferrite.graph import fake_value
from ferrite.options import Options
from ferrite.passes.shared.facts import on_cpu
from ferrite.rewrite import AnyRule, Match, NodeRule, Rule, Site

ON_CPU = Refusal("it pays in kernels of a GPU alone: the option kernel_rewrites says when it runs")


def becomes_a_kernel(options: Options) -> bool:
    """Whether forms are taken that pay in kernels of any device."""
    return options.kernel_rewrites == "always" or (options.kernel_rewrites == "auto" and options.executor == "native")


@dataclasses.dataclass(frozen=True)
class KernelRules:
    """`everywhere`: rules for kernels of any device; `accelerators`: of GPUs; `asked`: where `always` asks for them."""

    everywhere: Sequence[AnyRule] = ()
    accelerators: Sequence[NodeRule | Rule] = ()
    asked: Sequence[AnyRule] = ()

    @functools.cached_property
    def by_device(self) -> tuple[AnyRule, ...]:
        return (*self.everywhere, *map(on_accelerators, self.accelerators))

    @property
    def all(self) -> tuple[AnyRule, ...]:
        return (*self.everywhere, *self.accelerators, *self.asked)

    def wanted(self, options: Options) -> tuple[AnyRule, ...]:
        if options.kernel_rewrites == "always":
            return self.all
        return self.by_device if becomes_a_kernel(options) else ()


def on_accelerators(rule: NodeRule | Rule) -> AnyRule:
    """The same rule, left alone on a CPU."""
    if isinstance(rule, Rule):
        return dataclasses.replace(rule, when=(*rule.when, not_on_cpu))
    return dataclasses.replace(rule, rewrite=elsewhere(rule.rewrite))


def not_on_cpu(match: Match) -> Refusal | None:
    return ON_CPU if any(map(is_on_cpu, match.roots)) else None


def elsewhere(rewrite: Callable[[Site], Any]) -> Callable[[Site], Any]:
    return lambda site: ON_CPU if is_on_cpu(site.node) else rewrite(site)


def is_on_cpu(node: torch.fx.Node) -> bool:
    value = fake_value(node)
    return isinstance(value, torch.Tensor) and on_cpu(value)
