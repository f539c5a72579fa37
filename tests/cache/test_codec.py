"""The codec of the cache: frozen dataclasses as plain data and back, every type checked on the way."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch

from ferrite.cache.codec import MAX_NUMBER, Strange, decode, encode
from ferrite.errors import ModelLine, Refusal
from ferrite.graph import Places
from ferrite.ir import Symbol, symbol
from ferrite.ir.program import Program, parse

pytestmark = pytest.mark.quick


@dataclass(frozen=True)
class Part:
    name: str
    sizes: tuple[int, ...] = ()
    share: float = 0.5


@dataclass(frozen=True)
class Whole:
    parts: tuple[Part, ...]
    first: Part | None
    pairs: tuple[tuple[int, str], ...]
    by_name: Mapping[str, Part | None]
    by_number: Mapping[int, bool]
    lists: list[tuple[str, ...]]


WHOLE = Whole(
    (Part("a", (1, 2)), Part("b"), Part("", (MAX_NUMBER - 1,), -1e30)),
    None,
    ((1, "x"), (2, "y")),
    {"none": None, "some": Part("größe", (0,))},
    {3: True, -1: False},
    [(), ("a", "b")],
)
DATA = [
    [["a", [1, 2], 0.5], ["b", [], 0.5], ["", [MAX_NUMBER - 1], -1e30]],
    None,
    [[1, "x"], [2, "y"]],
    {"none": None, "some": ["größe", [0], 0.5]},
    [[3, True], [-1, False]],
    [[], ["a", "b"]],
]


def through_json(data):
    return json.loads(json.dumps(data, allow_nan=False))


@pytest.mark.parametrize("value", [WHOLE, Whole((), Part("c"), (), {}, {}, [])])
def test_what_is_written_comes_back(value):
    assert decode(Whole, through_json(encode(Whole, value))) == value


def test_the_form_is_rows_of_fields():
    assert through_json(encode(Whole, WHOLE)) == DATA


STRANGE = {
    "nothing": None,
    "a part less": DATA[:-1],
    "a part more": [*DATA, 1],
    "a mapping for a row": {"parts": []},
    "a row less": [[["a", [1, 2]]], *DATA[1:]],
    "a number for a word": [[[1, [], 0.5]], *DATA[1:]],
    "a truth for a number": [[["a", [True], 0.5]], *DATA[1:]],
    "a fraction for a number": [[["a", [1.0], 0.5]], *DATA[1:]],
    "a number for a fraction": [[["a", [], 1]], *DATA[1:]],
    "no number": [[["a", [], float("nan")]], *DATA[1:]],
    "a number out of range": [[["a", [1 << 70], 0.5]], *DATA[1:]],
    "a word for a list": [[["a", "12", 0.5]], *DATA[1:]],
    "None for a row": [[None], *DATA[1:]],
    "a pair of three": [*DATA[:2], [[1, "x", 2]], *DATA[3:]],
    "a list for a mapping": [*DATA[:3], [], *DATA[4:]],
    "a mapping for pairs": [*DATA[:4], {"3": True}, *DATA[5:]],
    "a number for a truth": [*DATA[:4], [[3, 1]], *DATA[5:]],
}


@pytest.mark.parametrize("what", STRANGE)
def test_what_cannot_be_is_strange(what):
    with pytest.raises(Strange):
        decode(Whole, STRANGE[what])


def traced() -> Places:
    gm = torch.fx.symbolic_trace(lambda x: x.sin() + 1)
    for place, node in enumerate(gm.graph.nodes):
        if place in (1, 2):
            node.meta["stack_trace"] = f'  File "/home/me/net.py", line {place}, in forward\n    y{place}\n'
    return Places(gm)


def test_lines_are_places_in_a_graph():
    places = traced()
    known, unknown = places.line(1), ModelLine("elsewhere.py", 1, "f", "")
    data = encode(tuple[Refusal, ...], (Refusal("a", known), Refusal("b", unknown)), places.index())
    assert data == [["a", 1], ["b", None]]
    assert decode(tuple[Refusal, ...], data, places) == (Refusal("a", known), Refusal("b"))
    # what is not known is left out where there may be fewer
    assert decode(tuple[ModelLine, ...], [1, 0, None, 2], places) == (known, places.line(2))
    assert decode(dict[int, ModelLine], [[5, 1], [6, 0]], places) == {5: known}
    for place in (-1, len(places.nodes), "1", True, 1.0):
        with pytest.raises(Strange, match="a line of no node"):
            decode(tuple[ModelLine, ...], [place], places)


def test_programs_are_text():
    rows = symbol("s0", 2)
    assert isinstance(rows, Symbol)
    program = Program("scalar", (rows,), (), (), (rows,))
    (text,) = encode(tuple[Program, ...], (program,))
    assert parse(text) == program
    assert decode(tuple[Program, ...], [text]) == (program,)
    with pytest.raises(Strange):
        decode(tuple[Program, ...], [3])


def test_what_has_no_form_is_a_mistake_of_ours():
    with pytest.raises(TypeError, match="no form as data"):
        encode(tuple[object, ...], (object(),))
