# SPDX-License-Identifier: Apache-2.0
"""Draft folders in every format that drafts are published in, small and random, with what their packed
weights mean."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests import quantized
from tests.e2e import models
from tests.quantized import Packed

LAYERS = 2
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
# Left alone, named with and without the prefix; layer 1's fused projection by its shards.
IGNORED = [
    "model.layers.0.self_attn.o_proj",
    *(f"layers.1.{name}" for name in GROUPS[0]),
]
LIBRARY = {"name": "modelopt", "version": "0.46.0"}


def _split(packed: Packed, sizes: list[int]) -> list[Packed]:
    """A packed weight's shards: what has a row each is cut, the rest is everybody's."""
    total, parts, start = sum(sizes), [], 0
    for size in sizes:
        rows = slice(start, start + size)
        tensors = {
            name: tensor[rows].contiguous() if tensor.ndim and len(tensor) == total else tensor.clone()
            for name, tensor in packed.tensors.items()
        }
        if "weight_shape" in tensors:
            tensors["weight_shape"] = torch.tensor([size, packed.meaning.shape[1]])
        parts.append(Packed(packed.config, tensors, packed.meaning[rows], packed.error))
        start += size
    return parts


def quantize(
    folder: Path, make: Callable[[Tensor], Packed], ignored: list[str], with_fc: bool = False
) -> tuple[dict[str, Any], dict[str, Packed]]:
    """Quantizes the draft in `folder` in place; returns the packer's config and the modules' packed weights
    (plain ones too), by name."""
    weights = load_file(folder / "model.safetensors")
    groups = [tuple(f"layers.{i}.{name}" for name in group) for i in range(LAYERS) for group in GROUPS]
    groups += [("fc",)]
    modules: dict[str, Packed] = {}
    for group in groups:
        whole = torch.cat([weights.pop(f"{name}.weight").float() for name in group])
        names = {alias for name in group for alias in (name, f"model.{name}")}
        plain = names & set(ignored) or (group == ("fc",) and not with_fc)
        packed = quantized.plain(whole) if plain else make(whole)
        sizes = [len(whole) // len(group)] * len(group)
        if group == groups[0] or group == groups[4]:
            sizes = [128, 64, 64]
        for name, part in zip(group, _split(packed, sizes), strict=True):
            modules[name] = part
            weights |= {f"{name}.{suffix}": tensor for suffix, tensor in part.tensors.items()}
    config = next((m.config for m in modules.values() if m.config), {})
    save_file(weights, folder / "model.safetensors")
    return config, modules


def configure(folder: Path, **changes: Any) -> None:
    """Changes keys of the folder's config.json; None drops a key, and those of `dflash_config` are merged."""
    config = json.loads((folder / "config.json").read_text())
    nested = changes.pop("dflash_config", None)
    if nested:
        config["dflash_config"] |= nested
    config = {key: value for key, value in (config | changes).items() if value is not None}
    (folder / "config.json").write_text(json.dumps(config))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Rewrites the folder's weights after `change`."""
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors")


def _modelopt(
    folder: Path, make: Any, algo: str, form: str, with_fc: bool = False
) -> tuple[Path, dict[str, Packed]]:
    ignored = IGNORED + ([] if with_fc else ["fc*"])
    _, modules = quantize(folder, make, IGNORED, with_fc)
    inner = {"quant_algo": algo, "group_size": 16, "kv_cache_quant_algo": None, "exclude_modules": ignored}
    flat = {"quant_method": "modelopt", "quant_algo": algo, "ignore": ignored}
    config: dict[str, Any] | None = {
        "flat": flat | {"producer": LIBRARY},
        "string": flat | {"producer": "modelopt"},
        "nested": {"quantization": inner, "producer": LIBRARY},
        "nested string": {"quantization": inner, "producer": "modelopt"},
        "beside": None,
    }[form]
    if form == "beside":
        (folder / "hf_quant_config.json").write_text(json.dumps({"producer": LIBRARY, "quantization": inner}))
    configure(folder, quantization_config=config)
    return folder, modules


def _mixed(folder: Path) -> tuple[Path, dict[str, Packed]]:
    def either(weight: Tensor) -> Packed:
        small = weight.shape[0] == models.HIDDEN and weight.shape[1] == 128
        return quantized.modelopt_fp8(weight) if small else quantized.modelopt_nvfp4(weight)

    _, modules = quantize(folder, either, IGNORED)
    layers = {
        name: {"quant_algo": "FP8" if "weight_scale_2" not in part.tensors else "NVFP4"}
        for name, part in modules.items()
        if part.config
    }
    assert {info["quant_algo"] for info in layers.values()} == {"FP8", "NVFP4"}
    config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    configure(folder, quantization_config=config | {"producer": LIBRARY})
    return folder, modules


def _compressed(folder: Path, make: Any, targets: list[str]) -> tuple[Path, dict[str, Packed]]:
    config, modules = quantize(folder, make, IGNORED)
    config["config_groups"]["group_0"]["targets"] = targets
    configure(folder, quantization_config=config | {"ignore": [*IGNORED, "re:.*fc$"]})
    return folder, modules


def _fp8(folder: Path, static: bool) -> tuple[Path, dict[str, Packed]]:
    def make(weight: Tensor) -> Packed:
        packed = quantized.modelopt_fp8(weight)
        if not static:
            del packed.tensors["input_scale"]
        return packed

    _, modules = quantize(folder, make, IGNORED)
    config = {
        "quant_method": "fp8",
        "activation_scheme": "static" if static else "dynamic",
        "ignored_layers": [*IGNORED, "fc"],
    }
    configure(folder, quantization_config=config)
    return folder, modules


def _plain(folder: Path) -> tuple[Path, dict[str, Packed]]:
    _, modules = quantize(folder, quantized.plain, [], with_fc=True)
    return folder, modules


_REGEX = [r"re:.*layers\.0\..*", r"re:.*layers\.1\..*"]
FORMATS: dict[str, Callable[[Path], tuple[Path, dict[str, Packed]]]] = {
    "plain": _plain,
    "modelopt fp8 nested": lambda f: _modelopt(f, quantized.modelopt_fp8, "FP8", "nested"),
    "modelopt fp8 flat, fc too": lambda f: _modelopt(f, quantized.modelopt_fp8, "FP8", "flat", True),
    "modelopt fp8 per channel": lambda f: _modelopt(
        f, quantized.modelopt_fp8_channel, "FP8_PER_CHANNEL_PER_TOKEN", "flat"
    ),
    "nvfp4 flat": lambda f: _modelopt(f, quantized.modelopt_nvfp4, "NVFP4", "flat"),
    "nvfp4 flat, fc too": lambda f: _modelopt(f, quantized.modelopt_nvfp4, "NVFP4", "flat", True),
    "nvfp4 nested": lambda f: _modelopt(f, quantized.modelopt_nvfp4, "NVFP4", "nested"),
    "nvfp4 producer a string": lambda f: _modelopt(f, quantized.modelopt_nvfp4, "NVFP4", "string"),
    "nvfp4 nested, producer a string": lambda f: _modelopt(
        f, quantized.modelopt_nvfp4, "NVFP4", "nested string"
    ),
    "nvfp4 in hf_quant_config.json": lambda f: _modelopt(f, quantized.modelopt_nvfp4, "NVFP4", "beside"),
    "mixed precision": _mixed,
    "compressed nvfp4": lambda f: _compressed(f, quantized.compressed_nvfp4, ["Linear"]),
    "compressed fp8": lambda f: _compressed(f, quantized.compressed_fp8, _REGEX),
    "compressed int4": lambda f: _compressed(f, quantized.compressed_int4, ["Linear"]),
    "fp8 dynamic": lambda f: _fp8(f, static=False),
    "fp8 static": lambda f: _fp8(f, static=True),
}


def second_generation(path: Path) -> Path:
    """A random DFlash2 draft for `models.attention_only`, with the released ones' parts."""
    models.random_draft(path)
    nested = {
        "conv_kernel_size": 3, "conv_group_size": 16, "selector_rank": 8, "selector_top_k": 5,
        "output_multiplier": 2.0,
    }  # fmt: skip
    configure(path, architectures=["DFlash2DraftModel"], dflash_config=nested)

    def grow(weights: dict[str, Tensor]) -> None:
        generator = torch.Generator().manual_seed(8)

        def random(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator) * 0.1

        for layer in range(LAYERS):
            for conv in ("attention_conv", "mlp_conv"):
                at = f"layers.{layer}.{conv}."
                weights[f"{at}base_kernel"] = random(2, 3, models.HIDDEN)
                weights[f"{at}kernel_projection.weight"] = random(2 * 3 * models.HIDDEN // 16, models.HIDDEN)
        for name in ("predecessor", "successor"):
            weights[f"candidate_selector.{name}_codebook"] = random(models.VOCAB, 8)
        weights["candidate_selector.hidden_projection.weight"] = random(8, models.HIDDEN)

    edit(path, grow)
    return path
