# SPDX-License-Identifier: Apache-2.0
"""Answers compared field by field, for targets in float32: equal, log-probabilities within 0.001."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.harness import Reference


@dataclass(frozen=True)
class Case:
    """A request: prompt, sampling parameters, and what plain decoding would go on to say without a stop."""

    prompt: Sequence[int]
    params: Any
    beyond: Sequence[int] | None = None


def ask(llm: Any, cases: Sequence[Case]) -> list[Any]:
    """vLLM's `RequestOutput` for each case, as one batch."""
    prompts = [{"prompt_token_ids": list(case.prompt)} for case in cases]
    return llm.generate(prompts, [case.params.clone() for case in cases], use_tqdm=False)


def references(cases: Sequence[Case], answers: Sequence[Any]) -> list[Reference]:
    """What the oracle may draft: the answers, and what lies beyond their stops."""
    found = []
    for case, answer in zip(cases, answers, strict=True):
        texts = [output.token_ids for output in answer.outputs] if case.beyond is None else [case.beyond]
        found += [Reference(tuple(case.prompt), tuple(tokens), ()) for tokens in texts]
    return found


def assert_equal(name: str, found: Any, expected: Any) -> None:
    """Two `RequestOutput`s say the same in every field that a client can see."""
    assert found.prompt_token_ids == expected.prompt_token_ids, name
    assert found.num_cached_tokens == expected.num_cached_tokens, name
    assert len(found.outputs) == len(expected.outputs), name
    for ours, plain in zip(found.outputs, expected.outputs, strict=True):
        for field in ("index", "token_ids", "text", "finish_reason", "stop_reason"):
            assert getattr(ours, field) == getattr(plain, field), (name, field)
        _assert_scores((name, "logprobs"), ours.logprobs, plain.logprobs)
        assert ours.cumulative_logprob == pytest.approx(plain.cumulative_logprob, abs=1e-2), name
        if ours.logprobs is not None:
            assert len(ours.logprobs) == len(ours.token_ids), (name, "one entry a token")
    _assert_scores((name, "prompt_logprobs"), found.prompt_logprobs, expected.prompt_logprobs)


def _assert_scores(where: tuple[str, str], found: Any, expected: Any) -> None:
    assert (found is None) == (expected is None), where
    if found is None:
        return
    assert len(found) == len(expected), where
    for position, (ours, plain) in enumerate(zip(found, expected, strict=True)):
        assert (ours is None) == (plain is None), (where, position)
        if ours is None:
            continue
        assert set(ours) == set(plain), (where, position)
        for token, entry in plain.items():
            assert ours[token].logprob == pytest.approx(entry.logprob, abs=1e-3), (where, position, token)
            assert ours[token].rank == entry.rank, (where, position, token)
            assert ours[token].decoded_token == entry.decoded_token, (where, position, token)
