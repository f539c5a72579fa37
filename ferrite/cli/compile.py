"""`python -m ferrite compile MODULE:CALLABLE`: compile a user's function and print the record."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch

from ferrite.cli import specs
from ferrite.errors import UserError, nearest
from ferrite.options import FIELDS, MODES, TYPES, check_all, parse


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "compile",
        help="compile a function or module and print what was compiled",
        description="Compile MODULE:CALLABLE, call it once with the given arguments, compare with eager, and print "
        "the record. CALLABLE may be a function, a module, or a class of modules that takes no arguments.",
        epilog=specs.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_call_arguments(parser)
    parser.add_argument("--source", action="store_true", help="also print the generated host programs")
    parser.set_defaults(run=run)


def add_call_arguments(parser: argparse.ArgumentParser) -> None:
    """What is compiled, how, and what it is called with."""
    parser.add_argument("target", metavar="MODULE:CALLABLE", help="package.module:name, or path/to/file.py:name")
    parser.add_argument("arguments", metavar="ARG", nargs="*", help="f32[8,16], i64[4]<100, 3, None, ...")
    parser.add_argument("--train", action="store_true", help="also compile and run the backward graph")
    parser.add_argument("--dynamic", action="store_true", help="treat sizes as symbolic")
    parser.add_argument("--mode", choices=list(MODES), help="a preset of options")
    parser.add_argument(
        "-o", "--option", action="append", default=[], metavar="NAME=VALUE", help="any option; may be repeated"
    )


def run(chosen: argparse.Namespace) -> int:
    import ferrite

    function = find(chosen.target)
    settings = dict(parse_option(text) for text in chosen.option)
    inputs = [specs.parse_argument(text, requires_grad=chosen.train) for text in chosen.arguments]
    before = ferrite.recent_compiles()
    compiled = ferrite.compile(function, mode=chosen.mode, dynamic=chosen.dynamic or None, **settings)
    start = time.perf_counter()
    with torch.set_grad_enabled(chosen.train):
        outputs = compiled(*inputs)
        if chosen.train:
            backward(outputs)
    print(f"compiled and ran {chosen.target} in {time.perf_counter() - start:.2f} s\n")
    for record in (record for record in ferrite.recent_compiles() if record not in before):
        print(record, end="\n\n")
        for graph in record.graphs if chosen.source else ():
            print(graph.source)
    return 0


def backward(outputs: Any) -> None:
    from ferrite.capture import torch_api

    tensors = [leaf for leaf in torch_api.tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
    differentiable = [tensor.float().sum() for tensor in tensors if tensor.requires_grad]
    if not differentiable:
        raise UserError("--train needs an output that requires grad", {"got": f"{len(tensors)} tensors without"})
    torch.stack(differentiable).sum().backward()


def find(target: str) -> Any:
    """The callable at `package.module:name` or `file.py:name`; a class of modules is made."""
    from ferrite.diagnosis import load_module

    module_name, separator, name = target.rpartition(":")
    if not separator or not name:
        raise UserError(f"cannot read {target!r}", {"expected": "MODULE:CALLABLE, such as mypackage.net:forward"})
    module = load_module(module_name)
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            raise UserError(
                f"{module_name} has no {name!r}",
                {"did you mean": nearest(part, [n for n in dir(found) if n[0] != "_"])},
            )
        found = getattr(found, part)
    if isinstance(found, type) and issubclass(found, torch.nn.Module):
        found = found()
    if not callable(found):
        raise UserError(f"{target} is a {type(found).__name__}, not a function or module")
    return found


def parse_option(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator:
        raise UserError(f"cannot read the option {text!r}", {"expected": "NAME=VALUE, such as strict=1"})
    check_all({name: FIELDS[name].default} if name in FIELDS else {name: None})
    return name, parse(name, TYPES[name], value, f"option {name}")
