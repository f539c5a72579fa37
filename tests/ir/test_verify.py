"""Each law of a host program, broken once."""

from __future__ import annotations

import pytest

from ferrite.ir import Bind, Call, Evaluate, Free, HostProgram, Input, Literal, Ref, Restride, Sequence, verify
from ferrite.ir.verify import InvalidProgram

pytestmark = pytest.mark.quick


def call(result, *args):
    return Call(result, "aten.add.Tensor", tuple(map(Ref, args)), (), "not yet lowered", None)


def program(*steps, inputs=("x", "y"), outputs=("z",)):
    return HostProgram("f", tuple(Input(name, "f32[2]") for name in inputs), steps, tuple(map(Ref, outputs)))


def test_a_valid_program_is_returned_unchanged():
    valid = program(call("z", "x", "y"), Free(("x", "y")))
    assert verify(valid) is valid


BROKEN = {
    "an input is bound twice": (1, program(call("z", "x", "x"), inputs=("x", "x"))),
    "a step binds an input's name": (1, program(call("x", "x", "y"), outputs=("x",))),
    "a step binds a name again": (1, program(call("z", "x", "y"), call("z", "x", "y"))),
    "a name is bound again after it was freed": (1, program(call("z", "x", "y"), Free(("x",)), call("x", "y", "y"))),
    "a call reads an unknown name": (2, program(call("z", "x", "w"))),
    "a call reads a freed name": (2, program(Free(("x",)), call("z", "x", "y"))),
    "a call reads its own result": (2, program(call("z", "z", "x"))),
    "a nested argument is unknown": (
        2,
        program(Evaluate("z", "operator.getitem", (Ref("x"), Sequence("tuple", (Ref("w"), Literal("1")))))),
    ),
    "a symbol is read from an unknown tensor": (2, program(Bind("s0", "w", "size", 0), call("z", "x", "y"))),
    "a restride uses an unbound symbol": (2, program(Restride("z", "x", ("s0", "1"), ("s0",)))),
    "a name is freed twice": (3, program(call("z", "x", "y"), Free(("x",)), Free(("x",)))),
    "a name is freed twice in one step": (3, program(call("z", "x", "y"), Free(("x", "x")))),
    "an unknown name is freed": (3, program(call("z", "x", "y"), Free(("w",)))),
    "an output is unknown": (4, program(outputs=("z",))),
    "an output is freed": (4, program(call("z", "x", "y"), Free(("z",)))),
    "a name is a keyword": (5, program(call("del", "x", "y"), outputs=("del",))),
    "a name is no identifier": (5, program(inputs=("x.y",), outputs=("x.y",))),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_law_is_cited(case):
    law, broken = BROKEN[case]
    with pytest.raises(InvalidProgram, match=f"^law {law}: "):
        verify(broken)


def test_programs_are_values():
    assert program(call("z", "x", "y")) == program(call("z", "x", "y"))
    assert hash(program(call("z", "x", "y"))) == hash(program(call("z", "x", "y")))
