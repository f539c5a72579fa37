"""What one unit of fuel changes: the stages written down with one unit less, and with it."""

from __future__ import annotations

import difflib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ferrite.diagnosis.bisect.probe import Prober


@dataclass(frozen=True)
class Changed:
    """`step`: the pass or step of scheduling behind which the two differ; both texts, as files of their own."""

    step: str
    before: str
    after: str
    suffix: str

    @property
    def summary(self) -> str:
        """The first line that is new, less its number; not the headline, which counts lines."""
        lines = difflib.ndiff(self.before.splitlines()[1:], self.after.splitlines()[1:])
        return next((line[2:].strip().lstrip("0123456789 ") for line in lines if line.startswith("+ ")), "")


def what_changed(prober: Prober, base: Mapping[str, Any], stage: str, number: int) -> Changed | None:
    """The first file of a stage's dump that differs between `number - 1` units of fuel and `number`."""
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory(prefix="ferrite-bisect-") as folder:
        for fuel in (number - 1, number):
            into = Path(folder) / str(fuel)
            prober.run({**base, "fuel": fuel, "fuel_stage": stage, "dump_dir": str(into)})
            found.append(texts_in(into, ".txt" if stage == "schedule" else ".py"))
    before, after = found
    for name, text in after.items():
        if before.get(name) == text:
            continue
        step = Path(name).stem.partition("_")[2]
        earlier = before.get(name) or last_before(before, name)
        return Changed(step, earlier, text, Path(name).suffix)
    return None


def texts_in(folder: Path, suffix: str) -> dict[str, str]:
    """Graphs, or steps of scheduling, by the names of their files, in order."""
    numbered = (path for path in sorted(folder.rglob(f"*{suffix}")) if path.name[:2].isdigit())
    return {str(path.relative_to(folder)): path.read_text() for path in numbered}


def last_before(files: Mapping[str, str], name: str) -> str:
    """The same graph as it was then: a pass that changes nothing writes nothing."""
    earlier = [text for other, text in files.items() if Path(other).parent == Path(name).parent and other < name]
    return earlier[-1] if earlier else ""
