# SPDX-License-Identifier: Apache-2.0
"""dflash_tfm end to end on a target with a quantized lm_head and with a quantized draft: output as plain
decoding of the same target. Takes a minute; run with `--all`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from scripts import quantize_draft
from tests import quantized
from tests.e2e import harness

TOKENS = 40


pytestmark = pytest.mark.full


def fp8_head(path: Path) -> Path:
    """The demo target with an lm_head in FP8, everything else as it is."""
    shutil.copytree(harness.DEMO / "target", path)
    weights = load_file(path / "model.safetensors")
    packed = quantized.modelopt_fp8(weights.pop("lm_head.weight").float())
    packed.tensors["input_scale"] = torch.tensor(30.0 / 448)
    save_file(weights | {f"lm_head.{n}": t for n, t in packed.tensors.items()}, path / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"] = quantized.head_only("FP8")
    (path / "config.json").write_text(json.dumps(config))
    return path


def test_quantized_head_and_draft(references: list[harness.Reference], tmp_path: Path) -> None:
    quantize_draft.emulate_where_needed()
    target, draft = fp8_head(tmp_path / "target"), tmp_path / "draft"
    argv = ("--target", harness.DEMO / "target", "--draft", harness.DEMO / "draft", "--out", draft, "--rtn")
    assert quantize_draft.main([str(argument) for argument in argv]) == 0
    prompts = [reference.prompt for reference in references]
    with harness.engine(target) as llm:
        plain = harness.references(llm, prompts, TOKENS)
    with harness.engine(target, **harness.trees(16, "weaver", draft)) as llm:
        runner = harness.runner(llm)
        assert runner.model.lm_head.weight.dtype == torch.float8_e4m3fn
        assert runner.speculator.model.model.layers[0].mlp.down_proj.weight.dtype == torch.uint8
        outputs = harness.greedy(llm, prompts, TOKENS)
        stats = runner.model_state.step.stats.read()
    harness.assert_identical(plain, outputs, max_ties=2)
    assert stats["accepted"] > 10, stats
