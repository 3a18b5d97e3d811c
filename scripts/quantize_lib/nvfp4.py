# SPDX-License-Identifier: Apache-2.0
"""NVFP4 of a draft's weights in the ModelOpt layout: E2M1 codes in groups of 16 with FP8-E4M3 scales and one
fp32 scale a fused module, rounded to nearest. Codes and scales are compressed-tensors' own."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from vllm_weaver import __version__
from vllm_weaver.spec_decode.draft_quantization import FUSED

GROUP = 16
LARGEST = 6.0 * 448.0
"""Largest number of an E2M1 code with an FP8-E4M3 scale: a global scale is the largest weight over this."""
UNCALIBRATED = 1.0
"""Input scale where nothing was captured: blocks keep scales of their own, around 1."""
_ROWS = 1 << 22  # weights packed at a time: packing compares each with eight codes
# One entry a module that vLLM runs as one: its shards have one input and share their scales.
FUSED_MODULES = {
    **{f"self_attn.{name}": shards for name, shards in FUSED.items() if name == "qkv_proj"},
    "self_attn.o_proj": ("o_proj",),
    **{f"mlp.{name}": shards for name, shards in FUSED.items() if name == "gate_up_proj"},
    "mlp.down_proj": ("down_proj",),
}
# What stays as it is, in the words of ModelOpt's lists.
IGNORED = ["fc", "attention_conv", "mlp_conv", "candidate_selector", "lm_head", "embed_tokens"]


@dataclass(frozen=True)
class ModuleReport:
    """How one fused module came out: relative error of its weights, and its input."""

    module: str
    error: float
    input_peak: float | None
    input_scale: float
    bytes_before: int
    bytes_after: int


def shard_names(layer: int, fused: str) -> list[str]:
    """The checkpoint's modules that make up a fused module (`self_attn.qkv_proj`) of a layer."""
    parent = fused.partition(".")[0]
    return [f"layers.{layer}.{parent}.{shard}" for shard in FUSED_MODULES[fused]]


def pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, float]:
    """Codes uint8 [out, in / 2], scales FP8 [out, in / 16], global scale fp32 [] and the relative error of a
    weight [out, in].

    ValueError if `in` is not a multiple of 16 or a weight is not finite."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    if weight.shape[1] % GROUP:
        raise ValueError(f"its input size {weight.shape[1]} is not a multiple of {GROUP}")
    if not weight.isfinite().all():
        raise ValueError("it has weights that are not finite")
    args = QuantizationArgs(
        num_bits=4,
        type="float",
        strategy="tensor_group",
        group_size=GROUP,
        symmetric=True,
        scale_dtype=torch.float8_e4m3fn,  # codes are chosen for the scales as they are stored
        zp_dtype=torch.float8_e4m3fn,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    compressor = BaseCompressor.get_value_from_registry("nvfp4-pack-quantized")
    weight = weight.float()
    factor = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    codes, scales, off = [], [], 0.0
    with torch.compiler.set_stance("force_eager"):
        for rows in weight.split(max(1, _ROWS // weight.shape[1])):
            groups = rows.unflatten(1, (-1, GROUP))
            scale, zero = calculate_qparams(groups.amin(-1), groups.amax(-1), args, global_scale=factor)
            state = {
                "weight": rows,
                "weight_scale": scale,
                "weight_zero_point": zero,
                "weight_global_scale": factor,
            }
            packed = compressor.compress(state, scheme)
            codes.append(packed["weight_packed"])
            scales.append(packed["weight_scale"])
            back = compressor.decompress(packed, scheme)["weight"].float()
            off += float((back - rows).square().sum())
    error = (off / max(float(weight.square().sum()), 1e-30)) ** 0.5
    return torch.cat(codes), torch.cat(scales), 1 / factor.reshape(()), error


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of a folder's .safetensors files."""
    weights: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safetensors.safe_open(path, framework="pt") as file:
            weights |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return weights


def quantize(
    weights: Mapping[str, Tensor], layers: int, peaks: Mapping[str, float] | None, device: torch.device
) -> tuple[dict[str, Tensor], list[ModuleReport]]:
    """A draft's tensors with its linear layers packed, and a report a fused module.

    peaks: largest input by fused module (`layers.0.mlp.down_proj`), None for an uncalibrated draft."""
    result = dict(weights)
    reports = []
    for layer in range(layers):
        for fused in FUSED_MODULES:
            name, shards = f"layers.{layer}.{fused}", shard_names(layer, fused)
            parts = [result.pop(f"{shard}.weight") for shard in shards]
            whole = torch.cat(parts).to(device)
            try:
                codes, scales, factor, error = pack(whole)
            except ValueError as problem:
                raise ValueError(f"{name} cannot be quantized: {problem}") from None
            peak = None if peaks is None else peaks[name]
            input_scale = UNCALIBRATED if peak is None else peak / LARGEST
            sizes = [len(part) for part in parts]
            for shard, code, scale in zip(shards, codes.split(sizes), scales.split(sizes), strict=True):
                result |= {
                    f"{shard}.weight": code.contiguous().cpu(),
                    f"{shard}.weight_scale": scale.contiguous().cpu(),
                    f"{shard}.weight_scale_2": factor.float().cpu().clone(),
                    f"{shard}.input_scale": torch.tensor(input_scale, dtype=torch.float32),
                }
            after = codes.nbytes + scales.nbytes + 8 * len(shards)
            before = sum(part.nbytes for part in parts)
            reports.append(ModuleReport(name, error, peak, input_scale, before, after))
    return result, reports


def quantization_config() -> tuple[dict[str, Any], dict[str, Any]]:
    """ModelOpt's two forms: `quantization_config` of config.json, and hf_quant_config.json."""
    producer = {"name": "vllm_weaver", "version": __version__}
    numbers = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": GROUP}
    groups = {"group_0": {"input_activations": numbers, "weights": numbers, "targets": ["Linear"]}}
    flat = {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "config_groups": groups,
        "ignore": IGNORED,
        "producer": producer,
    }
    nested = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": None,
        "group_size": GROUP,
        "exclude_modules": IGNORED,
    }
    return flat, {"producer": producer, "quantization": nested}


def write(folder: Path, source: Path, weights: Mapping[str, Tensor]) -> None:
    """The quantized draft's files; the weights come last, under their name only when they are whole."""
    flat, beside = quantization_config()
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": flat}, indent=2) + "\n")
    (folder / "hf_quant_config.json").write_text(json.dumps(beside, indent=2) + "\n")
    for extra in ("mask_embedding.pt", "generation_config.json"):
        if (source / extra).is_file():
            shutil.copy2(source / extra, folder / extra)
    partial = folder / "model.partial"
    save_file(dict(weights), partial, metadata={"format": "pt"})
    partial.rename(folder / "model.safetensors")
