# SPDX-License-Identifier: Apache-2.0
"""Folders with nothing but a config.json: enough for real vLLM configurations and dummy weights."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

HIDDEN, VOCAB, BLOCK = 128, 512, 8
DEPTH = BLOCK - 1

_HYBRID = dict(
    architectures=["Qwen3_5ForCausalLM"],
    model_type="qwen3_5_text",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_conv_kernel_dim=4,
    layer_types=["linear_attention"] * 3 + ["full_attention"],
    max_position_embeddings=4096,
    rope_parameters=dict(
        rope_type="default",
        rope_theta=10000.0,
        partial_rotary_factor=0.25,
        mrope_section=[2, 1, 1],
        mrope_interleaved=True,
    ),
    dtype="bfloat16",
)
_ATTENTION = dict(
    architectures=["Qwen3ForCausalLM"],
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=HIDDEN,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    max_position_embeddings=4096,
    rms_norm_eps=1e-6,
    rope_theta=10000.0,
    dtype="bfloat16",
)
_DRAFT = _ATTENTION | dict(
    architectures=["DFlashDraftModel"],
    max_position_embeddings=2048,
    block_size=BLOCK,
    num_target_layers=4,
    dflash_config=dict(mask_token_id=VOCAB - 1, target_layer_ids=[0, 2]),
)
_KINDS = {"hybrid": _HYBRID, "attention": _ATTENTION, "draft": _DRAFT}


def folder(root: Path, kind: str, **changes: Any) -> str:
    """A model folder of `kind` (hybrid, attention or draft) under `root`; a change to None drops the key."""
    config = {key: value for key, value in (_KINDS[kind] | changes).items() if value is not None}
    path = root / f"{kind}-{len(list(root.iterdir()))}"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


def engine_args(model: str, **changes: Any) -> Any:
    """EngineArgs for a folder without weights or tokenizer."""
    from vllm.engine.arg_utils import EngineArgs

    options = dict(
        model=model,
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_num_seqs=4,
        max_model_len=256,
    )
    return EngineArgs(**(options | changes))


@contextlib.contextmanager
def current_config(root: Path) -> Iterator[Any]:
    """A VllmConfig that is current, and a process group of one: what single layers of vLLM need."""
    import torch
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, parallel_state

    config = engine_args(folder(root, "attention")).create_engine_config()
    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{root / 'rendezvous'}", 0, "gloo")
        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        yield config
