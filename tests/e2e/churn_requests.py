# SPDX-License-Identifier: Apache-2.0
"""The requests of `churn`: a random catalogue of every kind, their answers, and how two answers differ."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.e2e.following import change_of_gaps
from tests.e2e.noise import gumbel

GRAMMARS = ("[a-z ]{4,30}", "(yes|no|perhaps)( and (yes|no))?", "[A-Z][a-z]{2,8}( [a-z]{1,6}){1,5}[.]")
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 6}, "many": {"enum": [1, 2, 3]}},
    "required": ["name", "many"],
}


@dataclass(frozen=True)
class Request:
    """One entry of the catalogue; `kind` is what makes it special, `params` go to SamplingParams."""

    kind: str
    prompt: tuple[int, ...]
    params: dict[str, Any]

    @property
    def sampled(self) -> bool:
        """Whether noise takes part in the choice of tokens."""
        return bool(self.params["temperature"])

    @property
    def scale(self) -> float:
        """How much larger a difference of logits is in what the tokens are chosen by."""
        return self.params.get("repetition_penalty", 1.0) / (self.params["temperature"] or 1.0)

    def gap(self, answer: Answer, at: int, token: int) -> float:
        """How far `token` was from being chosen in place of this answer's at a position: the difference of
        their log-probabilities, with noise where it takes part. Infinite if it is not known."""
        scores = answer.logprobs[at] if answer.logprobs is not None and at < len(answer.logprobs) else {}
        chosen = answer.tokens[at]
        if not {token, chosen} <= scores.keys():
            return float("inf")
        gap = scores[chosen] - scores[token]
        if self.sampled:
            seed, position = torch.tensor(self.params["seed"]), torch.tensor(len(self.prompt) + at - 1)
            for_chosen, for_token = gumbel(seed, position, torch.tensor([chosen, token])).tolist()
            gap += for_chosen - for_token
        return gap

    def apart(self, one: Answer, other: Answer, near: float = 1.0) -> float:
        """The largest change of a log-probability gap from one answer to another, at temperature 1, for as
        long as they say the same: between the chosen token and others at most `near` less likely."""
        found = 0.0
        for chosen, again, a, b in zip(
            one.tokens, other.tokens, one.logprobs or (), other.logprobs or (), strict=False
        ):
            found = max(found, change_of_gaps(chosen, a, b, near * self.scale) / self.scale)
            if again != chosen:
                break
        return found

    @property
    def filtered(self) -> bool:
        """Whether tokens are left out of a sampled distribution by a limit, which rounding can cross."""
        return self.sampled and not self.params.keys().isdisjoint(("top_k", "top_p", "min_p"))

    def sampling(self) -> Any:
        """vLLM's SamplingParams; made anew each time, since vLLM changes them."""
        from vllm import SamplingParams
        from vllm.sampling_params import StructuredOutputsParams

        params = dict(self.params)
        grammar = params.pop("grammar", None)
        if grammar is not None:
            params["structured_outputs"] = StructuredOutputsParams(**grammar)
        return SamplingParams(**params)


@dataclass(frozen=True)
class Answer:
    """What a request got: for comparison only."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: str | None
    stop_reason: Any
    logprobs: tuple[dict[int, float], ...] | None

    @classmethod
    def of(cls, output: Any) -> Answer:
        """From vLLM's CompletionOutput."""
        logprobs = None
        if output.logprobs is not None:
            logprobs = tuple({t: entry.logprob for t, entry in step.items()} for step in output.logprobs)
        return cls(tuple(output.token_ids), output.text, output.finish_reason, output.stop_reason, logprobs)


def _sampled(rng: random.Random) -> dict[str, Any]:
    params: dict[str, Any] = {"temperature": rng.uniform(0.3, 1.3), "seed": rng.randrange(2**31)}
    for name, value in (("top_k", rng.randrange(2, 60)), ("top_p", rng.uniform(0.6, 1)), ("min_p", 0.05)):
        if rng.random() < 0.4:
            params[name] = value
    return params


def _penalties(rng: random.Random) -> dict[str, Any]:
    every = {
        "repetition_penalty": rng.uniform(1.05, 1.5),
        "presence_penalty": rng.uniform(-0.5, 1),
        "frequency_penalty": rng.uniform(-0.5, 1),
    }
    return {name: every[name] for name in rng.sample(sorted(every), rng.randrange(1, 4))}


KINDS: dict[str, Callable[[random.Random, int], dict[str, Any]]] = {
    "greedy": lambda rng, vocab: {},
    "sampled": lambda rng, vocab: _sampled(rng),
    "penalties": lambda rng, vocab: _penalties(rng),
    "sampled, penalties": lambda rng, vocab: _sampled(rng) | _penalties(rng),
    "bad words": lambda rng, vocab: {"bad_words": rng.sample(["the", "er", "in", "of the", "a", "s"], 2)},
    "logit bias": lambda rng, vocab: {"logit_bias": {rng.randrange(8, vocab): 3.0 for _ in range(4)}},
    "allowed ids": lambda rng, vocab: {"allowed_token_ids": rng.sample(range(8, vocab), 40)},
    "log-probabilities": lambda rng, vocab: {"logprobs": rng.randrange(0, 6)},
    "sampled, log-probabilities": lambda rng, vocab: _sampled(rng) | {"logprobs": 3},
    "stop strings": lambda rng, vocab: {"stop": rng.sample([" the", "in", "er", "on", "x", "qu"], 2)},
    "min tokens": lambda rng, vocab: {"min_tokens": 5, "ignore_eos": False},
    "grammar": lambda rng, vocab: {"grammar": {"regex": rng.choice(GRAMMARS)}},
    "sampled, grammar": lambda rng, vocab: _sampled(rng) | {"grammar": {"regex": rng.choice(GRAMMARS)}},
    "JSON": lambda rng, vocab: {"grammar": {"json": SCHEMA}},
}


def catalogue(
    count: int, rng: random.Random, texts: Sequence[Sequence[int]], vocab: int, max_tokens: int, longest: int
) -> list[Request]:
    """`count` requests, every kind among the first `len(KINDS)`. Prompts are cuts of a few long texts, with
    and without an end of their own, so that many share whole blocks."""
    long = []
    for i in range(4):
        joined = [token for text in texts[i::4] for token in text]
        long.append((joined * (longest // len(joined) + 1))[:longest])
    made = []
    for i in range(count):
        kind = list(KINDS)[i % len(KINDS)]
        length = rng.choice([1, rng.randrange(2, 20), rng.randrange(20, longest), longest - 1, longest])
        prompt = list(rng.choice(long)[:length])
        if rng.random() < 0.4:
            tail = [rng.randrange(8, vocab) for _ in range(rng.randrange(1, 9))]
            prompt[-len(tail) :] = tail
        limit = rng.choice([1, rng.randrange(2, 8), rng.randrange(4, max_tokens), max_tokens])
        special = KINDS[kind](rng, vocab)
        params = {"temperature": 0, "max_tokens": limit, "ignore_eos": "grammar" not in special} | special
        params["min_tokens"] = min(params.get("min_tokens", 0), limit)
        made.append(Request(kind, tuple(prompt), params))
    return made


def parted(expected: Answer, found: Answer) -> int | None:
    """First position at which both have a token and not the same one."""
    pairs = enumerate(zip(found.tokens, expected.tokens, strict=False))
    return next((i for i, (a, b) in pairs if a != b), None)


def difference(expected: Answer, found: Answer, finished: bool) -> str | None:
    """None if `found` is `expected`, or for an unfinished request a beginning of it; else what differs."""
    at = parted(expected, found)
    if at is not None:
        return f"tokens from position {at}: {found.tokens[at : at + 4]}, not {expected.tokens[at : at + 4]}"
    if len(found.tokens) > len(expected.tokens) or (finished and len(found.tokens) < len(expected.tokens)):
        return f"{len(found.tokens)} tokens, not {len(expected.tokens)}"
    if not finished:
        return None if expected.text.startswith(found.text) else f"text {found.text!r}"
    for name in ("text", "finish_reason", "stop_reason"):
        if getattr(found, name) != getattr(expected, name):
            return f"{name} {getattr(found, name)!r}, not {getattr(expected, name)!r}"
    return None


def logprob_difference(request: Request, expected: Answer, found: Answer, tolerance: float) -> str | None:
    """None if a finished answer has the log-probabilities that it asked for, and they are the expected ones.

    The expected answer may have more of them. Tokens without any probability (`top_k` and the like leave the
    others none) fill up the best in no order.
    """
    wanted = request.params.get("logprobs")
    if wanted is None:
        return None if found.logprobs is None else "log-probabilities that nobody asked for"
    if found.logprobs is None or len(found.logprobs) != len(found.tokens):
        return "log-probabilities are missing"
    for at, (a, b) in enumerate(zip(expected.logprobs or (), found.logprobs, strict=True)):
        if found.tokens[at] not in b or not max(wanted, 1) <= len(b) <= wanted + 1:
            return f"log-probabilities at {at} are of {sorted(b)}"
        for token in a.keys() & b.keys():
            if a[token] != b[token] and not abs(a[token] - b[token]) <= tolerance:
                return f"log-probability at {at} of token {token}: {b[token]}, not {a[token]}"
        others = sum(score > float("-inf") for token, score in b.items() if token not in a)
        if others > 1:  # the last of the best may change places with the next
            return f"log-probabilities at {at} are of {sorted(b)}, not of {sorted(a)}"
    return None
