"""What was found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ferrite.diagnosis.bisect.dumps import Changed
from ferrite.diagnosis.bisect.shrink import Small


@dataclass(frozen=True)
class Finding:
    """What is to blame. `part`: the pass, step or kernel; `rule`: of the pass, where it is one. `line`: of the model.
    `avoid`: options without which it does not fail, and with which it does not. `small`: the smallest graph that shows
    it. `folder`: shows it by itself."""

    kind: str
    symptom: str
    graph: int
    stage: str
    part: str = ""
    rule: str = ""
    about: str = ""
    line: str = ""
    avoid: Mapping[str, Any] = field(default_factory=dict)
    changed: Changed | None = None
    small: Small | None = None
    folder: str | None = None
    tries: int = 0

    @property
    def name(self) -> str:
        """One name for it: `post_grad / remove_noop_ops / rule`, `lower / kernel tanh`, `schedule / fuse`."""
        return " / ".join(filter(None, (self.stage, self.part, self.rule)))
