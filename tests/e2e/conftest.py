# SPDX-License-Identifier: Apache-2.0
"""Set-up of the end-to-end tests: the CPU environment before vLLM is imported, and shared references."""

from __future__ import annotations

import os

# vLLM must leave the number of threads alone, which the root conftest has set.
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest

from vllm_weaver import cpu

cpu.prepare()

from tests.e2e import harness  # noqa: E402  (the environment comes first)


@pytest.fixture(scope="session")
def references() -> list[harness.Reference]:
    """Plain decoding of four demo prompts, 72 tokens each, by vLLM as it is (no speculative config)."""
    with harness.engine(harness.DEMO / "target") as llm:
        return harness.references(llm, harness.demo_prompts(llm.get_tokenizer(), 4), 72)
