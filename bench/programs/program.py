"""A random program as plain data, and as the few lines of Python that it is.

    Program(
        inputs=(Input("x0", ("s0", 3), "float32"),),
        steps=(
            Step("v0", "{v[0]}.narrow({n[0]}, {n[1]}, {n[2]})", ("x0",), (1, 0, 2)),
            Step("", "{v[0]}.mul_({n[0]})", ("v0",), (2,)),
        ),
        results=("v0",),
        calls=({"s0": 4}, {"s0": 7}),
        dynamic=True,
    )

is the function `v0 = x0.narrow(1, 0, 2); v0.mul_(2); return v0`, compiled once and called with two sizes.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

Size = int | str  # a number, or the name of a size that each call gives


@dataclasses.dataclass(frozen=True)
class Input:
    """A tensor the caller makes: fresh numbers laid out in some way, or a view of an earlier input.

    `values` is "normal", "eighths" (few bits, so that sums are exact and comparisons meet ties), or for whole numbers
    "below N" with a number or the name of a size. `base`, with `layout` as a template, makes it a view of another
    input.
    """

    name: str
    shape: tuple[Size, ...]
    dtype: str
    layout: str = "{}"
    values: str = "normal"
    base: str = ""

    def expression(self, *, gradients: bool = False, wide: bool = False, device: str = "cpu") -> str:
        """What makes it; `wide` has the same numbers in float64. On any device they are those that the CPU draws: with
        these the program was tried, and on a GPU an index that points outside ends the process."""
        if self.base:
            return self.layout.format(self.base)
        shape = f"({', '.join(map(str, self.shape))}{',' if len(self.shape) == 1 else ''})"
        made, dtype = self.numbers(shape, "" if device == "cpu" else f', device="cpu").to("{device}"')
        if self.dtype != dtype:
            made += f".to(torch.{self.dtype})"
        if wide and self.floating:
            made += ".to(torch.float64)"
        if gradients and self.floating:
            made += ".requires_grad_()"
        return made

    def numbers(self, shape: str, moved: str = "") -> tuple[str, str]:
        """What draws them, and their type; `moved`: how the call ends that draws."""
        if self.values.startswith("below"):
            return f"torch.randint(0, {self.values.removeprefix('below ')}, {shape}{moved})", "int64"
        if self.dtype == "bool":
            return f"torch.randint(0, 2, {shape}{moved})", "int64"
        if not self.floating:
            return f"torch.randint(-4, 9, {shape}{moved})", "int64"
        if self.values == "eighths":
            return f"torch.randint(-16, 17, {shape}{moved}).div(8)", "float32"
        return f"torch.randn({shape}{moved})", "float32"

    @property
    def floating(self) -> bool:
        return "float" in self.dtype


@dataclasses.dataclass(frozen=True)
class Step:
    """A line: `target = text`, or `text` alone where there is no target. `{v[0]}` is an operand, `{n[0]}` a number
    or another word.
    """

    target: str
    template: str
    operands: tuple[str, ...] = ()
    numbers: tuple[Any, ...] = ()

    @property
    def targets(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.target.split(",")) if self.target else ()

    def text(self) -> str:
        return self.template.format(v=self.operands, n=self.numbers)

    def line(self) -> str:
        return f"{self.target} = {self.text()}" if self.target else self.text()


@dataclasses.dataclass(frozen=True)
class Program:
    inputs: tuple[Input, ...]
    steps: tuple[Step, ...]
    results: tuple[str, ...]
    calls: tuple[Mapping[str, int], ...] = ({},)
    dynamic: bool = False
    training: bool = False
    from_data: bool = False  # sizes and numbers from data stay in the graph
    device: str = "cpu"  # of everything that does not say where it is: "cuda", where programs are run on a GPU

    @property
    def sizes(self) -> list[str]:
        texts = [f"{each.shape} {each.layout} {each.values}" for each in self.inputs]
        return sorted({name for text in texts for name in re.findall(r"\bs\d\b", text)})

    def argument_names(self) -> str:
        return ", ".join(each.name for each in self.inputs)

    def definition(self, after_each: str = "") -> str:
        """The function; `after_each` is a line put after every step, with the name of the tensor it made or wrote, and
        those of its operands."""
        lines = [f"def program({self.argument_names()}):"]
        for step in self.steps:
            lines.append(step.line())
            if after_each:
                operands = ", ".join(step.operands)
                lines += [after_each.format(name, operands) for name in step.targets or step.operands[:1]]
        lines.append(f"return {', '.join(self.results)}{',' if len(self.results) == 1 else ''}")
        return "\n    ".join(lines) + "\n"

    def maker(self, *, wide: bool = False) -> str:
        """The function that makes its inputs: leaves, which have gradients, and arguments, which are views of them."""
        lines = [f"def inputs({', '.join(self.sizes)}):", "torch.manual_seed(0)"]
        leaves = []
        for each in self.inputs:
            if each.base:
                lines.append(f"{each.name} = {each.expression()}")
                continue
            leaves.append(each.name if each.layout == "{}" else f"leaf_{each.name}")
            lines.append(f"{leaves[-1]} = {each.expression(gradients=self.training, wide=wide, device=self.device)}")
            if each.layout != "{}":
                lines.append(f"{each.name} = {each.layout.format(leaves[-1])}")
        lines.append(f"return [{', '.join(leaves)}], [{self.argument_names()}]")
        return "\n    ".join(lines) + "\n"

    def source(self, backend: str = "ferrite") -> str:
        """The whole as a file that runs by itself."""
        settings = ['backend="ferrite", options={"strict": True}' if backend == "ferrite" else f'backend="{backend}"']
        settings += ["dynamic=True"] if self.dynamic else []
        lines = ["import torch", ""]
        if self.device != "cpu":
            lines += [f"torch.set_default_device({self.device!r})"]
        if self.from_data:
            lines += ["torch._dynamo.config.capture_scalar_outputs = True"]
            lines += ["torch._dynamo.config.capture_dynamic_output_shape_ops = True"]
        lines += ["", self.maker(), self.definition(), f"compiled = torch.compile(program, {', '.join(settings)})"]
        calls = ", ".join("{" + ", ".join(f'"{n}": {c[n]}' for n in self.sizes) + "}" for c in self.calls)
        lines += [f"for sizes in [{calls}]:", "    for run in (program, compiled):"]
        lines += ["        leaves, arguments = inputs(**sizes)", "        results = run(*arguments)"]
        lines += ["        print([(r, r.stride() if isinstance(r, torch.Tensor) else ()) for r in results])"]
        if self.training:
            lines += ["        sum(r.sum().double() for r in results if r.requires_grad).backward()"]
            lines += ["        print([leaf.grad for leaf in leaves])"]
        return "\n".join(lines) + "\n"

    def as_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @staticmethod
    def from_json(data: Mapping[str, Any]) -> Program:
        inputs = tuple(Input(**{**each, "shape": tuple(each["shape"])}) for each in data["inputs"])
        steps = tuple(
            Step(
                each["target"],
                each["template"],
                tuple(each["operands"]),
                tuple(tuple(n) if isinstance(n, list) else n for n in each["numbers"]),
            )
            for each in data["steps"]
        )
        rest = {name: data[name] for name in ("dynamic", "training", "from_data", "device") if name in data}
        return Program(inputs, steps, tuple(data["results"]), tuple(data["calls"]), **rest)


def defined(inputs: Sequence[Input], steps: Sequence[Step]) -> list[str]:
    return [each.name for each in inputs] + [name for step in steps for name in step.targets]
