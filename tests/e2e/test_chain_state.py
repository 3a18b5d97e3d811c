# SPDX-License-Identifier: Apache-2.0
"""vLLM's own chains (`method=dflash`, `method=dspark`) on a hybrid target: after every verify the recurrent
state of the accepted path equals a sequential replay. One engine was known to leave it behind for DSpark.

Takes a minute or two; run with `--all`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.e2e import harness
from tests.e2e.test_state import CLOSE, Replay, distance, owner, recurrent_layers, replays  # noqa: F401

DEPTH, TOKENS, RANK = 7, 40, 8


pytestmark = pytest.mark.full


def dspark_draft(path: Path) -> Path:
    """The demo draft as a DSpark draft: its Markov head adds nothing, so that it accepts as much."""
    shutil.copytree(harness.DEMO / "draft", path)
    config = json.loads((path / "config.json").read_text())
    config |= {"architectures": ["Qwen3DSparkModel"], "markov_rank": RANK, "sample_from_anchor": False}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    for name in ("markov_w1", "markov_w2"):
        weights[f"markov_head.{name}.weight"] = torch.zeros(config["vocab_size"], RANK)
    save_file(weights, path / "model.safetensors")
    return path


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_state_equals_sequential_replay(
    references: list[harness.Reference],
    replays: list[Replay],  # noqa: F811
    method: str,
    tmp_path: Path,
) -> None:
    draft = harness.DEMO / "draft" if method == "dflash" else dspark_draft(tmp_path / "dspark")
    speculative = {"method": method, "model": str(draft), "num_speculative_tokens": DEPTH}
    checked, accepted = 0, 0
    with harness.engine(harness.DEMO / "target", speculative_config=speculative) as llm:
        runner, layers = harness.runner(llm), recurrent_layers(llm)
        names = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
        post = runner.model_state.postprocess_state

        def check(index: Tensor, sampled: Tensor, computed: Tensor) -> None:
            nonlocal checked, accepted
            post(index, sampled, computed)
            for row, request in enumerate(index.tolist()):
                count = int(computed[request])
                record = replays[owner(references, runner.req_states, request)].gdn
                if count not in record:
                    continue
                # Each draft position has a slot; the accepted one is read by the next step.
                place = int(runner.model_state.num_accepted_tokens_gpu[request]) - 1
                accepted += place
                for number, layer in enumerate(layers):
                    group = next(i for i, group in enumerate(names) if layer.prefix in group)
                    slot = int(runner.block_tables.input_block_tables[group][row, place])
                    found = layer.kv_cache[1][slot]
                    error = distance(found, record[count][number])
                    assert error < CLOSE, f"layer {number} after {count} tokens: off by {error}"
                    for other in (count - 1, count + 1):
                        assert other not in record or distance(found, record[other][number]) > CLOSE
                checked += 1

        runner.model_state.postprocess_state = check
        outputs: list[Any] = harness.greedy(llm, [list(r.prompt) for r in references], TOKENS)
        del runner.model_state.postprocess_state
    harness.assert_identical(references, outputs)
    assert checked > 20 and accepted > 10, (checked, accepted)
