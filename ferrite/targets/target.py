"""What a target is: a device's way through the compiler, behind lowering.

Everything up to there is the same on every device. A target says how programs are scheduled for it, compiles the
kernels that come of that, and loads them. The host program around the kernels is the same again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from ferrite.codegen import HostSpelling, RunTable
from ferrite.ir.kernel import Kernel, Row
from ferrite.runtime import KernelStore
from ferrite.schedule import Scheduling

LoadedRun = Callable[..., int]


class Target(Protocol):
    @property
    def language(self) -> str:
        """What kernels are compiled from, as people call it."""

    @property
    def scheduling(self) -> Scheduling:
        """Its part in scheduling."""

    @property
    def spelling(self) -> HostSpelling:
        """How a host program makes memory on it, and what it gives to runs of kernels."""

    def identity(self) -> str:
        """For the cache: everything about the machine that code is chosen by."""

    def compiled(
        self, kernels: Sequence[Kernel], store: KernelStore | None = None, checked: bool = False
    ) -> tuple[list[str], dict[str, bytes]]:
        """A name for each kernel, and code by name: of all of them, and of what is needed besides. `checked`: kernels
        compare every address with the bounds of its memory. Raises RefusedKernels where some cannot be compiled."""

    def source(self, kernel: Kernel, checked: bool = False) -> tuple[str, str]:
        """What a kernel is compiled from: how such a file ends (".ll"), and the text."""

    def source_rows(self, kernel: Kernel, name: str) -> list[Row]:
        """The lines of that source, each with the statement that it comes from, where that is known."""

    def built_from(self, kernel: Kernel, text: str, checked: bool = False) -> tuple[str, bytes]:
        """A kernel compiled from another text, edited by hand: a name and code, as `compiled` gives them."""

    def loaded(
        self, kernels: Sequence[tuple[str, Sequence[str]]], code: Mapping[str, bytes], tables: Sequence[RunTable]
    ) -> list[LoadedRun]:
        """A function for each run. `kernels`: names and what each says where a check of it fails, by number."""

    def named(
        self, kernels: Sequence[tuple[str, Sequence[str]]], table: RunTable, labels: Sequence[str], run: LoadedRun
    ) -> LoadedRun:
        """A run that is loaded, as profilers like to see it: its kernels in ranges of their names."""
