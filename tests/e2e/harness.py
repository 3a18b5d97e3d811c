# SPDX-License-Identifier: Apache-2.0
"""Real vLLM engines in this process, plain reference runs, and the comparison rule for near-ties."""

from __future__ import annotations

import contextlib
import functools
import gc
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parents[2] / "scripts" / "demo_models"
MAX_MODEL_LEN = 512
BLOCK = 384  # the least that vLLM gives the demo target is this on CPUs with AMX, and 256 on others
TOP = 20  # vLLM's default limit of `logprobs`
# A divergence is excused only where plain decoding itself saw both tokens this close (natural log). bf16 has
# 8 bits of mantissa: logits near 8 are 0.03 apart, and rows of another batch width may round to either
# neighbour.
TIE = 0.065

GPU: dict[str, Any] = {
    "gpu_memory_utilization": 0.2,
    # Not from a measurement, which another engine on the GPU would disturb.
    "kv_cache_memory_bytes": 4 << 30,
    "attention_backend": "FLASH_ATTN",
    # FlashInfer's prefill kernel is not on every machine; Triton's is.
    "additional_config": {"gdn_prefill_backend": "triton"},
}
"""Options of engines on a GPU."""


@contextlib.contextmanager
def engine(model: str | Path, **options: Any) -> Iterator[Any]:
    """An `LLM` in this process, eager; on a GPU it needs `GPU`. Shut down at the end."""
    from vllm import LLM

    defaults = {
        "max_model_len": MAX_MODEL_LEN,
        "max_num_seqs": 4,
        "enforce_eager": True,
        "dtype": "bfloat16",
        "enable_prefix_caching": False,
        "disable_log_stats": False,
    }
    llm = LLM(str(model), **(defaults | options))
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def trees(
    budget: int, proposal: str = "weaver", draft: str | Path = DEMO / "draft", **more: Any
) -> dict[str, Any]:
    """Engine options for dflash_tfm with the demo draft and Weaver."""
    config = {
        "method": "dflash_tfm",
        "model": str(draft),
        "num_speculative_tokens": budget,
        "proposal": proposal,
    }
    if proposal == "weaver":
        config["weaver"] = str(DEMO / "weaver")
    return {"speculative_config": config | more}


def runner(llm: Any) -> Any:
    """The model runner of an in-process engine."""
    return llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def count_replays(runner: Any) -> dict[str, int]:
    """Replays of whole CUDA graphs from now on: of the target, and of the draft if there is one."""
    managers, counts = {"target": runner.cudagraph_manager}, {"target": 0}
    if runner.speculator is not None:
        managers["draft"], counts["draft"] = runner.speculator.query_cudagraph_manager, 0
    for name, manager in managers.items():
        manager.run_fullgraph = functools.partial(_counted, counts, name, manager.run_fullgraph)
    return counts


def _counted(counts: dict[str, int], name: str, run: Any, descriptor: Any) -> Any:
    counts[name] += 1
    return run(descriptor)


@dataclass(frozen=True)
class Reference:
    """Plain decoding of one prompt: its tokens, and at each position the log-probabilities of the best
    tokens."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logprobs: tuple[dict[int, float], ...]


def greedy(
    llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int | Sequence[int], **params: Any
) -> list[Any]:
    """Greedy completions (vLLM's `CompletionOutput`), one for each prompt of token ids, EOS ignored."""
    from vllm import SamplingParams

    lengths = [max_tokens] * len(prompts) if isinstance(max_tokens, int) else list(max_tokens)
    sampling = [
        SamplingParams(temperature=0, max_tokens=n, ignore_eos=True, detokenize=False, **params)
        for n in lengths
    ]
    outputs = llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def references(llm: Any, prompts: Sequence[Sequence[int]], max_tokens: int) -> list[Reference]:
    """Plain decoding of the prompts, as one batch."""
    found = []
    for prompt, output in zip(prompts, greedy(llm, prompts, max_tokens, logprobs=TOP), strict=True):
        scores = tuple({token: entry.logprob for token, entry in step.items()} for step in output.logprobs)
        found.append(Reference(tuple(prompt), tuple(output.token_ids), scores))
    return found


def difference(reference: Reference, tokens: Sequence[int]) -> tuple[int, float] | None:
    """None if `tokens` are the reference's first tokens, else (position, gap): how much less likely plain
    decoding found the other token there; infinite if it was not among its best."""
    for position, (expected, token) in enumerate(zip(reference.tokens, tokens, strict=False)):
        if token != expected:
            scores = reference.logprobs[position]
            return position, scores[expected] - scores.get(token, float("-inf"))
    return None


def assert_identical(references: Sequence[Reference], outputs: Sequence[Any], max_ties: int = 1) -> None:
    """Token identity with plain decoding. At most `max_ties` outputs may part from it, and only at a
    near-tie."""
    ties = []
    for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        tokens = list(output.token_ids)
        assert tokens, f"output {index} is empty"
        found = difference(reference, tokens)
        if found is None:
            continue
        position, gap = found
        assert gap <= TIE, (
            f"output {index} parts from plain decoding at token {position}: {tokens[position]} instead of "
            f"{reference.tokens[position]}, {gap:.3f} less likely (a tie is at most {TIE})"
        )
        ties.append((index, position, round(gap, 4)))
        print(f"near-tie: output {index} parts from plain decoding at token {position}, gap {gap:.4f}")
    assert len(ties) <= max_ties, f"more near-ties than a trained model has: {ties}"


def demo_prompts(tokenizer: Any, count: int | None = None) -> list[list[int]]:
    """Token ids of the first `count` held-out demo texts (all by default)."""
    texts = json.loads((DEMO / "prompts.json").read_text())["text"]
    return [tokenizer.encode(text) for text in texts[:count]]
