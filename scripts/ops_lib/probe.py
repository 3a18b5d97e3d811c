#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Inside an image: decode the demo models with trees and without, and compare. For verify_image.sh.

    probe.py FOLDER        FOLDER holds target, draft, weaver and prompts.json

Needs vLLM and vllm_weaver, no checkout. Exit status 0 if the tokens are the same (or part only where plain
decoding itself finds both tokens within TIE of each other) and drafts were accepted.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

TOKENS = 24
PROMPTS = 2
BUDGET = 16
TIE = 0.065  # bfloat16: see the README, "Limits"


def decode(folder: Path, trees: bool) -> tuple[list[Any], float]:
    """Completions of the demo prompts and the accepted length (1 without trees)."""
    from vllm import LLM, SamplingParams

    speculative = {
        "method": "dflash_tfm",
        "model": str(folder / "draft"),
        "weaver": str(folder / "weaver"),
        "num_speculative_tokens": BUDGET,
    }
    llm = LLM(
        str(folder / "target"),
        max_model_len=512,
        max_num_seqs=2,
        enforce_eager=True,
        enable_prefix_caching=False,
        attention_backend=None if os.environ.get("TRITON_INTERPRET") == "1" else "FLASH_ATTN",
        gpu_memory_utilization=0.3,
        disable_log_stats=False,
        **({"speculative_config": speculative} if trees else {}),
    )
    prompts = json.loads((folder / "prompts.json").read_text())["text"][:PROMPTS]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=5)
    outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
    counts = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    drafts = counts.get("vllm:spec_decode_num_drafts", 0)
    accepted = counts.get("vllm:spec_decode_num_accepted_tokens", 0)
    llm.llm_engine.engine_core.shutdown()
    return outputs, 1 + accepted / drafts if drafts else 1.0


def differs(plain: Any, trees: Any) -> str | None:
    """Where two completions part, if not at a near-tie."""
    if len(plain.token_ids) != len(trees.token_ids):
        return f"{len(trees.token_ids)} tokens instead of {len(plain.token_ids)}"
    for position, (expected, found) in enumerate(zip(plain.token_ids, trees.token_ids, strict=True)):
        if expected != found:
            scores = {token: entry.logprob for token, entry in plain.logprobs[position].items()}
            gap = scores[expected] - scores.get(found, float("-inf"))
            if gap > TIE:
                return f"token {position} is {found} instead of {expected}, {gap:.3f} less likely"
            print(f"probe: near-tie at token {position}, {gap:.3f} apart")
            return None
    return None


def main() -> int:
    """Prints one line; the exit status says whether the image generates rightly."""
    if len(sys.argv) != 2 or not (Path(sys.argv[1]) / "prompts.json").is_file():
        print("probe: FAILED: name the folder of the demo models", file=sys.stderr)
        return 2
    folder = Path(sys.argv[1])
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    import torch

    if not torch.cuda.is_available():
        from vllm_weaver import cpu

        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        cpu.prepare()
    plain, _ = decode(folder, trees=False)
    trees, length = decode(folder, trees=True)
    wrong = [found for pair in zip(plain, trees, strict=True) if (found := differs(*pair))]
    if wrong:
        print(f"probe: FAILED: with trees the text differs from plain decoding: {'; '.join(wrong)}")
        return 1
    if length <= 1:
        print("probe: FAILED: no draft was accepted")
        return 1
    print(f"probe: ok: {PROMPTS} x {TOKENS} tokens as by plain decoding, accepted length {length:.2f}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
