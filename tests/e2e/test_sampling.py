# SPDX-License-Identifier: Apache-2.0
"""Sampled requests through real engines: seeded texts under `target_only`, the law under both modes.

The target is the random attention-only one in float32, whose rows come out alike in every batch; drafts come
from an oracle. One engine serves all tests of this file; it is built with `traversal` and told which of the
two modes to use. `--all` runs 200 seeded requests instead of 8, requests without a seed, and 600 draws a mode
(`test_sampling_law.py` has 20,000 without an engine).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.e2e import harness, models, oracle
from tests.e2e.test_sampling_law import p_value
from vllm_weaver.spec_decode.tree import Tree

TOKENS, SEATS, BUDGET = 6, 16, 5
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32, "max_num_seqs": SEATS}
FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 12},
    {"top_p": 0.8},
    {"min_p": 0.05},
    {"top_k": 30, "top_p": 0.9},
]
LAW = {"temperature": 0.9, "top_k": 4}
LAW_PROMPT = [7, 30, 2, 91, 16]


def sampling(**given: Any) -> Any:
    from vllm import SamplingParams

    common = {"max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
    return SamplingParams(**(common | given))


def seeded(count: int) -> list[tuple[list[int], dict[str, Any]]]:
    """Prompts and parameters: temperatures from 0.3 to 1.3, all filters, every fifth with two answers."""
    generator = torch.Generator().manual_seed(11)
    found = []
    for i in range(count):
        prompt = torch.randint(0, models.VOCAB - 1, (4 + i % 9,), generator=generator).tolist()
        given = {"temperature": 0.3 + i / (count - 1), "seed": 1000 + i, "n": 2 if i % 5 == 4 else 1}
        found.append((prompt, given | FILTERS[i % len(FILTERS)] | FILTERS[(i // 7) % 3]))
    return found


def texts(llm: Any, requests: Sequence[tuple[list[int], dict[str, Any]]]) -> list[harness.Reference]:
    """All answers, those of one request beside each other."""
    outputs = llm.generate(
        [{"prompt_token_ids": prompt} for prompt, _ in requests],
        [sampling(**given) for _, given in requests],
        use_tqdm=False,
    )
    return [
        harness.Reference(tuple(prompt), tuple(answer.token_ids), tuple(answer.logprobs or ()))
        for (prompt, _), output in zip(requests, outputs, strict=True)
        for answer in output.outputs
    ]


UNSEEDED = [([i, 9, 40 + i], {"temperature": 0.5 + i / 10}) for i in range(6)]
GREEDY = ([5, 6, 7], {"temperature": 0, "logprobs": 3})


@dataclass
class Runs:
    """Plain answers, and the engine with trees."""

    seeded: list[harness.Reference] = field(default_factory=list)
    unseeded: list[harness.Reference] = field(default_factory=list)
    greedy: list[harness.Reference] = field(default_factory=list)
    llm: Any = None
    model: Any = None

    def use(self, mode: str, shapes: Sequence[oracle.Shape] | None = None) -> Any:
        """Sets the mode and, where given, the oracle's shapes; the step's counters."""
        runner = harness.runner(self.llm)
        runner.model_state._verifier.tree_verify = mode
        if shapes is not None:
            oracle.install(runner, [*self.seeded, *self.unseeded, *self.greedy], shapes)
        return runner.model_state.step.stats

    @torch.no_grad()
    def logprobs(self, tokens: Sequence[int]) -> torch.Tensor:
        """float64 [len, VOCAB]: after each token, by transformers."""
        return self.model(torch.tensor([list(tokens)])).logits[0].double().log_softmax(-1)


@pytest.fixture(scope="module")
def count(request: pytest.FixtureRequest) -> int:
    return 200 if request.config.getoption("--all") else 8


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, count: int) -> Iterator[Runs]:
    from transformers import Qwen3ForCausalLM

    root: Path = tmp_path_factory.mktemp("models")
    models.attention_only(root / "target")
    models.random_draft(root / "draft")
    found = Runs(model=Qwen3ForCausalLM.from_pretrained(root / "target"))
    with harness.engine(root / "target", **OPTIONS) as llm:
        found.seeded = texts(llm, seeded(count))
        np.random.seed(5)
        found.unseeded = texts(llm, UNSEEDED)
        found.greedy = texts(llm, [GREEDY])
    options = OPTIONS | harness.trees(BUDGET, "ddtree", root / "draft", tree_verify="traversal")
    with harness.engine(root / "target", **options) as found.llm:
        yield found


def test_the_engine_has_the_mode_it_was_asked_for(runs: Runs) -> None:
    assert harness.runner(runs.llm).model_state._verifier.tree_verify == "traversal"


def test_seeded_texts_are_those_of_plain_decoding(runs: Runs, count: int) -> None:
    stats = runs.use("target_only", [oracle.second_child, oracle.chain, oracle.late])
    before = stats.read()
    assert texts(runs.llm, seeded(count)) == runs.seeded
    after = stats.read()
    accepted = after["accepted"] - before["accepted"]
    print(f"{len(runs.seeded)} seeded answers, {accepted} accepted drafts")
    assert accepted > len(runs.seeded) and after["branching_paths"] > before["branching_paths"]
    # Two answers to one prompt may be alike at a low temperature.
    assert len({answer.tokens for answer in runs.seeded}) > 0.9 * len(runs.seeded)


@pytest.mark.full
def test_texts_without_a_seed_follow_the_seeds_that_vllm_draws(runs: Runs) -> None:
    """vLLM gives such a request a random seed once, when it arrives: the noise is as well defined."""
    stats = runs.use("target_only", [oracle.second_child])
    before = stats.read()["accepted"]
    np.random.seed(5)
    assert texts(runs.llm, UNSEEDED) == runs.unseeded
    assert stats.read()["accepted"] > before
    np.random.seed(6)
    assert texts(runs.llm, UNSEEDED) != runs.unseeded


def test_traversal_text_depends_on_seed_and_drafts_alone(runs: Runs) -> None:
    """A mixed batch, then the same requests in another order and company: greedy, penalties, logprobs."""
    stats = runs.use("traversal", [oracle.second_child])
    before = stats.read()["accepted"]
    sampled = [(prompt, given | {"n": 1, "logprobs": 2}) for prompt, given in seeded(8)[1:3]]
    penalised = ([8, 9, 10], {"temperature": 0.8, "seed": 3, "presence_penalty": 0.9, "logprobs": 1})
    together = texts(runs.llm, [*sampled, GREEDY, penalised])
    assert stats.read()["accepted"] > before
    apart = texts(runs.llm, [penalised, sampled[1]])
    assert [r.tokens for r in apart] == [together[3].tokens, together[1].tokens]
    assert all(len(r.tokens) == len(r.logprobs) == TOKENS for r in together)

    assert together[2].tokens == runs.greedy[0].tokens
    for step, expected in zip(together[2].logprobs, runs.greedy[0].logprobs, strict=True):
        assert step.keys() == expected.keys()
        for token, entry in step.items():
            assert entry.rank == expected[token].rank
            assert abs(entry.logprob - expected[token].logprob) < 1e-3
    for answer in together:  # raw log-probabilities: of the target as it is
        exact = runs.logprobs([*answer.prompt, *answer.tokens])[len(answer.prompt) - 1 :]
        for i, (token, step) in enumerate(zip(answer.tokens, answer.logprobs, strict=True)):
            assert abs(step[token].logprob - float(exact[i, token])) < 1e-3


# --- the law ---------------------------------------------------------------------------------------------


def kept(runs: Runs, context: Sequence[int]) -> tuple[list[int], torch.Tensor]:
    """The tokens that `LAW` leaves after the prompt and `context`, best first, and their probabilities."""
    row = runs.logprobs([*LAW_PROMPT, *context])[-1] / LAW["temperature"]
    values, tokens = row.topk(int(LAW["top_k"]))
    return tokens.tolist(), values.softmax(0)


def likely_trees(runs: Runs, table: dict[tuple[int, ...], tuple[list[int], torch.Tensor]]) -> None:
    """Drafts after the first and the second token of the answer: three children, two below the first two."""
    runner = harness.runner(runs.llm)
    speculator, states = runner.speculator, runner.req_states

    def propose(
        hidden: Any, draft_hidden: Any, logits: Any, roots: torch.Tensor, budget: int, **_: Any
    ) -> Tree:
        tree = Tree.empty(len(roots), budget + 1, roots.device)
        width = speculator.num_speculative_steps
        index = speculator.sample_idx_mapping[: len(roots) * width].view(-1, width)[:, 0]
        for row, state in enumerate(index.tolist()):
            total = int(states.total_len.gpu[state])
            context = tuple(states.all_token_ids.gpu[state, len(LAW_PROMPT) : total].tolist())
            tokens, parents = [], []
            if context in table:
                tokens, parents = table[context][0][1:], [0, 0, 0]  # never the best one first
                for parent in (1, 2):
                    below = (*context, tokens[parent - 1])
                    if below in table and len(tokens) < budget:
                        tokens = [*tokens, table[below][0][0]]
                        parents = [*parents, parent]
            oracle.fill(tree, row, int(roots[row]), tokens, parents)
            tree.logprobs[row, 1 : len(tokens) + 1] -= 0.4 * torch.arange(len(tokens))
        return tree

    speculator.proposer.propose = propose


@pytest.mark.full
@pytest.mark.parametrize("mode", ["target_only", "traversal"])
def test_tokens_have_the_law_of_plain_sampling(runs: Runs, mode: str) -> None:
    """The first token comes from the prompt's row, the second and third from trees; all three against the
    exact distribution."""
    table = {(): kept(runs, ())}
    for length in (1, 2):
        for context in [c for c in table if len(c) == length - 1]:
            table.update({(*context, t): kept(runs, (*context, t)) for t in table[context][0]})
    law = {(): 1.0}
    for context, (tokens, chances) in table.items():
        law.update({(*context, t): law[context] * float(p) for t, p in zip(tokens, chances, strict=True)})
    stats = runs.use(mode)
    likely_trees(runs, table)
    before = stats.read()["accepted"]
    draws = 600
    requests = [(LAW_PROMPT, LAW | {"seed": 7 * i, "max_tokens": 3}) for i in range(draws)]
    found = [answer.tokens for answer in texts(runs.llm, requests)]
    assert stats.read()["accepted"] - before > draws // 4, "hardly a draft was accepted"
    for length in (1, 2, 3):
        cells = [c for c in law if len(c) == length]
        counts = torch.tensor([sum(tokens[:length] == cell for tokens in found) for cell in cells])
        assert int(counts.sum()) == draws
        p = p_value(counts, torch.tensor([law[c] for c in cells], dtype=torch.float64))
        print(f"{mode}: {draws} draws, first {length} tokens: p = {p:.4f}")
        assert p > 0.001
