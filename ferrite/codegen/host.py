"""Print a host program as Python.

For `torch.relu(x) + 1` the text is, all of it:

    import torch
    aten_relu = torch.ops.aten.relu.default
    aten_add_Tensor = torch.ops.aten.add.Tensor

    def inference(args):
        (
            arg0_1,  # f32[2, 3]
        ) = args
        args.clear()
        relu = aten_relu(arg0_1)                   # f32[2, 3]  net.py:7  return torch.relu(x) + 1
        del arg0_1
        add = aten_add_Tensor(relu, 1)             # f32[2, 3]
        del relu
        return (add,)
"""

from __future__ import annotations

from dataclasses import dataclass

from ferrite.ir import (
    Allocate,
    Argument,
    Bind,
    Call,
    Constant,
    Evaluate,
    Free,
    HostProgram,
    Literal,
    Mapping,
    Ref,
    Restride,
    Sequence,
    Slice,
    Step,
)

COMMENT_COLUMN = 72
CALLING = ("torch", "math", "operator", "args", "restride")  # names that the text itself uses

INFIX = {
    "add": "+",
    "sub": "-",
    "mul": "*",
    "truediv": "/",
    "floordiv": "//",
    "mod": "%",
    "pow": "**",
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "and_": "&",
    "or_": "|",
    "xor": "^",
    "lshift": "<<",
    "rshift": ">>",
}

# function of an Evaluate step -> how it is written; any other function is called by its importable name
SPELLINGS = {f"operator.{name}": f"{{0}} {symbol} {{1}}" for name, symbol in INFIX.items()} | {
    "operator.neg": "-{0}",
    "operator.not_": "not {0}",
    "operator.getitem": "{0}[{1}]",
    "size": "{0}.size({1})",
    "stride": "{0}.stride({1})",
    "numel": "{0}.numel()",
    "storage_offset": "{0}.storage_offset()",
}


@dataclass(frozen=True)
class HostSource:
    """The text, the name of the function it defines, and which names stand for which operators."""

    function: str
    text: str
    operators: tuple[tuple[str, str], ...]


def print_host(program: HostProgram) -> HostSource:
    operators = name_operators(program)
    lines = ["import math", "import operator", "", "import torch", ""]
    lines += [f"{name} = torch.ops.{path}" for path, name in operators.items()]
    lines += ["", "", f"def {program.name}(args):", *unpack(program)]
    last_place = None
    for step in program.steps:
        place = step.line.place if isinstance(step, (Call, Allocate)) and step.line is not None else None
        remark = comment(step, place != last_place)
        text = f"    {print_step(step, operators)}"
        lines.append(f"{text:<{COMMENT_COLUMN}}  # {remark}" if remark else text)
        last_place = place or last_place
    lines.append(f"    return {print_argument(Sequence('tuple', program.outputs))}")
    named = tuple((name, path) for path, name in operators.items())
    return HostSource(program.name, "\n".join(lines) + "\n", named)


def name_operators(program: HostProgram) -> dict[str, str]:
    """A global name for each operator that cannot be mistaken for a value of the program."""
    taken = {item.name for item in program.inputs} | {program.name, *CALLING}
    for step in program.steps:
        taken.update(() if isinstance(step, (Bind, Free)) else (step.result or "",))
    names: dict[str, str] = {}
    for call in program.calls:
        if isinstance(call.operator, Constant) or call.operator in names:
            continue
        name = call.operator.removesuffix(".default").replace(".", "_").replace("::", "_")
        while name in taken:
            name += "_"
        taken.add(name)
        names[call.operator] = name
    return names


def unpack(program: HostProgram) -> list[str]:
    """Take ownership of the inputs: the caller's list is emptied, so that they can be freed while running."""
    if not program.inputs:
        return ["    args.clear()"]
    notes = {True: {True: "static, donated", False: "static"}, False: {True: "donated", False: ""}}
    rows = []
    for item in program.inputs:
        note = notes[item.static][item.donated]
        rows.append(f"        {item.name},  # {item.about}" + (f" {note}" if note else ""))
    return ["    (", *rows, "    ) = args", "    args.clear()"]


def comment(step: Step, new_line: bool) -> str:
    """What a call makes and, where it changes, the line of the model."""
    if isinstance(step, Call):
        parts = [step.about] if step.result is not None else []
    elif isinstance(step, Allocate):
        parts = []
    else:
        return ""
    if new_line and step.line is not None:
        parts.append(str(step.line))
    return "  ".join(parts)


def print_step(step: Step, operators: dict[str, str]) -> str:
    match step:
        case Bind(symbol, tensor, query, axis):
            return f"{symbol} = {tensor}.{query}({axis})"
        case Evaluate(result, function, args):
            texts = [print_argument(arg) for arg in args]
            spelling = SPELLINGS.get(function)
            if spelling is None:
                return f"{result} = {function}({', '.join(texts)})"
            # a negative number binds looser than ** and . do
            value = spelling.format(*(f"({text})" if text.startswith("-") else text for text in texts))
            return f"{result} = {value}"
        case Allocate(result, sizes, strides, dtype, device):
            where = f"dtype={dtype.text}, device={device.text}"
            shape = print_argument(Sequence("tuple", sizes))
            if strides is None:
                return f"{result} = torch.empty({shape}, {where})"
            return f"{result} = torch.empty_strided({shape}, {print_argument(Sequence('tuple', strides))}, {where})"
        case Call(result, operator, args, kwargs):
            texts = [print_argument(arg) for arg in args]
            texts += [f"{name}={print_argument(value)}" for name, value in kwargs]
            function = operator.name if isinstance(operator, Constant) else operators[operator]
            call = f"{function}({', '.join(texts)})"
            return f"{result} = {call}" if result is not None else call
        case Restride(result, source, strides):
            return f"{result} = restride({source}, ({', '.join(strides)},))"
        case Free(names):
            return f"del {', '.join(names)}"


def print_argument(argument: Argument) -> str:
    match argument:
        case Ref(name) | Constant(name):
            return name
        case Literal(text):
            return text
        case Sequence("list", items):
            return f"[{', '.join(map(print_argument, items))}]"
        case Sequence(_, items):
            return f"({', '.join(map(print_argument, items))}{',' if len(items) == 1 else ''})"
        case Mapping(items):
            return "{" + ", ".join(f"{key}: {print_argument(value)}" for key, value in items) + "}"
        case Slice(start, stop, step):
            return f"slice({print_argument(start)}, {print_argument(stop)}, {print_argument(step)})"
