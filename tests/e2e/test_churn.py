# SPDX-License-Identifier: Apache-2.0
"""The rules by which a churn judges: answers, log-probabilities, what is left over, memory, modes."""

from __future__ import annotations

import dataclasses
import multiprocessing
import random
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.e2e import churn, churn_engines, churn_memory, harness
from tests.e2e.churn_engines import Answers, Setting
from tests.e2e.churn_requests import Answer, Request, difference, logprob_difference
from tests.e2e.noise import gumbel

GREEDY = Request("greedy", (1,), {"temperature": 0})
SAMPLED = Request("sampled", (1,), {"temperature": 0.5, "seed": 7})
FILTERED = Request("sampled", (1,), {"temperature": 0.5, "seed": 7, "top_k": 2, "logprobs": 3})


def answer(*tokens: int, logprobs: tuple[dict[int, float], ...] | None = None) -> Answer:
    return Answer(tokens, "", "length", None, logprobs)


class Given(dict[int, Answer]):
    """Answers alone that are there already."""

    noise = 0.0


def judge(
    expected: Answer | None, exact: bool = True, request: Request = GREEDY, **options: Any
) -> churn.Churn:
    """A churn of one request, without an engine."""
    made = churn.Churn.__new__(churn.Churn)
    tested = {"async_scheduling": False, "enforce_eager": True} | options
    made.where = Setting(Path(), {}, tested, exact, longest=1)
    made.report, made.waiting, made.apart = churn.Report(), defaultdict(list), Counter()
    made.requests, made.answers = [request], Given({} if expected is None else {0: expected})  # type: ignore[assignment]
    return made


def test_answers_must_be_equal_or_a_beginning() -> None:
    right, other = answer(1, 2), answer(1, 3)
    assert difference(right, other, finished=False) is not None
    assert difference(right, Answer((1,), "", None, None, None), finished=False) is None
    assert difference(right, answer(1), finished=True) is not None
    assert difference(right, right, finished=True) is None
    watched = judge(right)
    watched._compare(0, other, finished=True)
    assert len(watched.report.wrong) == 1


def test_an_answer_waits_for_the_one_alone() -> None:
    watched = judge(None)
    watched._compare(0, answer(1, 3), finished=True)
    assert not watched.report.compared and not watched.report.wrong
    watched.answers[0] = answer(1, 2)  # type: ignore[index]
    watched._catch_up()
    assert watched.report.compared == 1 and len(watched.report.wrong) == 1 and not watched.waiting


def test_answers_come_in_order_and_a_dead_process_is_named() -> None:
    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = SimpleNamespace(join=lambda: None, exitcode=3)
    answers = Answers(2, process, receiver)
    assert answers.get(0) is None
    sender.send(answer(1))
    assert answers.get(1) is None and answers.get(0) == answer(1)
    sender.send(answer(2))
    assert answers.get(1) == answer(2) and answers.noise is None
    sender.send(0.25)
    assert answers.all() == [answer(1), answer(2)] and answers.noise == 0.25
    receiver, sender = multiprocessing.Pipe(duplex=False)
    answers = Answers(2, process, receiver)
    sender.send(answer(1))
    sender.close()
    with pytest.raises(RuntimeError, match="status 3 after 1 of 2"):
        answers.all()


@pytest.mark.parametrize(
    ("exact", "noise", "gap", "excused"),
    [
        (False, 0.0, 0.1, True), (False, 0.0, 0.2, False), (False, 0.2, 0.28, True),
        (False, 0.2, 0.32, False), (True, 0.0, 0.1, False),
    ],
)  # fmt: skip
def test_a_greedy_answer_parts_at_a_near_tie_in_bf16_only(
    exact: bool, noise: float, gap: float, excused: bool
) -> None:
    watched = judge(answer(1, logprobs=({1: -0.5, 2: -0.5 - gap},)), exact)
    watched.answers.noise = noise
    watched._compare(0, answer(2), finished=True)
    watched.judge()
    assert (len(watched.report.ties), len(watched.report.wrong)) == ((1, 0) if excused else (0, 1))


def test_how_far_an_engine_is_from_itself() -> None:
    """Changes of gaps to likely tokens, as far as the context is the same, at temperature 1."""
    first = ({1: -0.5, 2: -0.75, 3: -9.0}, {1: -0.5, 2: -0.5}, {1: -0.5, 2: -0.5})
    again = ({1: -0.5, 2: -0.875, 3: -7.0}, {1: -0.625, 2: -0.5}, {1: -0.9, 2: -0.4})
    one, other = answer(1, 1, 1, logprobs=first), answer(1, 2, 1, logprobs=again)
    assert GREEDY.apart(one, other) == 0.125
    assert SAMPLED.apart(one, other) == 0.0625
    assert GREEDY.apart(one, one) == 0
    cut = ({1: -0.25, 2: float("-inf")},)
    assert GREEDY.apart(one, answer(1, logprobs=cut)) == 0, "a limit crossed is no change of a gap"


def test_log_probabilities() -> None:
    nothing = float("-inf")
    expected = answer(7, logprobs=({7: -0.1, 5: nothing, 6: nothing, 8: nothing},))

    def found(scores: dict[int, float], tolerance: float = 0.2) -> str | None:
        return logprob_difference(FILTERED, expected, answer(7, logprobs=(scores,)), tolerance)

    assert found({7: -0.1, 0: nothing, 1: nothing}) is None, "tokens that cannot be chosen are in no order"
    assert found({7: -0.25, 0: nothing, 1: nothing}) is None
    assert found({7: -0.4, 0: nothing, 1: nothing}) is not None
    assert found({7: float("nan"), 0: nothing, 1: nothing}) is not None
    assert found({7: -0.1, 5: -3.0, 1: nothing}) is not None, "this one had no probability"
    assert found({7: -0.1, 0: -2.0, 1: -2.5}) is not None, "two that are not among the expected ones"
    assert found({0: -0.1, 1: -2.0, 2: -2.5}) is not None, "not of the token itself"


def test_a_limit_that_rounding_crosses_is_a_near_tie_in_bf16_only() -> None:
    expected = answer(7, logprobs=({7: -0.1, 5: float("-inf"), 6: -4.1},))
    for exact in (False, True):
        watched = judge(expected, exact, FILTERED)
        watched._compare(0, answer(5, logprobs=({5: -0.1},)), finished=True)
        watched.judge()
        assert (len(watched.report.limits), len(watched.report.wrong)) == ((0, 1) if exact else (1, 0))
        watched = judge(expected, exact, FILTERED)
        watched._compare(0, answer(7, logprobs=({7: -0.1, 5: -3.0, 6: -4.0},)), finished=True)
        assert (len(watched.report.limits), len(watched.report.wrong)) == ((0, 1) if exact else (0, 0))
        watched = judge(expected, exact, FILTERED)
        watched._compare(0, answer(7, logprobs=({7: float("nan"), 5: -3.0, 6: -4.0},)), finished=True)
        assert len(watched.report.wrong) == 1


@pytest.mark.parametrize(("excess", "excused"), [(0.2, True), (0.4, False)], ids=["near", "far"])
def test_noise_takes_part_in_a_sampled_near_tie(excess: float, excused: bool) -> None:
    """At a temperature of 0.5 a step of 0.13 is one of 0.26."""
    noise = gumbel(torch.tensor(7), torch.tensor(0), torch.arange(2)).tolist()
    scores = {0: -1.0, 1: -1.0 + noise[0] - noise[1] - excess}
    watched = judge(answer(0, logprobs=(scores,)), False, SAMPLED)
    watched._compare(0, answer(1), finished=True)
    watched.judge()
    assert (len(watched.report.ties), len(watched.report.wrong)) == ((1, 0) if excused else (0, 1))


@pytest.mark.full
def test_the_noise_is_the_one_of_plain_decoding() -> None:
    """The token that vLLM samples is the one that log-probability and noise together choose."""
    params = {"temperature": 1.0, "seed": 2**40 + 5, "max_tokens": 12, "logprobs": -1, "ignore_eos": True}
    request = Request("sampled", tuple(range(20, 31)), params)
    with harness.engine(harness.DEMO / "target", max_logprobs=-1) as llm:
        (found,) = churn_engines.ask(llm, [request])
    assert found.logprobs is not None and len(found.tokens) == 12
    assert any(
        token != max(s, key=s.__getitem__) for token, s in zip(found.tokens, found.logprobs, strict=True)
    )
    for at, scores in enumerate(found.logprobs):
        assert len(scores) > 1000
        assert min(request.gap(found, at, token) for token in scores) > -0.02, at


def test_what_is_left_over_is_noticed() -> None:
    watched = judge(None)
    watched.before, watched.held = {"free blocks": 9}, lambda: {"free blocks": 8}  # type: ignore[method-assign]
    watched.check_held()
    assert watched.report.wrong == ["free blocks: 8, but 9 before the run"]


def test_modes_that_did_not_happen_are_noticed() -> None:
    watched = judge(None, async_scheduling=True)
    calls: list[Any] = []
    runner = SimpleNamespace(
        cudagraph_manager=SimpleNamespace(run_fullgraph=calls.append),
        speculator=SimpleNamespace(query_cudagraph_manager=SimpleNamespace(run_fullgraph=calls.append)),
    )
    watched.report.replays = harness.count_replays(runner)
    runner.cudagraph_manager.run_fullgraph("graph")
    assert calls == ["graph"] and watched.report.replays == {"target": 1, "draft": 0}
    watched.check_modes()
    assert len(watched.report.wrong) == 2
    assert "asynchronous" in watched.report.wrong[0] and "draft" in watched.report.wrong[1]
    runner.speculator.query_cudagraph_manager.run_fullgraph("graph")
    watched.report.ahead, watched.report.wrong = 1, []
    watched.check_modes()
    assert not watched.report.wrong


# --- memory ----------------------------------------------------------------------------------------------


def history(per_request: dict[str, int], count: int = 12) -> list[churn_memory.Sample]:
    """Measurements every 10 requests: warm-up in the first half, then a jump, noise and growth."""
    rng, made = random.Random(1), []
    for number in range(count):
        finished = 10 * number
        value = 10**8 + min(number, count // 2) * 10**6 + (number > 8) * 10**5 + rng.randrange(2000)
        grown = {what: per_request.get(what, 0) * finished for what in churn_memory.MOST}
        made.append(
            churn_memory.Sample(finished, value + grown["native"], grown["python"], grown["device"], value)
        )
    return made


@pytest.mark.parametrize("what", churn_memory.MOST)
def test_memory_that_grows_with_requests_is_a_leak(what: str) -> None:
    assert churn_memory.leaks(history({})) == []
    least = int(2 * churn_memory.MOST[what]) + 4096 * (what == "native")
    found = churn_memory.leaks(history({what: least}))
    assert len(found) == 1 and churn_memory.UNITS[what] in found[0]
    assert churn_memory.leaks(history({what: least}, churn_memory.LEAST - 1)) == [], "too short to tell"
    few = [dataclasses.replace(sample, finished=sample.finished // 3) for sample in history({what: least})]
    assert churn_memory.leaks(few) == [], "too few requests to tell"


def test_live_memory_is_measured() -> None:
    churn_memory.measure(0)  # what the first measurement itself needs
    before = churn_memory.measure(0)
    held = [torch.ones(300_000), [float(number) for number in range(10_000)]]
    with_both = churn_memory.measure(0)
    assert 1_200_000 <= with_both.native - before.native < 1_500_000
    assert 10_000 <= with_both.python - before.python < 11_000
    held.clear()
    after = churn_memory.measure(0)
    assert abs(after.native - before.native) < 100_000 and abs(after.python - before.python) < 1_000
