# SPDX-License-Identifier: Apache-2.0
"""Drafts of every published format, loaded by vLLM with our hooks: each module computes what its packed
numbers mean in float64, whatever the target's quantization is."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import drafts, quantized, tiny
from tests.e2e import models
from tests.test_quantized_heads import emulated, vllm_config  # noqa: F401  (fixtures)

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU"),
    pytest.mark.usefixtures("emulated"),
]


@pytest.fixture(autouse=True)
def hooks(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:  # noqa: F811
    """Every hook in place, as in a worker; only the config hooks afterwards."""
    from vllm.model_executor.layers.quantization.utils import w8a8_utils
    from vllm.plugins import load_general_plugins

    from vllm_weaver.hooks import HOOKS, base

    load_general_plugins()
    base.apply(HOOKS)
    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's CPU worker does

    def fp8(x: Any, scale: Any) -> Any:  # an operator that vLLM's CPU build lacks
        return (x.float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn), scale

    monkeypatch.setattr(w8a8_utils.ops, "scaled_fp8_quant", fp8)
    yield
    base.revert(hook for hook in HOOKS if hook.phase != "config")


class Target(nn.Module):
    """What loading a draft asks of a target."""

    def __init__(self, vocab: int = models.VOCAB, packed: quantized.Packed | None = None) -> None:
        from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

        from tests import test_quantized_heads as heads

        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = VocabParallelEmbedding(vocab, models.HIDDEN, params_dtype=torch.bfloat16)
        self.model.embed_tokens.weight.data.normal_()
        head = packed or quantized.plain(heads.weight(5, vocab))
        self.lm_head = quantized.layer_of(head)


def target_folder(root: Path, **changes: Any) -> str:
    size = dict(vocab_size=models.VOCAB, hidden_size=models.HIDDEN, num_hidden_layers=3)
    return tiny.folder(root, "attention", **(size | changes))


def config_with(root: Path, draft: Path, **changes: Any) -> Any:
    """A VllmConfig with the draft, for a target folder with these changes."""
    speculative = {
        "method": "dflash_tfm", "model": str(draft), "num_speculative_tokens": 9, "proposal": "ddtree",
    }  # fmt: skip
    return tiny.engine_args(
        target_folder(root, **changes), load_format="auto", speculative_config=speculative
    ).create_engine_config()


def load(root: Path, draft: Path, target: Target | None = None, **changes: Any) -> Any:
    """The draft as the speculator loads it, for a target folder with these changes."""
    from vllm.config import set_current_vllm_config
    from vllm.v1.worker.gpu.spec_decode.dflash.utils import load_dflash_model

    from vllm_weaver.draft import check_draft_files, fit_loaded_draft, keep_own_head

    config = config_with(root, draft, **changes)
    with set_current_vllm_config(config):
        target = target or Target()
        facts = check_draft_files(config)
        assert facts is not None
        keep_own_head(config.speculative_config.draft_model_config.hf_config, facts, target.lm_head)
        model = load_dflash_model(target, config)
        fit_loaded_draft(model, facts, models.BLOCK)
        return model


def assert_means(model: Any, modules: dict[str, quantized.Packed]) -> None:
    """Every linear module of the model against its packed weights."""
    generator = torch.Generator().manual_seed(7)
    checked = 0
    for i, layer in enumerate(model.model.layers):
        at = f"layers.{i}."
        for module, names in (
            (layer.self_attn.qkv_proj, drafts.GROUPS[0]),
            (layer.self_attn.o_proj, drafts.GROUPS[1]),
            (layer.mlp.gate_up_proj, drafts.GROUPS[2]),
            (layer.mlp.down_proj, drafts.GROUPS[3]),
            (model.model.fc, None),
        ):
            parts = [modules[at + name] for name in names] if names else [modules["fc"]]
            meaning = torch.cat([part.meaning for part in parts])
            x = torch.randn(5, meaning.shape[1], generator=generator).clamp(-3, 3).bfloat16()
            found = module(x)
            found = found[0] if isinstance(found, tuple) else found
            expected = x.double() @ meaning.T
            off = (found.double() - expected).norm() / expected.norm()
            assert off < parts[0].error + 0.006, f"{at}{names}: relative error {off:.4f}"
            checked += 1
    assert checked == 5 * drafts.LAYERS


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "name" in metafunc.fixturenames:
        every = metafunc.config.getoption("--all")
        metafunc.parametrize("name", drafts.FORMATS if every else COVERING)


# Each way to name modules, each kind of scale.
COVERING = (
    "modelopt fp8 flat, fc too", "nvfp4 nested, producer a string", "nvfp4 in hf_quant_config.json",
    "mixed precision", "compressed nvfp4", "compressed fp8",
)  # fmt: skip


def test_formats(tmp_path: Path, name: str) -> None:
    folder, modules = drafts.FORMATS[name](models.random_draft(tmp_path / "draft"))
    assert_means(load(tmp_path, folder), modules)


def test_nothing_is_inherited_from_a_quantized_target(tmp_path: Path) -> None:
    from tests.test_quantized_heads import weight

    folder, modules = drafts.FORMATS["plain"](models.random_draft(tmp_path / "draft"))
    config = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "ignore": [],
        "producer": {"name": "modelopt"},
    }
    target = Target(packed=quantized.modelopt_nvfp4(weight(5, models.VOCAB)))
    model = load(tmp_path, folder, target, quantization_config=config)
    assert_means(model, modules)
    assert model.lm_head is target.lm_head and model.model.embed_tokens is target.model.embed_tokens


@pytest.mark.parametrize("packed_target", [False, True])
def test_pruned_vocabulary(tmp_path: Path, packed_target: bool) -> None:
    from tests.test_draft_checkpoint import pruned
    from tests.test_quantized_heads import weight

    folder = pruned(tmp_path / "draft")  # id i of the draft is 2 i of the target
    own = torch.randn(100, models.HIDDEN)
    drafts.edit(folder, lambda weights: weights.update({"lm_head.weight": own}))
    packed = quantized.modelopt_mixed_w4a16(weight(5, models.VOCAB)) if packed_target else None
    model = load(tmp_path, folder, Target(packed=packed))
    hidden = torch.randn(3, models.HIDDEN).bfloat16()
    logits = model.compute_logits(hidden)
    assert logits.shape == (3, models.VOCAB)
    assert logits[:, 1:200:2].isneginf().all() and logits[:, 200:].isneginf().all()
    torch.testing.assert_close(
        logits[:, :200:2].float(), hidden.float() @ own.bfloat16().float().T, rtol=0.05, atol=0.2
    )


@pytest.mark.parametrize("target_vocab, logits_of", [(200, 256), (300, 256), (256, 256), (120, 128)])
def test_differently_padded_vocabularies(tmp_path: Path, target_vocab: int, logits_of: int) -> None:
    """Ids are the same on both sides; past the target's last one there is padding at most."""
    folder = models.random_draft(tmp_path / "draft")
    drafts.configure(folder, dflash_config={"mask_token_id": 5})
    target = Target(target_vocab)
    model = load(tmp_path, folder, target, vocab_size=target_vocab)
    hidden = torch.randn(3, models.HIDDEN).bfloat16()
    logits = model.compute_logits(hidden)
    assert logits.shape == (3, logits_of)
    known = min(target_vocab, logits_of)
    expected = hidden.float() @ target.lm_head.weight[:known].float().T
    torch.testing.assert_close(logits[:, :known].float(), expected, rtol=0.05, atol=0.2)


def test_second_generation(tmp_path: Path) -> None:
    """DFlash2: convolutions over the draft's own block, logits as its selector would get them."""
    from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv

    model = load(tmp_path, drafts.second_generation(tmp_path / "draft"))
    blocks = [module.block_size for module in model.modules() if isinstance(module, DFlashGroupedConv)]
    assert blocks == [models.BLOCK] * 2 * drafts.LAYERS
    hidden = torch.randn(3, models.HIDDEN).bfloat16()
    doubled = model.lm_head.quant_method.apply(model.lm_head, hidden) * 2
    torch.testing.assert_close(model.compute_logits(hidden), doubled[:, : models.VOCAB])


def test_files_are_checked_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker in a process of its own knows what was checked while the configuration was built, unless the
    files have changed."""
    from vllm_weaver.draft import check_draft_files
    from vllm_weaver.spec_decode import draft_checkpoint

    folder = models.random_draft(tmp_path / "draft")
    config = pickle.loads(pickle.dumps(config_with(tmp_path, folder)))
    check, checked = draft_checkpoint.check_draft, []

    def counted(*args: Any) -> Any:
        checked.append(args)
        return check(*args)

    monkeypatch.setattr(draft_checkpoint, "check_draft", counted)
    facts = check_draft_files(config)
    assert facts == draft_checkpoint.DraftFacts(d2t=False, own_head=False, packed_head=False)
    assert not checked
    drafts.edit(folder, lambda weights: weights.update({"lm_head.weight": torch.ones(models.VOCAB, 64)}))
    assert check_draft_files(config).own_head and len(checked) == 1
    drafts.edit(folder, lambda weights: weights.pop("norm.weight"))
    with pytest.raises(ValueError, match="lacks norm.weight"):
        check_draft_files(config)
