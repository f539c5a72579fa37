"""No kernel of a sample reads or writes outside of its memory, as CUDA's own tool sees it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.triton_kernels import ON_A_GPU

pytestmark = ON_A_GPU
TOOL = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/local/cuda/bin"]))


@pytest.mark.skipif(TOOL is None, reason="compute-sanitizer comes with CUDA's tools, which are not installed")
def test_a_sample_of_kernels_stays_within_its_memory():
    assert TOOL is not None
    program = Path(__file__).with_name("cuda_sample.py")
    command = [TOOL, "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(program)]
    # torch would keep memory and give parts of it away, of which the tool knows nothing
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=environment)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "computed as eager does" in said
    assert "ERROR SUMMARY: 0 errors" in said
