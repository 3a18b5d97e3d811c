# SPDX-License-Identifier: Apache-2.0
"""Weights packed in the formats that checkpoints have, with float64 copies of what the packed numbers mean.

Packing and scales come from compressed-tensors and, for GPTQ and AWQ, from vLLM's own quantization tools;
what a packed weight means is computed here from integers, code tables and scales in float64. Those packages
are imported late, after `vllm_weaver.cpu.prepare()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)
GROUP = 16
INPUT_PEAK = 3.0
"""Largest input that static activation scales are made for."""


@dataclass
class Packed:
    """A weight [V, d] in one format.

    config: the checkpoint's quantization config. tensors: by the name after the module's. meaning: float64
    [V, d]. error: relative error that quantized inputs cause, 0 for formats that leave inputs alone.
    """

    config: dict[str, Any]
    tensors: dict[str, Tensor]
    meaning: Tensor
    error: float = 0.0
    method: str = "modelopt"


def nvfp4_meaning(packed: Tensor, scale: Tensor, factor: Tensor) -> Tensor:
    """Float64 value of packed E2M1 codes, low nibble first, FP8 scales of groups of 16, and a factor."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(1).long()
    values = E2M1[codes & 7] * torch.where(codes >= 8, -1.0, 1.0)
    return values * scale.double().repeat_interleave(GROUP, dim=1) * factor.double()


def layer_of(packed: Packed, kind: str = "lm_head", vocab: int | None = None) -> nn.Module:
    """vLLM's own layer (`lm_head` or `embed_tokens`) with this weight, loaded by its own loaders, on torch's
    current device; needs a current VllmConfig. vocab: rows, where `meaning` has not all of them."""
    from vllm.model_executor.layers.quantization import get_quantization_config
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    config = get_quantization_config(packed.method).from_config(packed.config) if packed.method else None
    cls = ParallelLMHead if kind == "lm_head" else VocabParallelEmbedding
    rows, hidden = vocab or len(packed.meaning), packed.meaning.shape[1]
    layer = cls(rows, hidden, params_dtype=torch.bfloat16, quant_config=config, prefix=kind)
    parameters = dict(layer.named_parameters())
    # A scale that old files have; vLLM reads and drops it.
    legacy = {"input_scale"} if packed.method == "modelopt_mixed" else set()
    assert parameters.keys() - legacy == packed.tensors.keys()
    for name, tensor in packed.tensors.items():
        parameters[name].weight_loader(parameters[name], tensor)
    layer.quant_method.process_weights_after_loading(layer)
    return layer


def compressed(weight: Tensor, weights: dict[str, Any], inputs: dict[str, Any] | None, format: str) -> Any:
    """compressed-tensors' own parameters of a weight in one of its formats."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**inputs) if inputs else None
    )
    state: dict[str, Tensor] = {"weight": weight}
    groups = weight.unflatten(1, (-1, args.group_size)) if args.group_size else weight.unsqueeze(1)
    low, high = groups.amin(-1), groups.amax(-1)
    if args.strategy == "tensor":
        low, high = weight.amin().reshape(1), weight.amax().reshape(1)
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(weight.amin().reshape(1), weight.amax().reshape(1))
    scale, zero = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state |= {"weight_scale": scale, "weight_zero_point": zero}
    with torch.compiler.set_stance("force_eager"):
        return BaseCompressor.get_value_from_registry(format).compress(state, scheme)


_NVFP4 = {
    "num_bits": 4,
    "type": "float",
    "strategy": "tensor_group",
    "group_size": GROUP,
    "symmetric": True,
}


def _compressed_config(weights: dict[str, Any], inputs: dict[str, Any] | None, format: str) -> dict[str, Any]:
    group = {"targets": ["re:.*lm_head", "Linear"], "weights": weights, "input_activations": inputs}
    return {
        "quant_method": "compressed-tensors",
        "format": format,
        "config_groups": {"group_0": group},
        "ignore": [],
    }


def plain(weight: Tensor) -> Packed:
    return Packed({}, {"weight": weight.bfloat16()}, weight.bfloat16().double(), method="")


def modelopt_fp8(weight: Tensor) -> Packed:
    scale = weight.abs().max() / 448
    codes = (weight / scale).to(torch.float8_e4m3fn)
    tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(INPUT_PEAK / 448)}
    config = {"quantization": {"quant_algo": "FP8", "exclude_modules": []}}
    return Packed(config, tensors, codes.double() * scale.double(), error=0.04)


def modelopt_fp8_channel(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1) / 448
    codes = (weight / scale[:, None]).to(torch.float8_e4m3fn)
    config = {"quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": []}}
    meaning = codes.double() * scale.double()[:, None]
    return Packed(config, {"weight": codes, "weight_scale": scale}, meaning, error=0.04)


MODELOPT_NVFP4 = {"quant_algo": "NVFP4", "kv_cache_quant_algo": None, "group_size": GROUP}


def _modelopt_nvfp4(weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
    state = compressed(weight, _NVFP4, None, "nvfp4-pack-quantized")
    factor = 1 / state["weight_global_scale"].reshape(())
    tensors = {
        "weight": state["weight_packed"],
        "weight_scale": state["weight_scale"],
        "weight_scale_2": factor.float(),
    }
    return tensors, nvfp4_meaning(state["weight_packed"], state["weight_scale"], factor)


def modelopt_nvfp4(weight: Tensor) -> Packed:
    tensors, meaning = _modelopt_nvfp4(weight)
    tensors["input_scale"] = torch.tensor(INPUT_PEAK / (6 * 448))
    config = {"quantization": MODELOPT_NVFP4 | {"exclude_modules": []}}
    return Packed(config, tensors, meaning, error=0.16, method="modelopt_fp4")


def head_only(algo: str) -> dict[str, Any]:
    """The quantization config of a checkpoint with nothing but its lm_head quantized, W4A16_NVFP4 or FP8."""
    layers = {"lm_head": {"quant_algo": algo} | ({} if algo == "FP8" else {"group_size": GROUP})}
    return {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}


def modelopt_mixed_w4a16(weight: Tensor) -> Packed:
    """The format of the lm_head of the released NVFP4 targets."""
    tensors, meaning = _modelopt_nvfp4(weight)
    return Packed(head_only("W4A16_NVFP4"), tensors, meaning, method="modelopt_mixed")


def compressed_nvfp4(weight: Tensor, inputs: bool = True) -> Packed:
    act = _NVFP4 | {"dynamic": "local"} if inputs else None
    state = compressed(weight, _NVFP4, act, "nvfp4-pack-quantized")
    meaning = nvfp4_meaning(state["weight_packed"], state["weight_scale"], 1 / state["weight_global_scale"])
    if inputs:
        state["input_global_scale"] = torch.tensor([6 * 448 / INPUT_PEAK])
    config = _compressed_config(_NVFP4, act, "nvfp4-pack-quantized")
    return Packed(config, state, meaning, error=0.16 if inputs else 0.0, method="compressed-tensors")


def compressed_nvfp4_a16(weight: Tensor) -> Packed:
    return compressed_nvfp4(weight, inputs=False)


def compressed_fp8(weight: Tensor) -> Packed:
    weights = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True}
    inputs = {"num_bits": 8, "type": "float", "strategy": "token", "symmetric": True, "dynamic": True}
    state = compressed(weight, weights, inputs, "float-quantized")
    meaning = state["weight"].double() * state["weight_scale"].double()
    config = _compressed_config(weights, inputs, "float-quantized")
    return Packed(config, state, meaning, error=0.04, method="compressed-tensors")


def compressed_int4(weight: Tensor) -> Packed:
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    state = compressed(weight, weights, None, "pack-quantized")
    packed = state["weight_packed"]
    codes = torch.stack([packed >> (4 * i) & 15 for i in range(8)], dim=-1).flatten(1)
    meaning = (codes - 8).double() * state["weight_scale"].double().repeat_interleave(32, dim=1)
    return Packed(
        _compressed_config(weights, None, "pack-quantized"), state, meaning, method="compressed-tensors"
    )


def _int4_groups(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned codes [d, V], scales [d / group, V] and zero points likewise, asymmetric."""
    rows = weight.T.unflatten(0, (-1, group))
    low, high = rows.amin(1).clamp(max=0), rows.amax(1).clamp(min=0)
    scale = ((high - low) / 15).bfloat16().float()
    zero = (-low / scale).round().clamp(0, 15)
    codes = (rows / scale[:, None] + zero[:, None]).round().clamp(0, 15)
    return codes.flatten(0, 1).int(), scale, zero.int()


def embedding_int4(weight: Tensor) -> Packed:
    """The only format that vLLM has quantized embeddings in on every machine."""
    packed = compressed_int4(weight)
    packed.config["config_groups"]["group_0"]["targets"] = ["re:.*embed_tokens"]
    return packed


def gptq(weight: Tensor) -> Packed:
    from vllm.model_executor.layers.quantization.utils.quant_utils import pack_cols, pack_rows

    codes, scale, _ = _int4_groups(weight, 32)
    size_k, size_n = codes.shape
    zero = torch.full(scale.shape, 8, dtype=torch.int32)  # symmetric
    peak = weight.T.unflatten(0, (-1, 32)).abs().amax(1)
    scale = (peak / 7).bfloat16().float()
    codes = (weight.T.unflatten(0, (-1, 32)) / scale[:, None]).round().clamp(-8, 7).flatten(0, 1).int() + 8
    tensors = {
        "qweight": pack_rows(codes, 4, size_k, size_n),
        "qzeros": pack_cols(zero - 1, 4, *zero.shape),
        "scales": scale.bfloat16(),
    }
    meaning = (codes.double() - 8) * scale.double().repeat_interleave(32, dim=0)
    config = {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "lm_head": True,
    }  # fmt: skip
    return Packed(config, tensors, meaning.T, method="gptq")


def awq(weight: Tensor) -> Packed:
    from vllm.model_executor.layers.quantization.utils.quant_utils import awq_pack

    codes, scale, zero = _int4_groups(weight, 32)
    tensors = {
        "qweight": awq_pack(codes, 4, *codes.shape),
        "qzeros": awq_pack(zero, 4, *zero.shape),
        "scales": scale.bfloat16(),
    }
    expand = [part.double().repeat_interleave(32, dim=0) for part in (scale, zero)]
    meaning = (codes.double() - expand[1]) * expand[0]
    config = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "lm_head": True}
    return Packed(config, tensors, meaning.T, method="awq")


FORMATS: dict[str, Callable[[Tensor], Packed]] = {
    make.__name__: make
    for make in (
        plain, modelopt_fp8, modelopt_fp8_channel, modelopt_nvfp4, modelopt_mixed_w4a16, compressed_nvfp4,
        compressed_nvfp4_a16, compressed_fp8, compressed_int4, gptq, awq,
    )
}  # fmt: skip
