# SPDX-License-Identifier: Apache-2.0
"""Kernels are compiled for other GPUs in processes beside the tests, whose answers come last."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

Compilations = dict[int, "subprocess.Popen[str]"]
ROOT = Path(__file__).resolve().parents[2]


def asks(item: pytest.Item) -> bool:
    """Whether a test waits for a compilation."""
    return item.path.name == "test_compiling.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=asks)


@pytest.fixture(scope="session", autouse=True)
def compilations(request: pytest.FixtureRequest) -> Iterator[Compilations]:
    """A process a capability that a chosen test asks for."""
    environment = os.environ | {"TRITON_INTERPRET": "0"}
    chosen = [item for item in request.session.items if asks(item) and not item.get_closest_marker("skip")]
    wanted = {item.callspec.params["capability"] for item in chosen}
    running = {
        capability: subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.compiling", str(capability)],
            cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )
        for capability in wanted
    }  # fmt: skip
    try:
        yield running
    finally:
        for process in running.values():
            process.kill()
            process.wait()
