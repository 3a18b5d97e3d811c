# SPDX-License-Identifier: Apache-2.0
"""Model folders that tests make: the demo target in its multimodal wrapper, a random attention-only pair."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from tests import checkpoints
from tests.e2e.harness import DEMO

VOCAB, HIDDEN, BLOCK = 256, 64, 8
THINKING = ("<think>", "</think>")


def wrapper(path: Path) -> Path:
    """The demo target as `Qwen3_5ForConditionalGeneration`, the class of the released checkpoints, with a
    random vision tower that text requests never use."""
    from transformers import Qwen3_5Config
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5VisionModel

    text = json.loads((DEMO / "target" / "config.json").read_text())
    vision = {
        "depth": 1,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_heads": 2,
        "in_channels": 3,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "out_hidden_size": text["hidden_size"],
        "num_position_embeddings": 16,
    }
    special = dict(
        zip(
            ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"),
            range(4, 8),
            strict=True,
        )
    )
    config = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text,
        "vision_config": vision,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
        **special,
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    tower = Qwen3_5VisionModel(Qwen3_5Config.from_pretrained(path).vision_config).to(torch.bfloat16)
    weights = {f"model.visual.{name}": tensor.contiguous() for name, tensor in tower.state_dict().items()}
    for name, tensor in load_file(DEMO / "target" / "model.safetensors").items():
        weights[name.replace("model.", "model.language_model.", 1) if name.startswith("model.") else name] = (
            tensor
        )
    save_file(weights, path / "model.safetensors")
    return with_tokenizer(path)


def with_tokenizer(path: Path) -> Path:
    """Puts the demo target's tokenizer into a model's folder; returns the folder."""
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(DEMO / "target" / file, path / file)
    return path


def attention_only(path: Path, vocab: int = VOCAB) -> Path:
    """A random Qwen3 in float32, in which two tokens never tie."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.3,
        eos_token_id=None,
        bos_token_id=None,
    )
    Qwen3ForCausalLM(config).save_pretrained(path)
    return path


def random_draft(path: Path, max_position_embeddings: int = 1024, vocab: int = VOCAB) -> Path:
    """A random DFlash draft for `attention_only`."""
    heads, kv_heads, dim, inter, layers = 4, 2, 32, 128, 2
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "vocab_size": vocab,
        "hidden_size": HIDDEN,
        "intermediate_size": inter,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": dim,
        "hidden_act": "silu",
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "block_size": BLOCK,
        "num_target_layers": 3,
        "dflash_config": {"mask_token_id": vocab - 1, "target_layer_ids": [0, 1]},
        "dtype": "float32",
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return checkpoints.random_draft(path, torch.device("cpu"), torch.float32)


def with_text(root: Path) -> Path:
    """`attention_only` and `random_draft` in the folders `target` and `draft`, with the demo's tokenizer and
    two more tokens, <think> and </think>."""
    tokenizer = json.loads((DEMO / "target" / "tokenizer.json").read_text())
    first = json.loads((DEMO / "target" / "config.json").read_text())["vocab_size"]
    for offset, text in enumerate(THINKING):
        tokenizer["added_tokens"].append(
            tokenizer["added_tokens"][0] | {"id": first + offset, "content": text}
        )
    vocab = first + 16  # and some that no text has, as the padded end of a vocabulary
    attention_only(root / "target", vocab)
    random_draft(root / "draft", vocab=vocab)
    with_tokenizer(root / "target")
    (root / "target" / "tokenizer.json").write_text(json.dumps(tokenizer))
    return root


def random_weaver(path: Path) -> Path:
    """A random Weaver head for `attention_only` and `random_draft`."""
    from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
    from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

    torch.manual_seed(3)
    head = WeaverHead(
        WeaverConfig(
            d_model=HIDDEN, d_embed=HIDDEN, d_rank=32, num_layers=1, num_heads=2, mlp_dim=64, K=BLOCK - 1,
            candidate_pool_size=32,
        )
    )  # fmt: skip
    path.mkdir()
    save_weaver(head, path / "weaver.safetensors")
    return path
