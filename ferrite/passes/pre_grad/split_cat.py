"""Splits against concats, as one pass with many names.

    cat([a, p[2], p[3], p[4], b], d), p = split(x, .., d)      =>      cat([a, x[m:n], b], d)

`pieces` has the algebra, `piece_runs` says when a run of pieces is worth it, `sections` what becomes of splits,
`concats` what becomes of cats of cats. Each part has the name under which readers of other compilers look for it. By
that name it can be chosen (option `split_cat`), left out (option `skip`) and run alone, as
`ferrite.passes.pre_grad.split_cat_pass`; its first rule has the name, too. Inside the stage every call is an ATen
operator, so that a name with `_aten` at its end means the same part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ferrite.options import Options, at_least, choice_of
from ferrite.passes.pre_grad import concats, run_rules, split_rules
from ferrite.passes.pre_grad.splits import SPLITS
from ferrite.passes.pre_grad.stage import pre_grad_pass
from ferrite.pipeline import GraphPass, PassContext
from ferrite.rewrite import AnyRule, apply_rules

# In the order in which they run: what is taken whole comes before what is taken in part, copies come last.
PARTS: Mapping[str, tuple[AnyRule, ...]] = {
    rules[0].name: rules
    for rules in (
        concats.TO_CATS,
        concats.NESTED,
        split_rules.ONE_SECTION,
        split_rules.SPLIT_TWICE,
        split_rules.STACKED_CALLS,
        (run_rules.MUTATE_CAT,),
        split_rules.FEWER_SECTIONS,
        (run_rules.SPLIT_CAT, *split_rules.SPLIT_SQUEEZE),
        (run_rules.UNBIND_STACK,),
        (run_rules.SPLIT_CAT_TO_SLICES,),
        (run_rules.UNBIND_CAT_TO_VIEW,),
        (run_rules.SPLIT_STACK_TO_CATS,),
        (run_rules.UNBIND_STACK_TO_SLICES,),
        (run_rules.RESHAPED_STACK,),
        (run_rules.RESHAPED_CAT,),
        (run_rules.RESHAPED_UNSQUEEZED_CAT,),
        (run_rules.SQUEEZED_CAT,),
        (run_rules.SOME_SQUEEZED_CAT,),
        concats.TO_STACKS,
        (run_rules.CAT_TO_COPY,),
    )
}
# Names of some of the runs that another part takes: they are of use where that part is left out.
COVERED_BY = {
    "split_cat_to_slices_pass": "split_cat_pass",
    "split_stack_to_cats_pass": "split_cat_pass",
    "unbind_cat_to_view_pass": "unbind_stack_pass",
    "unbind_stack_to_slices_pass": "unbind_stack_pass",
}


@dataclass(frozen=True)
class PartSettings:
    """What a part may be told beside its name; without, the option split_cat_min_run holds."""

    min_run: int = at_least(2, 2)


@pre_grad_pass(rules=[rule for rules in PARTS.values() for rule in rules], names=tuple(PARTS))
def cancel_split_cat_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Splits, unbinds, cats and stacks that undo each other are cancelled, or become one. Each part has a name."""
    return sum(apply_part(gm, name, PARTS[name], context) for name in chosen(PARTS, context.options))


# Batches are made in between, where a call on a stack is what was wanted.
ONCE = "merge_stack_tahn_unbind_pass"
# Of a split whose other items went in between, a single item may be left.
AGAIN: Mapping[str, Sequence[AnyRule]] = {
    **{name: rules for name, rules in PARTS.items() if name != ONCE},
    "remove_split_ops_pass": SPLITS,
}


@pre_grad_pass(rules=[rule for rules in AGAIN.values() for rule in rules])
def split_cat_again_pass(gm: torch.fx.GraphModule, context: PassContext) -> int:
    """Splits and cats that passes in between have made are cancelled by the same rules; what is skipped stays out."""
    return sum(apply_part(gm, name, AGAIN[name], context) for name in chosen(AGAIN, context.options))


def chosen(names: Iterable[str], options: Options) -> list[str]:
    """The parts that are not left out, without those whose runs another takes."""
    left_out = set(options.skip)
    taken = {name for name, other in COVERED_BY.items() if options.split_cat == "on" and other not in left_out}
    return [name for name in names if name not in left_out | taken]


def apply_part(gm: torch.fx.GraphModule, name: str, rules: Sequence[AnyRule], context: PassContext) -> int:
    """Apply the rules of one part, unless the option split_cat leaves it out; how often they fired."""
    options = options_for(name, context.options)
    if options is None:
        return 0
    targets = {target for rule in rules for target in rule.targets}
    # most graphs have neither splits nor cats: asking for them costs less than getting the engine ready
    if not any(gm.graph.find_nodes(op="call_function", target=target, sort=False) for target in targets):
        return 0
    own = replace(context, options=options)
    count = apply_rules(gm, rules, own)
    context.steps = own.steps
    return count


def options_for(name: str, options: Options) -> Options | None:
    """The options with what a part was told; None where it is not to run."""
    if isinstance(options.split_cat, str):
        return options if options.split_cat == "on" else None
    choice = choice_of(options.split_cat, name)
    if choice is None:
        return None
    least = dict(choice.settings).get("min_run", options.split_cat_min_run)
    return replace(options, split_cat_min_run=least)


def part_alone(name: str) -> GraphPass:
    """One part as a pass of its own, to be run alone."""
    rules = PARTS[name]

    def run(gm: torch.fx.GraphModule, context: PassContext) -> int:
        return apply_part(gm, name, rules, context)

    run.__doc__ = f"{rules[0].purpose[0].upper()}{rules[0].purpose[1:]}."
    made: GraphPass = pre_grad_pass(run, name=name, rules=rules)
    return made
