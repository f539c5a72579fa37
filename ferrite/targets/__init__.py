"""Devices that ferrite compiles for: one file is one device's way through the compiler, behind lowering."""

from ferrite.targets.choose import Targets, attention_on, buildable, reason_against_gpus, targets_for
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
    timed_runs_of,
)
from ferrite.targets.random_probe import random_threads
from ferrite.targets.target import LoadedRun, Target
from ferrite.targets.tuning import Tuner, reason_against_measuring, tuned, tuner_for, tuning_identity, where
from ferrite.targets.tuning_watcher import TuningWatcher, watched_by

__all__ = [
    "LoadedRun",
    "Refusing",
    "Target",
    "Targets",
    "Tuner",
    "TuningWatcher",
    "UncompiledOperations",
    "attention_on",
    "buildable",
    "executable_of",
    "kernel_sources",
    "random_threads",
    "ranges_of",
    "reason_against_gpus",
    "reason_against_measuring",
    "recorders_of",
    "recording_for",
    "runs_of",
    "steps_for_eager",
    "targets_for",
    "timed_runs_of",
    "tuned",
    "tuner_for",
    "tuning_identity",
    "watched_by",
    "where",
]
