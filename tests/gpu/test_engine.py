# SPDX-License-Identifier: Apache-2.0
"""dflash_tfm in a real vLLM engine on a GPU (eager), with the demo models: losslessness and siblings."""

from __future__ import annotations

import os

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")

from tests.e2e import harness, oracle  # noqa: E402  (the environment comes first)
from vllm_weaver import plugin  # noqa: E402

# FlashInfer's prefill kernel is not on every machine; Triton's is.
GPU = {
    "gpu_memory_utilization": 0.2,
    "attention_backend": "FLASH_ATTN",
    "additional_config": {"gdn_prefill_backend": "triton"},
}


@pytest.fixture(scope="module")
def references() -> list[harness.Reference]:
    plugin.register()  # where the package is not installed there is no entry point
    with harness.engine(harness.DEMO / "target", **GPU) as llm:
        return harness.references(llm, harness.demo_prompts(llm.get_tokenizer(), 8), 128)


@pytest.mark.parametrize("proposal, budget", [("weaver", 16), ("ddtree", 33), ("chain", 7)])
def test_greedy_is_plain_decoding(references: list[harness.Reference], proposal: str, budget: int) -> None:
    options = GPU | harness.trees(budget, proposal) | {"long_prefill_token_threshold": 16}
    with harness.engine(harness.DEMO / "target", **options) as llm:
        outputs = harness.greedy(llm, [r.prompt for r in references], 128)
        stats = harness.runner(llm).model_state.step.stats.read()
    print(f"{proposal} {budget}: tau {1 + stats['accepted'] / stats['verifies']:.2f}, {stats}")
    assert stats["accepted"] > 0
    harness.assert_identical(references, outputs)


def test_winding_paths(references: list[harness.Reference]) -> None:
    options = GPU | harness.trees(16, "chain")
    with harness.engine(harness.DEMO / "target", **options) as llm:
        oracle.install(harness.runner(llm), references, [oracle.second_child, oracle.wrong, oracle.late])
        outputs = harness.greedy(llm, [r.prompt for r in references], 128)
        stats = harness.runner(llm).model_state.step.stats.read()
    assert stats["branching_paths"] > 20, stats
    harness.assert_identical(references, outputs)
