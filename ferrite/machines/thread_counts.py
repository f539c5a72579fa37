"""With how many threads torch works, as far as kernels of our own were measured beside its libraries with as many."""

from __future__ import annotations

import os

import torch

from ferrite.machines.by_device import host_machine


def works_with_all_of_few_cores() -> bool:
    """Whether OpenBLAS, which obeys `torch.set_num_threads`, has the threads that the other library takes anyway."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 1 < cores <= host_machine().max_openblas_cores and torch.get_num_threads() >= cores


def has_few_threads() -> bool:
    """Whether torch has so few that kernels of our own, measured with no more, were measured as they run now."""
    return torch.get_num_threads() <= host_machine().few_threads
