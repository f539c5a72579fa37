"""Devices that ferrite compiles for: one file is one device's way through the compiler, behind lowering."""

from ferrite.targets.choose import Targets, attention_on, buildable, reason_against_gpus, targets_for
from ferrite.targets.executable import (
    Refusing,
    UncompiledOperations,
    executable_of,
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
    "attention_on",
    "buildable",
    "executable_of",
    "random_threads",
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
