"""A pass is a frozen object around one function; a pipeline is a tuple of passes.

    @graph_pass(stage="post_grad")
    def remove_assert_ops(gm, context):
        '''Metadata assertions generate nothing: erase them.'''
        ...
        return count

The name is the function's, the purpose the first line of its docstring. Users write passes the same way and say where
they go: `@ferrite.graph_pass(stage="post_grad", after="remove_noop_ops")`.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from ferrite.errors import UserError, nearest
from ferrite.pipeline.context import PassContext

StageName = Literal["pre_grad", "joint", "freeze", "post_grad"]
Scope = Literal["always", "inference", "training"]
PassFunction = Callable[[torch.fx.GraphModule, PassContext], int | None]


@dataclass(frozen=True)
class GraphPass:
    """One named step of a stage. `function` edits the module in place and returns the number of rewrites, or None
    if it does not count.

    A `required` pass cannot be skipped when it fails: the graph would not be valid without it.
    """

    name: str
    stage: StageName
    function: PassFunction = field(compare=False)
    purpose: str
    after: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    scope: Scope = "always"
    device: str = ""  # run only where some value of the graph is on a device of this type
    with_collectives: bool = False  # run only where the graph has collectives
    required: bool = False
    alone: Callable[..., torch.fx.GraphModule] | None = field(default=None, compare=False)  # how to run it by itself
    keeps_values: bool = False  # calls are only spelled otherwise: no value has to be computed again
    rules: tuple[Any, ...] = field(default=(), compare=False)
    names: tuple[str, ...] = ()  # of its parts, if it has any: each can be left out, and is a place for users' passes
    original: Callable[..., Any] | None = None  # what it was made of

    @functools.cached_property
    def identity(self) -> str:
        """What tells it from other versions; found when it is asked for, as sources take long to read."""
        return "" if self.original is None else identity_of(self.original)

    def __call__(self, gm: torch.fx.GraphModule, *args: Any, is_inference: bool = False) -> torch.fx.GraphModule:
        """Run this pass alone, in place. Passes of some stages take more: example inputs, say."""
        from ferrite.options import resolve
        from ferrite.pipeline.pass_manager import run_pipeline

        if self.alone is not None:
            return self.alone(self, gm, *args, is_inference=is_inference)
        is_inference = bool(args[0]) if args else is_inference
        alone = Pipeline(self.name, (self,))
        run_pipeline(alone, gm, PassContext(resolve({"strict": True}), is_inference))
        return gm

    @property
    def remark(self) -> str:
        """When it runs, in brackets, if not always."""
        return "" if self.scope == "always" else f"  [{self.scope} only]"

    def applies(self, is_inference: bool) -> bool:
        return self.scope == "always" or (self.scope == "inference") == is_inference


def graph_pass(
    function: Callable[..., Any] | None = None,
    *,
    stage: StageName = "post_grad",
    name: str | None = None,
    after: str | Sequence[str] = (),
    before: str | Sequence[str] = (),
    scope: Scope = "always",
    device: str = "",
    with_collectives: bool = False,
    required: bool = False,
    keeps_values: bool = False,
    alone: Callable[..., torch.fx.GraphModule] | None = None,
    rules: Sequence[Any] = (),
    names: tuple[str, ...] = (),
) -> Any:
    """Make a pass of a function `(gm, context)` or `(gm)`."""
    if function is None:
        return functools.partial(
            graph_pass,
            stage=stage,
            name=name,
            after=after,
            before=before,
            scope=scope,
            device=device,
            with_collectives=with_collectives,
            required=required,
            keeps_values=keeps_values,
            alone=alone,
            rules=rules,
            names=names,
        )
    purpose = (inspect.getdoc(function) or "").partition("\n")[0]
    return GraphPass(
        name=name or str(getattr(function, "__name__", type(function).__name__)),
        stage=stage,
        function=taking_context(function),
        purpose=purpose,
        after=(after,) if isinstance(after, str) else tuple(after),
        before=(before,) if isinstance(before, str) else tuple(before),
        scope=scope,
        device=device,
        with_collectives=with_collectives,
        required=required,
        keeps_values=keeps_values,
        alone=alone,
        rules=tuple(rules),
        names=names,
        original=function,
    )


def taking_context(function: Callable[..., Any]) -> PassFunction:
    """Let a pass leave out the context if it does not need it."""
    try:
        parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return lambda gm, _context: function(gm)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL)]
    takes_two = len(positional) >= 2 or any(p.kind is p.VAR_POSITIONAL for p in positional)
    return function if takes_two else (lambda gm, _context: function(gm))


def identity_of(function: Callable[..., Any]) -> str:
    """What tells one version of a pass from another, for the cache: an explicit uuid(), or its source and fields."""
    uuid = getattr(function, "uuid", None)
    if callable(uuid):
        return str(uuid())
    source = inspect.unwrap(function) if inspect.isfunction(function) else type(function)
    try:
        text = inspect.getsource(source)
    except (OSError, TypeError):
        return ""  # unknown: results may not be cached
    fields = repr(sorted(vars(function).items())) if not inspect.isfunction(function) else ""
    return hashlib.sha256(f"{text}{fields}".encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Pipeline:
    """Passes in the order they run. Printing it is the documentation of the order.

    What the option `extra` names runs once more, before the pass `closing`; without one, nothing does. Nor does the
    option `rounds` repeat anything then.
    """

    name: str
    passes: tuple[GraphPass, ...]
    closing: str = ""

    def __post_init__(self) -> None:
        position: dict[str, int] = {}
        for index, step in enumerate(self.passes):
            if step.name in position:
                raise UserError(
                    f"two passes of the stage {self.name} are called {step.name!r}",
                    {"to change that": "give one of them another name: @ferrite.graph_pass(name=...)"},
                )
            position |= dict.fromkeys((step.name, *step.names), index)
        for index, step in enumerate(self.passes):
            for other in step.after:
                if position.get(other, -1) > index:
                    raise UserError(f"pass {step.name!r} must run after {other!r}, which stands behind it")
            for other in step.before:
                if position.get(other, len(self.passes)) < index:
                    raise UserError(f"pass {step.name!r} must run before {other!r}, which stands in front of it")

    def with_passes(self, more: Sequence[GraphPass]) -> Pipeline:
        """Users' passes put in their places: right behind what they name in `after`, right before what they name in
        `before`, at the end if they name nothing."""
        passes = list(self.passes)
        for step in more:
            index = {name: place for place, known in enumerate(passes) for name in (known.name, *known.names)}
            for other in (*step.after, *step.before):
                if other not in index:
                    raise UserError(
                        f"pass {step.name!r} wants a place beside {other!r}, which is no pass of {self.name}",
                        {"did you mean": nearest(other, list(index)), "all passes": "ferrite.passes.describe()"},
                    )
            lowest = max((index[other] + 1 for other in step.after), default=0)
            highest = min((index[other] for other in step.before), default=len(passes))
            if lowest > highest:
                raise UserError(f"pass {step.name!r} cannot run both after {step.after} and before {step.before}")
            passes.insert(highest if step.before or not step.after else lowest, step)
        return Pipeline(self.name, tuple(passes), self.closing)

    @property
    def repeatable(self) -> tuple[GraphPass, ...]:
        """The passes that can run once more."""
        names = [step.name for step in self.passes]
        return self.passes[: names.index(self.closing)] if self.closing in names else ()

    def only_required(self) -> Pipeline:
        """What must run even where the stage is switched off."""
        return Pipeline(self.name, tuple(step for step in self.passes if step.required))

    def __str__(self) -> str:
        width = max((len(step.name) for step in self.passes), default=0)
        rows = [f"{self.name}: {len(self.passes)} passes"]
        for number, step in enumerate(self.passes, 1):
            rows.append(f"{number:>4}  {step.name:<{width}}  {step.purpose}{step.remark}")
        return "\n".join(rows)
