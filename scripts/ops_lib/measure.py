# SPDX-License-Identifier: Apache-2.0
"""Measuring a running server over one dataset: throughput, accepted length, errors, and how sure they are.

Throughput is generated tokens over wall time, prefill and scheduling included. The accepted length tau of a
request is its completion tokens over its verify steps, the bonus token included; of a dataset, the mean over
requests; over datasets, the mean of theirs.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from .client import Answer, Server, ServerError

Prompt = list[
    dict[str, str]
]  # the turns of a conversation as messages, or one {"role": "text"} to go on from
RESAMPLES = 2000


@dataclass
class Settings:
    """How to ask: sampling, length, requests at a time, and when a dataset has been seen enough of."""

    max_tokens: int = 4096
    temperature: float = 1.0
    seed: int = 0
    concurrency: int = 1
    flush: bool = True
    ignore_eos: bool = False
    body: dict[str, Any] = field(default_factory=dict)
    min_prompts: int = 8
    max_prompts: int = 80
    precision: float = 0.0  # stop when the half width of the interval is below this share; 0: take all


@dataclass
class Sample:
    """One conversation: tokens, seconds, of these until the first token of each of `turns` answers; verify
    `steps` only where it ran alone."""

    tokens: int
    prompt_tokens: int
    seconds: float
    first_seconds: float
    turns: int = 1
    steps: int | None = None

    @property
    def tau(self) -> float | None:
        """Completion tokens over verify steps; None if there were none, or not of this request alone."""
        return self.tokens / self.steps if self.steps else None

    @property
    def decode_rate(self) -> float | None:
        """Tokens a second after the first one (1000 / TPOT); None where no answer has a second token."""
        rest, later = self.seconds - self.first_seconds, self.tokens - self.turns
        return later / rest if later > 0 and rest > 0 else None


@dataclass
class Measured:
    """One dataset's outcome. `counted`: what the server's own counters grew by meanwhile."""

    name: str
    samples: list[Sample] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    seconds: float = 0.0
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(sample.tokens for sample in self.samples)

    @property
    def other_tokens(self) -> float:
        """Tokens that the server generated meanwhile and that are in no answer: failed requests', or another
        client's, whose steps would then be in the accepted length."""
        return self.counted.get("generated", 0.0) - self.tokens

    def summary(self) -> dict[str, Any]:
        """Figures as plain JSON values; None where there is nothing to take them from."""
        taus = [sample.tau for sample in self.samples if sample.tau is not None]
        drafts = self.counted.get("drafts", 0.0)
        rate = self.tokens / self.seconds if self.seconds > 0 and self.samples else None
        return {
            "requests": len(self.samples),
            "errors": len(self.errors),
            "first_error": self.errors[0] if self.errors else None,
            "tokens": self.tokens,
            "prompt_tokens": sum(sample.prompt_tokens for sample in self.samples),
            "seconds": self.seconds,
            "throughput": rate,
            "throughput_interval": rate_interval(self.samples, self.seconds),
            "tau": statistics.fmean(taus) if taus else None,
            "tau_interval": interval(taus),
            # Over all steps, as the server counts them; where requests ran together, all there is.
            "tau_pooled": 1 + self.counted["accepted"] / drafts if drafts else None,
            "decode_tokens_a_second": _mean([sample.decode_rate for sample in self.samples]),
            "first_token_seconds": _mean([s.first_seconds / s.turns for s in self.samples]),
            "counted": self.counted,
            "other_tokens": self.other_tokens,
        }


def _mean(values: Sequence[float | None]) -> float | None:
    found = [value for value in values if value is not None]
    return statistics.fmean(found) if found else None


def interval(values: Sequence[float], seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of the mean; None of fewer than two values."""
    if len(values) < 2:
        return None
    rng = random.Random(seed)
    means = sorted(statistics.fmean(rng.choices(values, k=len(values))) for _ in range(RESAMPLES))
    return [means[round(0.025 * (RESAMPLES - 1))], means[round(0.975 * (RESAMPLES - 1))]]


def rate_interval(samples: Sequence[Sample], seconds: float, seed: int = 0) -> list[float] | None:
    """95 % bootstrap interval of tokens over wall time, requests drawn anew; None of fewer than two.

    Requests that ran together share the wall time: each counts for its part of it.
    """
    total = sum(sample.seconds for sample in samples)
    if len(samples) < 2 or total <= 0 or seconds <= 0:
        return None
    shared = seconds / total
    rng = random.Random(seed)
    rates = []
    for _ in range(RESAMPLES):
        drawn = rng.choices(samples, k=len(samples))
        rates.append(sum(s.tokens for s in drawn) / (shared * sum(s.seconds for s in drawn)))
    rates.sort()
    return [rates[round(0.025 * (RESAMPLES - 1))], rates[round(0.975 * (RESAMPLES - 1))]]


def precise(measured: Measured, settings: Settings) -> bool:
    """Whether the throughput's interval is narrow enough to stop."""
    if not settings.precision or len(measured.samples) < settings.min_prompts:
        return False
    found = rate_interval(measured.samples, measured.seconds)
    if found is None:
        return False
    low, high = found
    return (high - low) / 2 <= settings.precision * (low + high) / 2


def ask(server: Server, prompt: Prompt, settings: Settings, index: int) -> list[Answer]:
    """One prompt's answers: a turn each, earlier answers in the conversation. Raises ServerError."""
    body = {
        "temperature": settings.temperature,
        "max_tokens": settings.max_tokens,
        "seed": settings.seed * 1_000_003 + index,
        **({"ignore_eos": True} if settings.ignore_eos else {}),
        **settings.body,
    }
    if prompt[0]["role"] == "text":
        return [server.complete(prompt[0]["content"], **body)]
    answers: list[Answer] = []
    messages: Prompt = []
    for turn in prompt:
        messages.append(turn)
        if turn["role"] == "user":
            answers.append(server.chat(messages, **body))
            messages.append({"role": "assistant", "content": answers[-1].text})
    return answers


def measure(
    server: Server,
    name: str,
    prompts: Sequence[Prompt],
    settings: Settings,
    progress: Callable[[Measured], None] = lambda measured: None,
) -> Measured:
    """Ask every prompt (fewer with `precision`), `concurrency` at a time. Raises ServerError if the server's
    counters cannot be read; a request that fails is an error of the dataset and nothing more."""
    measured = Measured(name)
    chosen = list(prompts[: settings.max_prompts])
    before = server.counts()
    if settings.concurrency == 1:
        _one_at_a_time(server, chosen, settings, measured, progress)
    else:
        if settings.flush:
            server.flush_cache()
        _together(server, chosen, settings, measured, progress)
    # What failed halfway is counted by the server and not by us.
    measured.counted = server.settled(before, measured.tokens)
    return measured


def _one_at_a_time(
    server: Server, prompts: Sequence[Prompt], settings: Settings, measured: Measured, progress: Any
) -> None:
    for index, prompt in enumerate(prompts):
        if settings.flush:
            server.flush_cache()
        before, start = server.counts(), time.monotonic()
        try:
            answers = ask(server, prompt, settings, index)
        except ServerError as error:
            measured.errors.append(str(error))
            measured.seconds += time.monotonic() - start
        else:
            # Flushing and reading counters are no part of the wall time.
            measured.seconds += time.monotonic() - start
            tokens = sum(answer.tokens for answer in answers)
            drafts = round(server.settled(before, tokens)["drafts"])
            measured.samples.append(_sample(answers, drafts))
        progress(measured)
        if precise(measured, settings):
            return


def _together(
    server: Server, prompts: Sequence[Prompt], settings: Settings, measured: Measured, progress: Any
) -> None:
    start = time.monotonic()

    def one(numbered: tuple[int, Prompt]) -> list[Answer] | str:
        try:
            return ask(server, numbered[1], settings, numbered[0])
        except ServerError as error:
            return str(error)

    with ThreadPoolExecutor(settings.concurrency) as pool:
        for outcome in pool.map(one, enumerate(prompts)):
            measured.seconds = time.monotonic() - start
            if isinstance(outcome, str):
                measured.errors.append(outcome)
            else:
                measured.samples.append(_sample(outcome, None))
            progress(measured)


def _sample(answers: Sequence[Answer], steps: int | None) -> Sample:
    return Sample(
        tokens=sum(answer.tokens for answer in answers),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        seconds=sum(answer.seconds for answer in answers),
        first_seconds=sum(answer.first_seconds for answer in answers),
        turns=len(answers),
        steps=steps,
    )


def macro(rows: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The unweighted mean over datasets of throughput, tau and speed-up; None where one of them has none."""
    found: dict[str, Any] = {"errors": sum(row["errors"] for row in rows.values())}
    for name in ("throughput", "tau", "tau_pooled", "decode_tokens_a_second", "speedup"):
        values = [row.get(name) for row in rows.values()]
        found[name] = statistics.fmean(values) if values and None not in values else None
    return found
