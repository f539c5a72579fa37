"""What stops a kernel: an index outside its bounds, an integer divided by zero, no memory for its tiles. The first that
fails is reported."""

from __future__ import annotations

from ferrite.codegen.llvm.emission import UNLIKELY, Emission
from ferrite.codegen.llvm.types import vector

DIVISION = -1  # what a kernel gives where an integer was divided by zero
OUT_OF_MEMORY = -2  # ... and where there is no memory for its tiles: the value is how many bytes these are
STOP = """
define internal void @ferrite_stop(ptr %status, ptr %failure, i64 %code, i64 %value, i64 %extent)
  noinline cold nounwind {
entry:
  %pair = cmpxchg ptr %status, i64 0, i64 %code monotonic monotonic, align 8
  %first = extractvalue { i64, i1 } %pair, 1
  br i1 %first, label %report, label %done
report:
  store i64 %value, ptr %failure, align 8
  %second = getelementptr i64, ptr %failure, i64 1
  store i64 %extent, ptr %second, align 8
  br label %done
done:
  ret void
}
""".strip()


def stop_where(e: Emission, bad: str, lanes: int, code: int, value: str = "0", extent: str = "0") -> None:
    """Leave the function where a lane is bad. `value` and `extent` are i64, as wide as `bad`."""
    function = e.function
    key = f"check {code} {bad}"
    if key in function.values_by_text:
        return
    e.module.helpers["@ferrite_stop"] = STOP
    function.fails = True
    failing = e.any_lane(bad, lanes)
    scope = function.home(max(function.floor(None), function.rank.get(failing, 0)))
    number = next(function.counter)
    scope.code.append(f"  br i1 {failing}, label %stop{number}, label %fine{number}{UNLIKELY}")
    function.block(f"fine{number}", scope)
    function.values_by_text[key] = failing
    scope.keys.append(key)
    function.cold.append(f"stop{number}:")
    if lanes > 1 and code != DIVISION:
        value, extent = _first_bad(e, bad, lanes, value), _first_bad(e, bad, lanes, extent)
    status, failure = e.here("%status", "ptr"), e.here("%failure", "ptr")
    given = f"ptr {status}, ptr {failure}, i64 {code}, i64 {value}, i64 {extent}"
    function.cold += [f"  call void @ferrite_stop({given})", "  br label %leave"]


def stop_without_tiles(e: Emission) -> None:
    """Leave the function where it gets no memory for its tiles, which it asks for where it begins."""
    e.module.helpers["@ferrite_stop"] = STOP
    e.function.fails = True
    status, failure = e.here("%status", "ptr"), e.here("%failure", "ptr")
    given = f"ptr {status}, ptr {failure}, i64 {OUT_OF_MEMORY}, i64 {{bytes}}, i64 0"
    e.function.without_tiles = f"call void @ferrite_stop({given})"


def _first_bad(e: Emission, bad: str, lanes: int, values: str) -> str:
    """The value in the first lane that is bad."""
    function = e.function
    bits, place, found = (function.fresh("k") for _ in range(3))
    e.declare(f"declare i{lanes} @llvm.cttz.i{lanes}(i{lanes}, i1)")
    function.cold += [
        f"  {bits} = bitcast <{lanes} x i1> {bad} to i{lanes}",
        f"  {place} = call i{lanes} @llvm.cttz.i{lanes}(i{lanes} {bits}, i1 false)",
        f"  {found} = extractelement {vector('i64', lanes)} {values}, i{lanes} {place}",
    ]
    return found
