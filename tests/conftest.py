# SPDX-License-Identifier: Apache-2.0
"""Shared test set-up: the Triton interpreter where there is no GPU, and the `device` fixture of kernel
tests."""

import os

# Before torch is imported, which reads it: on two cores, threads of such small problems wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the whole end-to-end grid, not a covering part")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--all"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="takes minutes: runs with --all"))


HAS_CUDA = torch.cuda.is_available()


@pytest.fixture(
    params=[
        pytest.param("cpu", marks=pytest.mark.skipif(HAS_CUDA, reason="the interpreter is off beside a GPU")),
        pytest.param(
            "cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA device")]
        ),
    ]
)
def device(request: pytest.FixtureRequest) -> torch.device:
    """Where a kernel test runs: `cpu` under the Triton interpreter, or `cuda` (marker `gpu`)."""
    return torch.device(request.param)
