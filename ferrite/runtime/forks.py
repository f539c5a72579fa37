"""Kernels in the child of a fork.

A child has none of its parent's threads. libgomp, the OpenMP runtime of GCC, still counts on those that helped the
forking thread before: the child's next parallel loop, also one of torch's own, would wait for them for ever. So they
are sent home before a fork; parent and child start new ones when they need some. Other OpenMP runtimes see to forks
themselves.
"""

from __future__ import annotations

import functools
import os

from ferrite.codegen.llvm import openmp_library

SOFT = 1  # keep what threads hold by themselves


@functools.cache
def ready_for_forks() -> None:
    """From now on a child of this process may run kernels. Once is enough."""
    library = openmp_library()
    if library is None or not os.path.basename(library._name).startswith("libgomp"):
        return
    send_home = getattr(library, "omp_pause_resource_all", None)
    if send_home is not None and hasattr(os, "register_at_fork"):
        os.register_at_fork(before=functools.partial(send_home, SOFT))
