# SPDX-License-Identifier: Apache-2.0
"""vLLM's DFlash2 with our guards: whatever the scores and logits are, ids come out of the candidate set and
candidates out of the vocabulary. Applied wherever such a draft runs, not only under `dflash_tfm`."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from vllm_weaver import cpu

STEPS, REQUESTS, VOCAB = 4, 3, 97
NAN, INF = float("nan"), float("inf")


@pytest.fixture(scope="module")
def prepared() -> None:
    if not torch.cuda.is_available():
        cpu.prepare()
    import vllm.plugins

    vllm.plugins.load_general_plugins()


@pytest.fixture
def guarded(prepared: None) -> Iterator[None]:
    from vllm_weaver.hooks import HOOKS, base, install

    speculative = SimpleNamespace(draft_model_config=SimpleNamespace(architectures=["DFlash2DraftModel"]))
    install.activate_draft(SimpleNamespace(speculative_config=speculative))  # a plain method=dflash
    assert {h.name for h in HOOKS if h.phase == "draft" and base.status(h).state == "applied"} == {
        "dflash2-walk",
        "dflash2-candidates",
    }
    yield
    base.revert(hook for hook in HOOKS if hook.phase == "draft")


def test_others_are_left_alone(prepared: None) -> None:
    from vllm_weaver.hooks import HOOKS, base, install

    for architectures in (["DFlashDraftModel"], None):
        draft = SimpleNamespace(architectures=architectures)
        install.activate_draft(SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft)))
    install.activate_draft(SimpleNamespace(speculative_config=None))
    assert all(base.status(hook).state == "pending" for hook in HOOKS if hook.phase == "draft")


def sample(
    scores: Tensor, top_k: int, temperature: float, device: torch.device, seed: int = 0
) -> tuple[Tensor, Tensor, Any]:
    """Tokens [R, steps] of vLLM's walk, the candidates, and the sampler."""
    from vllm.v1.worker.gpu.spec_decode.dflash2.speculator import CandidateSampler

    generator = torch.Generator().manual_seed(seed)
    candidates = torch.stack(
        [torch.randperm(VOCAB, generator=generator)[:top_k] for _ in range(REQUESTS * STEPS)]
    ).view(REQUESTS, STEPS, top_k)
    sampler = CandidateSampler(REQUESTS, STEPS, top_k, device)
    tokens = torch.full((REQUESTS, STEPS), -7, dtype=torch.int64, device=device)
    draft_logits = torch.full((REQUESTS, STEPS, VOCAB), -INF, device=device) if temperature else None
    sampler.sample(
        candidates.to(device),
        scores.to(device),
        REQUESTS,
        torch.arange(REQUESTS * STEPS, device=device) + 5,
        torch.arange(REQUESTS, device=device, dtype=torch.int32).repeat_interleave(STEPS),
        torch.full((REQUESTS,), temperature, device=device),
        torch.arange(REQUESTS, device=device),
        tokens,
        draft_logits,
        False,
    )
    return tokens.cpu(), candidates, (sampler, draft_logits)


@pytest.mark.usefixtures("guarded")
@pytest.mark.parametrize(
    "value, top_k, temperature",
    [(NAN, 5, 0.0), (NAN, 5, 0.8), (NAN, 5, 1e-5), (NAN, 8, 0.0), (-INF, 5, 0.8), (INF, 5, 0.8)],
)
def test_walk_stays_inside_its_candidates(
    device: torch.device, value: float, top_k: int, temperature: float
) -> None:
    scores = torch.randn(REQUESTS, STEPS, top_k, top_k, generator=torch.Generator().manual_seed(1))
    scores[0] = value  # every row
    scores[1, 1] = value  # one step
    scores[2, 2, :, 0] = value  # single entries
    tokens, candidates, (sampler, draft_logits) = sample(scores, top_k, temperature, device)
    assert (tokens.unsqueeze(-1) == candidates).any(-1).all(), tokens
    if draft_logits is not None:  # what the rejection reads is what was walked: a distribution
        assert draft_logits.softmax(-1).isfinite().all() and not draft_logits.isnan().any()


@pytest.mark.usefixtures("prepared")
def test_finite_scores_walk_as_without_the_guard(device: torch.device) -> None:
    from vllm_weaver.hooks import HOOKS, base

    scores = torch.randn(REQUESTS, STEPS, 5, 5, generator=torch.Generator().manual_seed(2))
    plain = [sample(scores, 5, temperature, device)[0] for temperature in (0.0, 0.8)]
    base.apply(hook for hook in HOOKS if hook.phase == "draft")
    try:
        assert all(
            torch.equal(sample(scores, 5, temperature, device)[0], tokens)
            for temperature, tokens in zip((0.0, 0.8), plain, strict=True)
        )
    finally:
        base.revert(hook for hook in HOOKS if hook.phase == "draft")
    best, previous = [], 0
    for step in range(STEPS):  # and the greedy walk is the one by hand
        previous = int(scores[0, step, previous].argmax())
        best.append(previous)
    candidates = sample(scores, 5, 0.0, device)[1]
    assert plain[0][0].tolist() == [int(candidates[0, step, rank]) for step, rank in enumerate(best)]


@pytest.mark.usefixtures("guarded")
def test_candidates_of_a_broken_head() -> None:
    from vllm.model_executor.models.qwen3_dflash2 import DFlash2Qwen3ForCausalLM

    def top_k(lm_head: Any, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        ids = torch.tensor([[0, VOCAB - 1, VOCAB], [-1, 2**40, 3]])
        return ids, torch.tensor([[1.0, NAN, INF], [NAN, -INF, 2.0]]).bfloat16()

    model = SimpleNamespace(
        candidate_logits_processor=SimpleNamespace(get_top_k_tokens=top_k, org_vocab_size=VOCAB),
        lm_head=None,
        model=SimpleNamespace(candidate_selector=SimpleNamespace(top_k=3)),
    )
    ids, logits = DFlash2Qwen3ForCausalLM.compute_candidates(model, torch.zeros(2, 4))
    assert ids.tolist() == [[0, VOCAB - 1, VOCAB - 1], [0, VOCAB - 1, 3]]
    assert logits.isfinite().all() and logits[0, 0] == 1 and logits[1, 2] == 2
    assert logits[0, 1] < -1e29 and logits[0, 2] > 1e29
