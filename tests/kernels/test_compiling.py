# SPDX-License-Identifier: Apache-2.0
"""Every kernel becomes machine code for GPUs that are not here, within the shared memory of each."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import vllm_weaver.kernels
from tests.kernels import SHARED_MEMORY


def kernels() -> set[str]:
    """Names of all functions that are launched."""
    sources = Path(vllm_weaver.kernels.__file__).parent.glob("*.py")
    pattern = re.compile(r"^@triton\.jit.*\ndef (\w+_kernel)\(", re.MULTILINE)
    return {name for source in sources for name in pattern.findall(source.read_text())}


@pytest.mark.parametrize(
    "capability", [120, pytest.param(100, marks=pytest.mark.full), pytest.param(90, marks=pytest.mark.full)]
)
def test_all_kernels_compile(compilations: dict[int, subprocess.Popen[str]], capability: int) -> None:
    output, _ = compilations[capability].communicate()
    assert compilations[capability].returncode == 0, output[-3000:]
    shared = json.loads(output.splitlines()[-1])
    assert len(shared) > 30 and shared.keys() == kernels()
    assert max(shared.values()) <= SHARED_MEMORY[capability], shared
