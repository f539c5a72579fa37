"""Devices that ferrite compiles for: one file is one device's way through the compiler, behind lowering."""

from ferrite.targets.choose import Targets, buildable, reason_against_gpus, targets_for
from ferrite.targets.executable import (
    Refusing,
    UncompiledOperations,
    executable_of,
    kernel_sources,
    ranges_of,
    recorders_of,
    recording_for,
    runs_of,
    steps_for_eager,
)
from ferrite.targets.random_probe import random_threads
from ferrite.targets.target import Target
from ferrite.targets.tuning import Tuner, tuned, tuner_for, tuning_identity

__all__ = [
    "Refusing",
    "Target",
    "Targets",
    "Tuner",
    "UncompiledOperations",
    "buildable",
    "executable_of",
    "kernel_sources",
    "random_threads",
    "ranges_of",
    "reason_against_gpus",
    "recorders_of",
    "recording_for",
    "runs_of",
    "steps_for_eager",
    "targets_for",
    "tuned",
    "tuner_for",
    "tuning_identity",
]
