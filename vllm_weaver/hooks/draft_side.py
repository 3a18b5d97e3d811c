# SPDX-License-Identifier: Apache-2.0
"""Replacements of the draft hooks: reading a draft's quantization config, and DFlash2's walk and candidates.

The first two matter where `dflash_tfm` is asked for (or where upstream would crash); the DFlash2 guards apply
to vLLM's own `method=dflash` as well, in every worker that is about to run such a draft.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vllm_weaver.config import settings_of

# Far below any score, far above what a temperature could make infinite in float32.
_WORST = 1e30
# Architectures whose draft is walked by vLLM's candidate sampler.
WALKED = ("DFlash2DraftModel", "LiLiCorrDraftModel")


def normalize_quantization_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """A `producer` that is a plain string counts as the producer's name; upstream asks it for a key."""

    @functools.wraps(original)
    def wrapper(self: Any, config: Any) -> Any:
        found = getattr(config, "quantization_config", None)
        if isinstance(found, dict) and isinstance(found.get("producer"), str):
            found["producer"] = {"name": found["producer"]}
        return original(self, config)

    return wrapper


def draft_quant_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """The draft's quantization, with its lists of modules in the names that vLLM gives these modules."""

    @functools.wraps(original)
    def wrapper(vllm_config: Any) -> Any:
        found = original(vllm_config)
        if found is None or settings_of(vllm_config) is None:
            return found
        from vllm_weaver.spec_decode.draft_checkpoint import linear_modules
        from vllm_weaver.spec_decode.draft_quantization import DraftQuantization, fused_name, tell_vllm

        config = vllm_config.speculative_config.draft_model_config.hf_config
        first = vllm_config.model_config.get_total_num_hidden_layers()

        def in_vllm(module: str) -> str:
            fused = fused_name(module)
            if fused.startswith("layers."):
                _, number, rest = fused.split(".", 2)
                fused = f"layers.{first + int(number)}.{rest}"
            return f"model.{fused}"

        names = [(module, in_vllm(module)) for module in linear_modules(config)]
        tell_vllm(found, DraftQuantization(config.quantization_config), [*names, ("lm_head", "lm_head")])
        return found

    return wrapper


def walk(original: Callable[..., None]) -> Callable[..., None]:
    """Scores that are all finite, so that the walk always stays inside its candidates.

    Upstream's kernel takes the lane after the last as the best one of a row in which every score loses."""

    @functools.wraps(original)
    def sample(self: Any, candidate_ids: Tensor, scores: Tensor, *args: Any, **kwargs: Any) -> None:
        original(self, candidate_ids, finite(scores), *args, **kwargs)

    return sample


def candidates(original: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Candidates of a head's logits, in the vocabulary whatever the logits are."""

    @functools.wraps(original)
    def compute_candidates(self: Any, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        ids, logits = original(self, hidden_states)
        # What a top-k over NaN returns differs between implementations, and some count past the end.
        last = self.candidate_logits_processor.org_vocab_size - 1
        return ids.clamp(0, last), finite(logits)

    return compute_candidates


def finite(scores: Tensor) -> Tensor:
    """Scores with NaN and −inf far below and +inf far above any other."""
    limit = min(_WORST, torch.finfo(scores.dtype).max)
    return torch.nan_to_num(scores, nan=-limit, posinf=limit, neginf=-limit)
