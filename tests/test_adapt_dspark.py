# SPDX-License-Identifier: Apache-2.0
"""scripts/adapt_dspark_draft.py: what it changes, what it leaves alone, and that vLLM loads the result."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vllm_weaver import cpu

if not torch.cuda.is_available():
    cpu.prepare()

from scripts import adapt_dspark_draft  # noqa: E402
from tests import drafts, tiny  # noqa: E402
from tests.e2e import models  # noqa: E402
from tests.test_draft_loading import Target, hooks, target_folder  # noqa: E402, F401
from tests.test_quantized_heads import emulated, vllm_config  # noqa: E402, F401

RANK = 8


def dspark(path: Path) -> Path:
    """A random dense DSpark draft with the configuration of SpecForge."""
    models.random_draft(path)
    drafts.configure(
        path,
        architectures=["DSparkDraftModel"],
        model_type="dspark",
        dflash_config={"projector_type": "dspark"},
        block_size=7,
        dspark_config={"markov_rank": RANK, "markov_head_type": "vanilla"},
    )

    def grow(weights: dict[str, torch.Tensor]) -> None:
        weights["markov_head.markov_w1.weight"] = torch.randn(models.VOCAB, RANK)
        weights["markov_head.markov_w2.weight"] = torch.randn(models.VOCAB, RANK)

    drafts.edit(path, grow)
    return path


def test_adapts_and_says_what(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, out = dspark(tmp_path / "draft"), tmp_path / "out"
    before = json.loads((source / "config.json").read_text())
    assert adapt_dspark_draft.main([str(source), str(out)]) == 0
    printed = capsys.readouterr().out
    for change in ("model_type: 'dspark' -> 'qwen3'", "markov_rank: None -> 8", "weights untouched"):
        assert change in printed
    after = json.loads((out / "config.json").read_text())
    changed = {key for key in after if after[key] != before.get(key)}
    assert changed == {"model_type", "architectures", "markov_rank"} and before.keys() <= after.keys()
    assert (out / "model.safetensors").resolve() == source / "model.safetensors"
    assert json.loads((source / "config.json").read_text()) == before
    assert adapt_dspark_draft.main([str(out), str(tmp_path / "twice")]) == 0  # the result needs nothing
    assert "nothing needs doing" in capsys.readouterr().out and not (tmp_path / "twice").exists()
    copied = tmp_path / "copied"
    assert adapt_dspark_draft.main([str(source), str(copied), "--copy"]) == 0
    assert not (copied / "model.safetensors").is_symlink()
    assert (copied / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "qwen3", "markov_rank": RANK},
        {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "markov_rank": RANK},
        {"architectures": ["Gemma4DSparkModel"]},
        {"model_type": "deepseek_v4"},
        {"speculators_model_type": "dspark"},
    ],
)
def test_nothing_needs_doing(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    source = dspark(tmp_path / "draft")
    drafts.configure(source, **changes)
    assert adapt_dspark_draft.main([str(source), str(tmp_path / "out")]) == 0
    assert "nothing needs doing" in capsys.readouterr().out and not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"architectures": ["DFlashDraftModel"]}, "this is not a DSpark draft"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"dspark_config": None}, "it has no markov_rank: neither markov_rank, dspark_config.markov_rank"),
        ({"markov_head_type": "gated"}, "markov_head_type is 'gated'"),
        ({"block_size": None}, "it has no block_size"),
    ],
)
def test_refusals(
    tmp_path: Path, changes: dict[str, Any], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = dspark(tmp_path / "draft")
    drafts.configure(source, **changes)
    assert adapt_dspark_draft.main([str(source), str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert sentence in error and error.count("\n") == 1 and not (tmp_path / "out").exists()


def test_refuses_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = dspark(tmp_path / "draft")
    assert adapt_dspark_draft.main([str(source), str(tmp_path)]) == 1
    assert "is not an empty folder" in capsys.readouterr().err
    assert adapt_dspark_draft.main([str(tmp_path / "none"), str(tmp_path / "out")]) == 1
    assert "cannot be read as JSON" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
@pytest.mark.usefixtures("hooks")
def test_vllm_loads_the_result(tmp_path: Path) -> None:
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.dspark.utils import load_dspark_model

    adapt_dspark_draft.convert(dspark(tmp_path / "draft"), tmp_path / "out")
    (tmp_path / "models").mkdir()
    config = tiny.engine_args(
        target_folder(tmp_path / "models"),
        load_format="auto",
        speculative_config={"method": "dspark", "model": str(tmp_path / "out"), "num_speculative_tokens": 7},
    ).create_engine_config()
    with set_current_vllm_config(config):
        model = load_dspark_model(Target(), config)
    assert type(model).__name__ == "Qwen3DSparkForCausalLM"
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "out" / "model.safetensors")
    for name in ("markov_w1", "markov_w2"):
        loaded = getattr(model.model.markov_head, name).weight
        expected = weights[f"markov_head.{name}.weight"]
        assert torch.equal(loaded[: models.VOCAB].float(), expected.bfloat16().float())
