# SPDX-License-Identifier: Apache-2.0
"""The law of sampled tokens: `TreeVerifier` on 20,000 requests with made-up targets and trees, no engine.

Every request has a seed of its own and draws two tokens, in one step or in two; both, and the pair, must have
the distribution of plain sampling. vLLM's sampler takes minutes for so many rows in the Triton interpreter;
here it is a vectorised one with the same noise, which is compared with vLLM's first.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.e2e.noise import gumbel
from vllm_weaver.spec_decode.step import TreeStep
from vllm_weaver.spec_decode.tree import Tree, TreeBuffers

DRAWS, VOCAB, PREFIX = 20_000, 8, 50
TEMPERATURES = (0.4, 1.0, 1.6)
# Parents and tokens of the nodes after the root, and their cumulative log-probabilities: good and bad drafts.
TREES: dict[str, tuple[list[int], list[int], list[float]]] = {
    "branching": ([0, 0, 1, 0, 2, 1], [6, 4, 7, 2, 3, 0], [-0.3, -1.6, -0.8, -2.5, -2.0, -1.9]),
    "chain": ([0, 1], [6, 7], [-0.1, -0.3]),
}


def sample(
    logits: Tensor, requests: Tensor, temperature: Tensor, seeds: Tensor, pos: Tensor, **_: Any
) -> Tensor:
    """vLLM's `gumbel_sample`, in float64."""
    noise = gumbel(seeds[requests.long()][:, None], pos[:, None], torch.arange(logits.shape[1]))
    noise[temperature[requests.long()] == 0] = 0
    return (logits.double() + noise).argmax(1)


class VectorSampler:
    """The part of vLLM's sampler that the verifier uses, for requests with a temperature alone."""

    compute_nans = use_fp64_gumbel = False
    logprobs_mode = "raw_logprobs"

    def __init__(self, temperatures: np.ndarray, seeds: Tensor) -> None:
        gpu = torch.from_numpy(temperatures)
        self.sampling_states = SimpleNamespace(
            temperature=SimpleNamespace(np=temperatures, gpu=gpu),
            seeds=SimpleNamespace(gpu=seeds),
        )
        self.needs_logits_processing = np.zeros(len(temperatures), dtype=bool)
        self.logits_processors: list[Any] = []
        self.req_states = SimpleNamespace(prefill_len=SimpleNamespace(gpu=None))

    def get_logprobs_dims(self, index: np.ndarray) -> None:
        """No request asks for log-probabilities."""

    def apply_sampling_params(self, logits: Tensor, expanded: Tensor, *_: Any) -> Tensor:
        temperature = self.sampling_states.temperature.gpu[expanded.long()][:, None]
        return logits / torch.where(temperature == 0, 1, temperature)

    def sample(
        self, logits: Tensor, expanded: Tensor, idx: Tensor, idx_np: Any, pos: Tensor, *rest: Any, **_: Any
    ) -> tuple[Tensor, Tensor]:
        processed = self.apply_sampling_params(logits, expanded)
        states = self.sampling_states
        return sample(processed, expanded, states.temperature.gpu, states.seeds.gpu, pos), processed


def target(context: Tensor) -> Tensor:
    """Logits [n, VOCAB] after contexts [n, length <= 3] of a made-up target."""
    table = torch.randn(VOCAB**3 + VOCAB**2 + VOCAB + 1, VOCAB, generator=torch.Generator().manual_seed(3))
    code = torch.zeros(len(context), dtype=torch.int64)
    for i in range(context.shape[1]):
        code = code * VOCAB + context[:, i] + 1
    return table[code] * 1.4


class Verifier:
    """A `TreeVerifier` over the requests, all of which have a tree of one shape in a step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mode: str, temperatures: np.ndarray) -> None:
        from vllm_weaver.spec_decode import sampler as module

        monkeypatch.setattr(module, "gumbel_sample", sample)
        # It finds chunks of prompts, of which there are none here, one request at a time.
        monkeypatch.setattr(module, "get_num_sampled_and_rejected", lambda sampled, *_: (sampled, sampled))
        self.count, self.states = len(temperatures), torch.randperm(len(temperatures))
        device = torch.device("cpu")
        self.step = TreeStep(self.count, self.count * 7, 6, device)
        self.trees = TreeBuffers(self.count, 7, device)
        seeds = torch.randint(-(2**63), 2**63 - 1, (self.count,), generator=torch.Generator().manual_seed(9))
        config = SimpleNamespace(
            num_speculative_tokens=6, enable_adaptive_verification=False, rejection_sample_method="standard"
        )
        self.verifier = module.TreeVerifier(
            VectorSampler(temperatures, seeds), config, self.step, self.trees, mode  # type: ignore[arg-type]
        )  # fmt: skip

    def run(self, context: Tensor, position: Tensor, shape: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor]:
        """One step after context [count, 0 or 1] with roots at these positions; tokens and how many."""
        parents, tokens, logprobs = ([-1, *shape[0]], [0, *shape[1]], [0.0, *shape[2]])
        nodes, step = len(parents), self.step
        tree = Tree.empty(self.count, 7, "cpu")
        contexts = [context]
        for i in range(1, nodes):
            contexts.append(torch.cat([contexts[parents[i]], torch.full((self.count, 1), tokens[i])], 1))
        logits = torch.stack([target(c) for c in contexts], 1).flatten(0, 1)
        tree.parents[:, :nodes] = torch.tensor(parents, dtype=torch.int32)
        tree.tokens[:, :nodes] = torch.tensor(tokens)
        tree.logprobs[:, :nodes] = torch.tensor(logprobs)
        tree.num_nodes[:] = nodes
        drafts = torch.empty(self.count, 6, dtype=torch.int64)
        self.trees.store(tree, self.states, drafts, torch.zeros(self.count, dtype=torch.int32))
        step._view(self.count)
        step.num_tokens = self.count * nodes
        for name in ("tokens", "parents", "num_nodes"):
            getattr(step, name).copy_(getattr(tree, name))
        step.base.copy_(position)
        depth = torch.tensor([c.shape[1] - context.shape[1] for c in contexts])
        step.positions().copy_((position[:, None] + depth).flatten())
        starts = torch.arange(self.count + 1) * nodes
        batch = SimpleNamespace(
            idx_mapping=self.states.int(),
            idx_mapping_np=self.states.numpy(),
            expanded_idx_mapping=self.states.int().repeat_interleave(nodes),
            expanded_local_pos=None,
            logits_indices=torch.arange(self.count * nodes),
            input_ids=tree.tokens[:, :nodes].flatten(),
            seq_lens_cpu_upper_bound=torch.zeros(self.count),
            seq_lens=None,
            cu_num_logits=starts,
            cu_num_logits_np=starts.numpy(),
        )
        output = self.verifier(logits, batch)
        return output.sampled_token_ids, output.num_sampled

    def draw(self, shape: tuple[Any, Any, Any]) -> tuple[Tensor, Tensor]:
        """Two tokens [count, 2] of every request, and the tokens that each first step committed."""
        position = PREFIX + torch.arange(self.count) % 7
        empty = torch.empty(self.count, 0, dtype=torch.int64)
        tokens, sampled = self.run(empty, position, shape)
        later, _ = self.run(tokens[:, :1], position + 1, shape)
        second = torch.where(sampled > 1, tokens[:, 1], later[:, 0])
        return torch.stack([tokens[:, 0], second], 1), sampled


def p_value(counts: Tensor, expected: Tensor) -> float:
    """Chi-square test of counts [n] against probabilities [n]; rare outcomes are put together."""
    expected = expected * counts.sum()
    rare = expected < 5
    cells = [(counts[~rare], expected[~rare])]
    if rare.any():
        cells.append((counts[rare].sum()[None], expected[rare].sum()[None]))
    found, wanted = (torch.cat(part).double() for part in zip(*cells, strict=True))
    statistic = ((found - wanted) ** 2 / wanted.clamp(min=1e-9)).sum()
    return float(torch.special.gammaincc(torch.tensor((len(found) - 1) / 2), statistic / 2))


def test_noise_is_vllms() -> None:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(40, VOCAB, generator=generator)
    requests = torch.arange(40, dtype=torch.int32) % 5
    temperature = torch.tensor([1.0, 0.5, 0.0, 1.3, 1.0])
    seeds = torch.tensor([0, 5, 7, -(2**63), 2**40 + 1])
    pos = torch.randint(0, 5000, (40,), generator=generator)
    args = (logits, requests, temperature, seeds, pos)
    found = gumbel_sample(*args, apply_temperature=False, is_drafting=False)
    assert found.tolist() == sample(*args).tolist()
    assert found.tolist() != logits.argmax(1).tolist()


@pytest.mark.parametrize("temperature", TEMPERATURES)
@pytest.mark.parametrize("mode", ["target_only", "traversal"])
@pytest.mark.parametrize("shape", TREES)
def test_two_tokens_have_the_law_of_plain_sampling(
    monkeypatch: pytest.MonkeyPatch, shape: str, mode: str, temperature: float
) -> None:
    temperatures = np.full(DRAWS, temperature, dtype=np.float32)
    tokens, sampled = Verifier(monkeypatch, mode, temperatures).draw(TREES[shape])
    assert ((tokens >= 0) & (tokens < VOCAB)).all()
    assert (sampled > 1).float().mean() > 0.1, "hardly a draft was accepted: the test shows little"
    first = (target(torch.empty(1, 0, dtype=torch.int64))[0] / temperature).double().softmax(0)
    after = (target(torch.arange(VOCAB)[:, None]) / temperature).double().softmax(1)
    joint = first[:, None] * after
    counts = torch.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2).view(VOCAB, VOCAB)
    for name, found, wanted in (
        ("first", counts.sum(1), first),
        ("second", counts.sum(0), joint.sum(0)),
        ("pair", counts.flatten(), joint.flatten()),
    ):
        p = p_value(found, wanted)
        print(f"{shape} {mode} T={temperature} {name}: p = {p:.4f}")
        assert p > 0.001, f"{name} token: p = {p:.2e}"


def test_greedy_requests_beside_sampled_ones_and_accepted_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """In one batch every fourth request is greedy, and gets the target's best tokens. Sampled requests commit
    as many tokens under either mode: the accepted path is the longest beginning of the text in the tree."""
    temperatures = np.where(np.arange(8000) % 4 == 0, 0.0, 1.0).astype(np.float32)
    accepted = {}
    for mode in ("target_only", "traversal"):
        verifier = Verifier(monkeypatch, mode, temperatures)
        tokens, sampled = verifier.draw(TREES["branching"])
        greedy = torch.from_numpy(temperatures)[verifier.states] == 0
        best = target(torch.empty(1, 0, dtype=torch.int64)).argmax(1)
        expected = torch.stack([best, target(best[:, None]).argmax(1)], 1)
        assert (tokens[greedy] == expected).all()
        assert len(tokens[~greedy].unique(dim=0)) > VOCAB
        accepted[mode] = float(sampled[~greedy].float().mean())
    print(accepted)
    assert accepted["target_only"] > 1.5
    # Three standard deviations of the difference of two means of 6,000 lengths.
    assert abs(accepted["traversal"] - accepted["target_only"]) < 0.04, accepted


def test_a_test_of_the_law_sees_a_wrong_one() -> None:
    """Sampling at a temperature 5 % off fails as clearly as it should."""
    row = target(torch.empty(1, 0, dtype=torch.int64))[0].double()
    drawn = torch.multinomial(
        (row / 1.05).softmax(0), DRAWS, True, generator=torch.Generator().manual_seed(1)
    )
    counts = torch.bincount(drawn, minlength=VOCAB)
    assert p_value(counts, row.softmax(0)) < 0.001 < p_value(counts, (row / 1.05).softmax(0))
