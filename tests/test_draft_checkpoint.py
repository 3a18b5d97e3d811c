# SPDX-License-Identifier: Apache-2.0
"""Draft files with one fault each: every one is found before weights load, in one sentence that names file
and tensor (or key); whole files of every format pass."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from vllm_weaver import cpu

if not torch.cuda.is_available():
    cpu.prepare()

from tests import drafts  # noqa: E402  (vLLM's environment comes first)
from tests.e2e import models  # noqa: E402
from vllm_weaver.draft import own_quantization  # noqa: E402
from vllm_weaver.spec_decode import draft_checkpoint  # noqa: E402
from vllm_weaver.spec_decode.draft_checkpoint import DraftFacts, TargetShape, check_draft  # noqa: E402

TARGET = TargetShape(models.HIDDEN, 3, models.VOCAB)
PLAIN = DraftFacts(d2t=False, own_head=False, packed_head=False)


def check(folder: Path, target: TargetShape = TARGET) -> DraftFacts:
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    return check_draft(folder, config, own_quantization(config, folder), target)


def refusal(folder: Path, target: TargetShape = TARGET) -> str:
    with pytest.raises(ValueError) as caught:
        check(folder, target)
    message = str(caught.value)
    assert str(folder) in message and "\n" not in message and len(message) < 700 + len(str(folder))
    return message


def test_whole_drafts_pass(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    for name in drafts.FORMATS if request.config.getoption("--all") else ("plain", "fp8 static"):
        folder, _ = drafts.FORMATS[name](models.random_draft(tmp_path / name.replace(" ", "-")))
        assert check(folder) == PLAIN, name


def test_second_generation_passes(tmp_path: Path) -> None:
    folder = drafts.second_generation(tmp_path / "draft")
    assert check(folder) == PLAIN
    drafts.edit(folder, lambda w: w.pop("layers.1.mlp_conv.base_kernel"))
    assert "lacks layers.1.mlp_conv.base_kernel" in refusal(folder)


# --- tensors ---------------------------------------------------------------------------------------------

Q, GATE = "layers.0.self_attn.q_proj", "layers.1.mlp.gate_proj"


def put(name: str, value: Any) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        weights[name] = value(weights.get(name)) if callable(value) else value

    return change


def drop(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(weights: dict[str, Tensor]) -> None:
        del weights[name]

    return change


FAULTS: dict[str, tuple[str, Callable[[dict[str, Tensor]], None], tuple[str, ...]]] = {
    "missing weight": ("plain", drop("layers.1.mlp.up_proj.weight"), ("lacks layers.1.mlp.up_proj.weight",)),
    "missing norm": ("plain", drop("hidden_norm.weight"), ("lacks hidden_norm.weight",)),
    "surplus": ("plain", put("extra.weight", torch.ones(2)), ("holds extra.weight", "would not use it")),
    "surplus layer": (
        "plain",
        put("layers.2.mlp.up_proj.weight", torch.ones(2)),
        ("holds layers.2.mlp.up_proj.weight",),
    ),
    "wrong shape": (
        "plain",
        put(f"{Q}.weight", lambda w: w[:, 1:].contiguous()),
        (f"{Q}.weight has shape [128, 63], but must have [128, 64]",),
    ),
    "unsaid quantization": (
        "plain",
        put(f"{Q}.weight_scale", torch.ones(())),
        (f"{Q} has weight, weight_scale", "it is unquantized"),
    ),
    "unsaid FP8": (
        "plain",
        put(f"{Q}.weight", lambda w: w.to(torch.float8_e4m3fn)),
        (f"{Q}.weight is F8_E4M3, but must be BF16 or F16 or F32",),
    ),
    "missing scale": ("nvfp4 flat", drop(f"{Q}.weight_scale"), (f"lacks {Q}.weight_scale",)),
    "missing input scale": ("nvfp4 flat", drop(f"{GATE}.input_scale"), (f"lacks {GATE}.input_scale",)),
    "plain where packed": (
        "nvfp4 flat",
        put(f"{Q}.weight", torch.ones(128, 64)),
        (f"{Q}.weight is F32, but must be U8",),
    ),
    "NaN block scale": (
        "nvfp4 flat",
        put(f"{Q}.weight_scale", lambda w: (w.float() * torch.nan).to(w.dtype)),
        (f"{Q}.weight_scale is not finite",),
    ),
    "infinite scale": (
        "nvfp4 nested",
        put(f"{GATE}.weight_scale_2", torch.tensor(torch.inf)),
        (f"{GATE}.weight_scale_2 is not finite",),
    ),
    "zero input scale": (
        "modelopt fp8 nested",
        put(f"{GATE}.input_scale", torch.tensor(0.0)),
        (f"{GATE}.input_scale is 0.0, but must be above 0",),
    ),
    "unshared scale": (
        "nvfp4 flat",
        put("layers.0.self_attn.k_proj.weight_scale_2", torch.tensor(0.5)),
        ("weight_scale_2 differs between", Q, "layers.0.self_attn.v_proj"),
    ),
    "packed though ignored": (
        "nvfp4 flat",
        put("fc.weight_scale", torch.ones(64, 8).to(torch.float8_e4m3fn)),
        ("fc has weight, weight_scale", "it is unquantized", "list of ignored modules"),
    ),
    "compressed, no global scale": (
        "compressed nvfp4",
        drop(f"{Q}.weight_global_scale"),
        (f"lacks {Q}.weight_global_scale",),
    ),
    "d2t without a head": (
        "plain",
        put("d2t", torch.zeros(models.VOCAB, dtype=torch.int64)),
        ("holds d2t without an lm_head",),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_tensors(tmp_path: Path, name: str) -> None:
    form, change, expected = FAULTS[name]
    folder, _ = drafts.FORMATS[form](models.random_draft(tmp_path / "draft"))
    drafts.edit(folder, change)
    message = refusal(folder)
    assert "model.safetensors" in message
    for part in expected:
        assert part in message, message


def pruned(path: Path, offsets: Tensor | None = None) -> Path:
    """A draft of 100 of the target's ids, with a head of its own."""
    folder = models.random_draft(path)
    drafts.configure(folder, draft_vocab_size=100)
    chosen = torch.arange(100) if offsets is None else offsets

    def change(weights: dict[str, Tensor]) -> None:
        weights["lm_head.weight"] = torch.randn(100, models.HIDDEN)
        weights["d2t"] = chosen  # id of token i: i + d2t[i]

    drafts.edit(folder, change)
    return folder


def test_pruned_vocabularies(tmp_path: Path) -> None:
    assert check(pruned(tmp_path / "a")) == DraftFacts(d2t=True, own_head=True, packed_head=False)
    far = torch.arange(100)
    far[-1] += 60  # 99 + 159 = 258
    assert "d2t maps to ids from 0 to 258, but must map to different ids below 256" in refusal(
        pruned(tmp_path / "b", far)
    )
    twice = torch.arange(100)
    twice[1] -= 2
    assert "must map to different ids" in refusal(pruned(tmp_path / "c", twice))
    folder = pruned(tmp_path / "d")
    drafts.edit(folder, drop("d2t"))
    assert "lacks d2t" in refusal(folder)


# --- configuration ---------------------------------------------------------------------------------------

CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    "layer id too large": (
        "plain",
        {"dflash_config": {"target_layer_ids": [0, 3]}},
        "dflash_config.target_layer_ids is [0, 3], but must be different numbers from 0 to 2",
    ),
    "layer id twice": (
        "plain",
        {"dflash_config": {"target_layer_ids": [1, 1]}},
        "target_layer_ids is [1, 1]",
    ),
    "no layer ids": (
        "plain",
        {"dflash_config": {"target_layer_ids": None}},
        "target_layer_ids is None, but must be a list of layer numbers",
    ),
    "one layer id less": (
        "plain",
        {"dflash_config": {"target_layer_ids": [1]}},
        "fc.weight has shape [64, 128], but must have [64, 64]",
    ),
    "other target": ("plain", {"num_target_layers": 64}, "num_target_layers is 64, but the target has 3"),
    "mask token": ("plain", {"dflash_config": {"mask_token_id": 256}}, "mask_token_id is 256, but must be"),
    "architecture": ("plain", {"architectures": ["Qwen3ForCausalLM"]}, "architectures is 'Qwen3ForCausalLM'"),
    "unknown method": ("plain", {"quantization_config": {"quant_method": "awq"}}, "quant_method='awq'"),
    "unknown algorithm": (
        "plain",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "INT4"}},
        "quant_algo='INT4'",
    ),
    "nested without keys": (
        "plain",
        {"quantization_config": {"producer": "modelopt", "quantization": {"quant_algo": "NVFP4"}}},
        "lacks group_size, kv_cache_quant_algo, exclude_modules",
    ),
    "ignore is no list": (
        "nvfp4 flat",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": "fc"}},
        "ignore='fc', which must be a list",
    ),
    "part of a fused module": (
        "nvfp4 flat",
        {
            "quantization_config": {
                "quant_method": "modelopt",
                "quant_algo": "NVFP4",
                "ignore": ["layers.0.mlp.up_proj"],
            }
        },
        "its quantization differs within layers.0.mlp.gate_up_proj",
    ),
    "ignored but packed": (
        "nvfp4 flat",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["*"]}},
        "but by the draft's own quantization config it is unquantized",
    ),
    "not ignored but plain": (
        "nvfp4 flat",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": []}},
        ".weight_scale",
    ),
    "two configs": (
        "nvfp4 in hf_quant_config.json",
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}},
        "has quant_algo='NVFP4', but config.json beside it has 'FP8'",
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_fault_in_the_configuration(tmp_path: Path, name: str) -> None:
    form, changes, expected = CONFIGS[name]
    folder, _ = drafts.FORMATS[form](models.random_draft(tmp_path / "draft"))
    drafts.configure(folder, **changes)
    assert expected in refusal(folder)


def test_another_hidden_size(tmp_path: Path) -> None:
    folder = models.random_draft(tmp_path / "draft")
    assert "hidden_size is 64, but the target's hidden size is 128" in refusal(
        folder, TargetShape(128, 3, models.VOCAB)
    )


# --- files -----------------------------------------------------------------------------------------------


def shard(folder: Path, indexed: bool) -> list[Path]:
    """Splits the folder's weights into three shards."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    paths, where = [], {}
    for i in range(3):
        paths.append(folder / f"model-{i + 1:05d}-of-00003.safetensors")
        part = {name: tensor for n, (name, tensor) in enumerate(sorted(weights.items())) if n % 3 == i}
        save_file(part, paths[-1])
        where |= dict.fromkeys(part, paths[-1].name)
    if indexed:
        (folder / draft_checkpoint.INDEX).write_text(json.dumps({"weight_map": where}))
    return paths


@pytest.mark.parametrize("indexed", [True, False])
def test_shards(tmp_path: Path, indexed: bool) -> None:
    folder = models.random_draft(tmp_path / "draft")
    paths = shard(folder, indexed)
    assert check(folder) == PLAIN
    content = paths[1].read_bytes()
    paths[1].write_bytes(content[:-100])
    assert f"{paths[1].name}' is not a whole safetensors file" in refusal(folder)
    paths[1].unlink()
    assert f"lacks {paths[1].name}" in refusal(folder)
    paths[1].write_bytes(content)
    weights = load_file(paths[0])
    first, *_ = sorted(weights)
    moved = load_file(paths[2]) | {first: weights[first]}
    save_file(moved, paths[2])
    assert f"holds {first} again" in refusal(folder)
    if indexed:
        del weights[first]
        save_file(weights, paths[0])
        assert f"lacks {first}, which {draft_checkpoint.INDEX} says it has" in refusal(folder)
        (folder / draft_checkpoint.INDEX).write_text("{}")
        assert "no readable weight_map" in refusal(folder)


def test_no_weights(tmp_path: Path) -> None:
    folder = models.random_draft(tmp_path / "draft")
    (folder / "model.safetensors").rename(folder / "model.bin")
    assert "holds no .safetensors file" in refusal(folder)


@pytest.mark.parametrize("listing", ["shards.sha256", "SHA256SUMS"])
def test_listed_digests(tmp_path: Path, listing: str) -> None:
    folder = models.random_draft(tmp_path / "draft")
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    (folder / listing).write_text(f"{digest}  model.safetensors\n{'1' * 64}  README.md\n")
    assert check(folder) == PLAIN
    (folder / listing).write_text(f"{'0' * 64} *./model.safetensors\n")
    message = refusal(folder)
    assert digest in message and "0" * 64 in message


def test_a_published_revision_has_its_digest(tmp_path: Path) -> None:
    (revision, files), *_ = draft_checkpoint.PUBLISHED_SHA256.items()
    folder = models.random_draft(tmp_path / revision)
    assert files["model.safetensors"] in refusal(folder)
