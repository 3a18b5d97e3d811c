# SPDX-License-Identifier: Apache-2.0
"""Model folders of a given shape without weights (for `load_format=dummy`), and a random Weaver head."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

BLOCK = 16  # the draft predicts BLOCK - 1 positions


@dataclass(frozen=True)
class Shape:
    """Sizes of a hybrid target (every fourth layer attends) and of its draft and Weaver head."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    vocab: int
    draft_layers: int
    draft_heads: int
    draft_kv_heads: int
    rank: int
    weaver_mlp: int
    head_dim: int = 256
    gdn_dim: int = 128
    weaver_layers: int = 1
    weaver_heads: int = 16
    pool: int = 512


SHAPES = {
    # Qwen3.6-27B with its DFlash draft; the released Weaver head has 56.7 M parameters, which fixes its MLP.
    "27b": Shape(5120, 17408, 64, 24, 4, 16, 48, 248320, 5, 32, 8, 2048, 1365),
    "2b": Shape(2048, 6144, 24, 8, 2, 16, 16, 151936, 5, 16, 8, 1024, 1024),
}


def target_config(shape: Shape) -> dict[str, Any]:
    """config.json of the target."""
    kinds = ["full_attention" if i % 4 == 3 else "linear_attention" for i in range(shape.layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.layers,
        "layer_types": kinds,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "attn_output_gate": True,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": shape.gdn_dim,
        "linear_value_head_dim": shape.gdn_dim,
        "linear_num_key_heads": shape.key_heads,
        "linear_num_value_heads": shape.value_heads,
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "partial_rotary_factor": 0.25,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000000.0,
            "partial_rotary_factor": 0.25,
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
        },
        "tie_word_embeddings": False,
        "initializer_range": 0.02,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "bfloat16",
    }


def draft_config(shape: Shape) -> dict[str, Any]:
    """config.json of the DFlash draft."""
    step = (shape.layers - 3) // (shape.draft_layers - 1)
    return {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.intermediate,
        "num_hidden_layers": shape.draft_layers,
        "num_attention_heads": shape.draft_heads,
        "num_key_value_heads": shape.draft_kv_heads,
        "head_dim": 128,
        "hidden_act": "silu",
        "max_position_embeddings": 262144,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000000.0,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "block_size": BLOCK,
        "num_target_layers": shape.layers,
        "dflash_config": {
            "mask_token_id": shape.vocab - 1,
            "target_layer_ids": [1 + step * i for i in range(shape.draft_layers)],
        },
        "dtype": "bfloat16",
    }


def write_models(folder: Path, shape: Shape) -> dict[str, Path]:
    """Folders `target`, `draft` and `weaver` under `folder`; the first two hold a config alone."""
    paths = {name: folder / name for name in ("target", "draft", "weaver")}
    for path in paths.values():
        path.mkdir(parents=True, exist_ok=True)
    (paths["target"] / "config.json").write_text(json.dumps(target_config(shape)))
    (paths["draft"] / "config.json").write_text(json.dumps(draft_config(shape)))
    config = WeaverConfig(
        d_model=shape.hidden,
        d_embed=shape.hidden,
        d_rank=shape.rank,
        num_layers=shape.weaver_layers,
        num_heads=shape.weaver_heads,
        mlp_dim=shape.weaver_mlp,
        K=BLOCK - 1,
        candidate_pool_size=shape.pool,
    )
    torch.manual_seed(0)
    head = WeaverHead(config)
    torch.nn.init.normal_(head.lm_head_query_in.weight, std=0.02)  # zero in a new head: no conditional scores
    save_weaver(head.to(torch.bfloat16), paths["weaver"] / "weaver.safetensors")
    return paths
