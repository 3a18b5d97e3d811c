# SPDX-License-Identifier: Apache-2.0
"""Random checkpoints as real files: hybrid targets, lm_heads in ModelOpt's formats, DFlash drafts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests import quantized
from vllm_weaver.spec_decode.draft_checkpoint import linear_modules

HEAD_INPUT_PEAK = 6.0
"""Largest input that an FP8 lm_head's scale is made for: beyond it no entry of a normed state is likely."""


def random_target(folder: Path, device: torch.device, with_head: bool = True) -> Path:
    """Weights beside the config.json of a `Qwen3_5ForCausalLM` in `folder`, bfloat16; logits are N(0, 1)."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config = json.loads((folder / "config.json").read_text())
    with torch.device("meta"):
        model = Qwen3_5ForCausalLM(Qwen3_5TextConfig(**config))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    if not with_head:
        del shapes["lm_head.weight"]
    # The norms of the recurrent layers multiply by their weight, all others by 1 + weight.
    ones = {name for name in shapes if name.endswith("linear_attn.norm.weight")}
    save_file(_random(shapes, ones, 0, torch.bfloat16, device), folder / "model.safetensors")
    return folder


def random_draft(folder: Path, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> Path:
    """Weights beside the config.json of a `DFlashDraftModel` in `folder`."""
    config = SimpleNamespace(**json.loads((folder / "config.json").read_text()))
    norms = {"hidden_norm.weight": config.hidden_size, "norm.weight": config.hidden_size}
    for layer in range(config.num_hidden_layers):
        at = f"layers.{layer}."
        norms |= {f"{at}self_attn.{name}_norm.weight": config.head_dim for name in "qk"}
        norms |= {
            f"{at}{name}.weight": config.hidden_size
            for name in ("input_layernorm", "post_attention_layernorm")
        }
    shapes: dict[str, tuple[int, ...]] = {name: (size,) for name, size in norms.items()}
    shapes |= {f"{name}.weight": sizes for name, sizes in linear_modules(config).items()}
    save_file(_random(shapes, norms.keys(), 2, dtype, device), folder / "model.safetensors")
    return folder


def _random(
    shapes: Mapping[str, tuple[int, ...]], ones: Any, seed: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Tensor]:
    """Matrices that keep the size of what they multiply; vectors are ones if named so, else zeros."""
    generator = torch.Generator(device).manual_seed(seed)
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = torch.full(shape, float(name in ones), dtype=dtype)
            continue
        values = torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5
        tensors[name] = values.to(dtype).cpu()
    return tensors


def with_random_head(source: Path, folder: Path, algo: str, device: torch.device) -> Path:
    """The target in `source`, which lacks an lm_head, with a random one in `folder`.

    algo: W4A16_NVFP4 or FP8, as ModelOpt's MIXED_PRECISION checkpoints have it. The other weights are linked.
    """
    from scripts.quantize_lib import nvfp4

    config = json.loads((source / "config.json").read_text())
    generator = torch.Generator(device).manual_seed(1)
    size = (config["vocab_size"], config["hidden_size"])
    weight = torch.randn(size, generator=generator, device=device) * size[1] ** -0.5
    if algo == "FP8":
        tensors = quantized.modelopt_fp8(weight).tensors
        tensors["input_scale"] = torch.tensor(HEAD_INPUT_PEAK / 448)
    else:
        codes, scales, factor, _ = nvfp4.pack(weight)
        tensors = {"weight": codes, "weight_scale": scales, "weight_scale_2": factor}
    folder.mkdir()
    (folder / "model.safetensors").symlink_to(source / "model.safetensors")
    head = {f"lm_head.{name}": tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(head, folder / "lm_head.safetensors")
    config["quantization_config"] = quantized.head_only(algo)
    (folder / "config.json").write_text(json.dumps(config))
    return folder
