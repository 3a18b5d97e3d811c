# SPDX-License-Identifier: Apache-2.0
"""Every kind of request beside trees: its answer is that of plain decoding in every field.

The target is random and in float32: answers must be equal, without any allowance for ties. Drafts come from
an oracle, by turns as a chain and behind wrong first children, so that stops and limits lie inside verified
paths. Requests whose logits depend on the tokens before a row have chains.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from tests.e2e import fields, harness, models, oracle
from tests.e2e.fields import Case

TOKENS = 16
BATCH = 8
EOS, THINK, THOUGHT = 0, 1, 3  # <|endoftext|>, <|im_start|>, <|mask|>
HISTORY = (
    "repetition penalty",
    "presence and frequency penalty",
    "bad words",
    "thinking budget",
    "custom processor",
    "penalty and logprobs",
)


class NoSum(LogitsProcessor):
    """Forbids the token that is the sum of the two before it (plus the request's own number), modulo the
    vocabulary: of every row as vLLM documents a row's history."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self.states = req_states
        self.numbers: dict[int, int] = {}

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        number = (sampling_params.extra_args or {}).get("no_sum")
        self.numbers.pop(req_idx, None)
        if number is not None:
            self.numbers[req_idx] = number
        return number is not None

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        for row, state in enumerate(ctx.expanded_idx_mapping.tolist()):
            if state not in self.numbers:
                continue
            total = int(self.states.total_len.gpu[state])
            drafted = int(ctx.expanded_local_pos[row])
            known = self.states.all_token_ids.gpu[state, :total].tolist()
            known += ctx.input_ids[row - drafted + 1 : row + 1].tolist()
            forbidden = (known[-1] + known[-2] + self.numbers[state]) % self.states.vocab_size
            logits[row, forbidden] = float("-inf")
        return logits


@dataclass(frozen=True)
class Plain:
    """What plain decoding answers; `free` is each case's prompt without any parameter."""

    folder: Path
    cases: dict[str, Case]
    answers: dict[str, Any]
    free: dict[str, Any]


OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": BATCH,
    "logits_processors": [NoSum],
    "reasoning_config": {"reasoning_start_str": "<|im_start|>", "reasoning_end_str": "<|mask|>"},
}


def sampling(**params: Any) -> Any:
    from vllm import SamplingParams

    return SamplingParams(**({"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True} | params))


def kinds(free: list[Any], tokenizer: Any) -> dict[str, dict[str, Any]]:
    """Parameters by name. free: the answer without parameters to each of their prompts, in this order."""
    at = 0

    def ids() -> list[int]:
        return list(free[at].outputs[0].token_ids)

    def text(start: int, stop: int) -> str:
        """Part of the free text of the kind at hand, by token."""
        return tokenizer.decode(ids()[:stop])[len(tokenizer.decode(ids()[:start])) :]

    found: dict[str, dict[str, Any]] = {}
    seeded = {"temperature": 0.9, "seed": 5}
    ended = {"min_tokens": 9, "logit_bias": {EOS: 100.0}}
    for name, make in {
        # chains
        "repetition penalty": lambda: {"repetition_penalty": 1.3},
        "presence and frequency penalty": lambda: {"presence_penalty": 0.9, "frequency_penalty": 0.4},
        "bad words": lambda: {"_bad_words_token_ids": [ids()[8:10]]},
        "thinking budget": lambda: {"thinking_token_budget": 7},
        "custom processor": lambda: {"extra_args": {"no_sum": (ids()[9] - ids()[8] - ids()[7]) % 1024}},
        "penalty and logprobs": lambda: {"repetition_penalty": 1.2, "logprobs": 2},
        # trees
        "logprobs": lambda: {"logprobs": 5},
        "prompt logprobs": lambda: {"prompt_logprobs": 3, "logprobs": 0},
        "token id logprobs": lambda: {"logprob_token_ids": [3, 9, 27]},
        "sampled logprobs": lambda: {**seeded, "top_k": 20, "logprobs": 3},
        "min-p": lambda: {**seeded, "min_p": 0.2},
        "two choices": lambda: {**seeded, "n": 2, "logprobs": 1},
        "logit bias": lambda: {"logit_bias": {3: 40.0, 9: 41.0}},
        "allowed ids": lambda: {"allowed_token_ids": list(range(20, 60))},
        "stop id": lambda: {"stop_token_ids": [ids()[10]], "logprobs": 1},
        "stop string": lambda: {"stop": [text(9, 11)]},
        "stop string included": lambda: {"stop": [text(6, 8)], "include_stop_str_in_output": True},
        "eos": lambda: {**ended, "ignore_eos": False, "logprobs": 1},
        "ignored eos": lambda: {**ended},
        "min tokens": lambda: {"min_tokens": 12, "stop_token_ids": [ids()[4]]},
        "six tokens": lambda: {"max_tokens": 6},
        "one token": lambda: {"max_tokens": 1},
        "greedy": lambda: {},
        "not the custom processor": lambda: {"extra_args": {"other": 1}},
    }.items():
        found[name] = make()
        at += 1
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = models.with_text(tmp_path_factory.mktemp("models"))
    generator = torch.Generator().manual_seed(7)
    count = 24
    prompts = [torch.randint(4, 1000, (9 + 3 * i,), generator=generator).tolist() for i in range(count)]
    prompts[HISTORY.index("thinking budget")][-3] = THINK
    with harness.engine(folder / "target", **OPTIONS) as llm:
        free = fields.ask(llm, [Case(prompt, sampling()) for prompt in prompts])
        given = kinds(free, llm.get_tokenizer())
        assert len(given) == count
        cases = {}
        for (name, params), prompt, answer in zip(given.items(), prompts, free, strict=True):
            words = params.pop("_bad_words_token_ids", None)
            made = sampling(**params)
            if words is not None:
                made._bad_words_token_ids = words  # as bad_words become
            stops = name.startswith("stop") or "tokens" in params or "max_tokens" in params
            cases[name] = Case(prompt, made, answer.outputs[0].token_ids if stops else None)
        answers = dict(zip(cases, fields.ask(llm, list(cases.values())), strict=True))
    return Plain(folder, cases, answers, dict(zip(cases, free, strict=True)))


@pytest.fixture(scope="module")
def trees(plain: Plain) -> Iterator[Any]:
    options = OPTIONS | harness.trees(16, "ddtree", plain.folder / "draft")
    with harness.engine(plain.folder / "target", **options) as llm:
        known = fields.references(list(plain.cases.values()), list(plain.answers.values()))
        oracle.install(harness.runner(llm), known, [oracle.chain, oracle.second_child])
        yield llm


def test_the_parameters_matter(plain: Plain) -> None:
    """Otherwise the tests below show nothing: every answer but the last two differs from the free text."""
    for name, answer in plain.answers.items():
        same = answer.outputs[0].token_ids == plain.free[name].outputs[0].token_ids
        scored = answer.outputs[0].logprobs is not None or answer.prompt_logprobs is not None
        assert same == (name in ("greedy", "not the custom processor")) or scored, name
    ends = {name: plain.answers[name].outputs[0] for name in plain.cases}
    assert ends["stop string"].finish_reason == ends["stop id"].finish_reason == "stop"
    assert ends["eos"].finish_reason == "stop" and len(ends["eos"].token_ids) == 10
    assert list(ends["ignored eos"].token_ids[9:]) == [EOS] * (TOKENS - 9)
    assert len(ends["min tokens"].token_ids) >= 12
    thought = list(ends["thinking budget"].token_ids)
    assert THOUGHT in thought and THOUGHT not in plain.free["thinking budget"].outputs[0].token_ids


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "alone" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all")
        some = ["custom processor", "token id logprobs", "stop string"]
        metafunc.parametrize("alone", list(range(24)) if everything else some)


def test_a_request_alone(alone: str | int, plain: Plain, trees: Any) -> None:
    name = alone if isinstance(alone, str) else list(plain.cases)[alone]
    (answer,) = fields.ask(trees, [plain.cases[name]])
    fields.assert_equal(name, answer, plain.answers[name])


def test_requests_of_all_kinds_in_batches_of_eight(plain: Plain, trees: Any) -> None:
    """All of them at once, eight places: they come and go beside one another."""
    stats = harness.runner(trees).model_state.step.stats
    before = stats.read()
    answers = fields.ask(trees, list(plain.cases.values()))
    for (name, expected), answer in zip(plain.answers.items(), answers, strict=True):
        fields.assert_equal(name, answer, expected)
    after = stats.read()
    assert after["branching_paths"] > before["branching_paths"], "no request had a tree"


def test_requests_that_depend_on_history_have_chains(plain: Plain, trees: Any) -> None:
    """Accepted, and never through a node that is not a first child."""
    stats = harness.runner(trees).model_state.step.stats
    before = stats.read()
    answers = fields.ask(trees, [plain.cases[name] for name in HISTORY])
    for name, answer in zip(HISTORY, answers, strict=True):
        fields.assert_equal(name, answer, plain.answers[name])
    grown = {name: value - before[name] for name, value in stats.read().items()}
    assert grown["branching_paths"] == 0, "a path left the first children: that was no chain"
    assert grown["accepted"] > 2 * TOKENS, grown
