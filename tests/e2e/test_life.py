# SPDX-License-Identifier: Apache-2.0
"""A long life: prefix hits, preemption, aborts, asynchronous scheduling, many requests; nothing is left over.

Hybrid targets keep recurrent states in the prefix cache; those are compared with plain decoding's. The rest
runs on the random float32 target, whose answers must be equal, with accepted paths from an oracle.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.e2e import churn, churn_engines, harness, oracle
from tests.e2e.harness import BLOCK
from tests.e2e.test_state import CLOSE, distance, recurrent_layers

# --- recurrent states in the prefix cache ----------------------------------------------------------------

# By default vLLM keeps the states at the ends of prompts; here those of generated text too.
ALIGNED: dict[str, Any] = {
    "enable_prefix_caching": True,
    "block_size": BLOCK,
    "prefix_cache_retention_interval": BLOCK,
    "max_model_len": 2 * BLOCK + 128,
}
BEFORE = 8  # tokens of the prompt's last block that generation has to fill


def hits(llm: Any) -> int:
    """Prompt tokens that came from the prefix cache since the engine's start."""
    metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    return int(metrics["vllm:prefix_cache_hits"])


def states(layers: list[Any], slots: list[int]) -> list[Tensor]:
    """Copies of the convolution and recurrent state of each layer's slot."""
    return [
        layer.kv_cache[part][slot].clone()
        for layer, slot in zip(layers, slots, strict=True)
        for part in (0, 1)
    ]


def session(
    llm: Any, plain: list[harness.Reference], ask: Callable[..., list[Any]] = harness.greedy
) -> tuple[list[Any], list[int]]:
    """What `ask` gives for four requests, and their hits: one that fills its prompt's block, one that goes on
    from there, and another text twice."""
    first, second = plain
    prompts = [first.prompt, first.prompt + first.tokens[: BEFORE + 4], second.prompt, second.prompt]
    llm.reset_prefix_cache()
    outputs, found, before = [], [], hits(llm)
    for prompt in prompts:
        outputs.append(ask(llm, [prompt], BEFORE + 4)[0])
        found.append(hits(llm) - before)
        before = hits(llm)
    return outputs, found


class Plain:
    """Plain decoding with a prefix cache: references, states by number of tokens, and a session."""

    def __init__(self) -> None:
        with harness.engine(harness.DEMO / "target", **ALIGNED) as llm:
            assert llm.llm_engine.vllm_config.cache_config.block_size == BLOCK
            text = [token for prompt in harness.demo_prompts(llm.get_tokenizer()) for token in prompt]
            prompts = [text[: BLOCK - BEFORE], text[: BLOCK + 40]]
            self.references = harness.references(llm, prompts, 24)
            self.states = self._record(llm, prompts[0])
            self.answers, self.hits = session(llm, self.references, harness.references)

    @staticmethod
    def _record(llm: Any, prompt: list[int]) -> dict[int, list[Tensor]]:
        runner, layers, found = harness.runner(llm), recurrent_layers(llm), {}
        names = [group.layer_names for group in runner.kv_cache_config.kv_cache_groups]
        post = runner.model_state.postprocess_state

        def record(index: Tensor, sampled: Tensor, computed: Tensor) -> None:
            post(index, sampled, computed)
            count = int(computed[index[0]])
            tables = runner.block_tables.input_block_tables
            groups = [next(i for i, g in enumerate(names) if layer.prefix in g) for layer in layers]
            found[count] = states(layers, [int(tables[g][0, (count - 1) // BLOCK]) for g in groups])

        runner.model_state.postprocess_state = record
        try:
            harness.greedy(llm, [prompt], BEFORE + 6)
        finally:
            del runner.model_state.postprocess_state
        return found


@pytest.fixture(scope="module")
def plain() -> Plain:
    return Plain()


@pytest.fixture(scope="module")
def hybrid(plain: Plain) -> Iterator[Any]:  # after the plain engine: one at a time in a process
    with harness.engine(harness.DEMO / "target", **ALIGNED, **harness.trees(16)) as llm:
        yield llm


@pytest.mark.parametrize(
    "shape", [oracle.second_child, oracle.wrong, oracle.chain], ids=["siblings", "nothing accepted", "chain"]
)
def test_the_state_at_a_block_boundary_is_kept(hybrid: Any, plain: Plain, shape: oracle.Shape) -> None:
    """Where an accepted path crosses a boundary, the cache's block gets the state of exactly that many
    tokens."""
    runner, layers = harness.runner(hybrid), recurrent_layers(hybrid)
    hybrid.reset_prefix_cache()
    state, slots, kept = runner.model_state, runner.model_state._slots, []
    post, proposer = state.postprocess_state, runner.speculator.proposer.propose
    oracle.install(runner, plain.references, [shape])

    def record(index: Tensor, sampled: Tensor, computed: Tensor) -> None:
        base = state.step.base[:1].clone()
        slots.boundary_path.zero_()
        post(index, sampled, computed)
        if int(slots.boundary_path[0]):
            at = [int(state._boundary_tables[layer.prefix][0, 0]) for layer in layers]
            kept.append((int(base[0]), int(computed[index[0]]), states(layers, at)))

    state.postprocess_state = record
    try:
        output = harness.greedy(hybrid, [list(plain.references[0].prompt)], BEFORE + 8)[0]
    finally:
        del state.postprocess_state
        runner.speculator.proposer.propose = proposer
    # Behind the boundary the text may part at a tie; the state depends on what is before it.
    assert harness.difference(plain.references[0], output.token_ids[:BEFORE]) is None
    assert len(kept) == 1, "the boundary was not kept, or more than once"
    base, end, found = kept[0]
    assert base < BLOCK <= end and (end > BLOCK) == (shape is not oracle.wrong)
    for number, tensor in enumerate(found):
        assert distance(tensor, plain.states[BLOCK][number]) < CLOSE, f"state {number}"
        for other in (BLOCK - 1, BLOCK + 1):
            assert distance(tensor, plain.states[other][number]) > CLOSE, f"as close to {other} tokens"


def test_hits_are_those_of_plain_decoding(hybrid: Any, plain: Plain) -> None:
    """Also where a request goes on from a block that another one's answer has filled."""
    runner = harness.runner(hybrid)
    proposer = runner.speculator.proposer.propose
    # One token a step: vLLM's own scheduler forgets a state block that a longer path jumps over before it has
    # hashed it, with any kind of drafts (unless scheduling is asynchronous).
    oracle.install(runner, plain.references, [oracle.wrong])
    try:
        outputs, found = session(hybrid, plain.references)
    finally:
        runner.speculator.proposer.propose = proposer
    assert found == plain.hits
    assert found == [0, BLOCK, 0, BLOCK]
    # Not those of `plain.references`: from a hit, plain decoding itself can go another way than without one.
    harness.assert_identical(plain.answers, outputs, max_ties=2)  # the second text twice


def test_drafts_are_as_good_after_a_hit(hybrid: Any, plain: Plain) -> None:
    """What the draft keeps of a position is in the cache too, for the last block of a hit as well."""
    stats, prompt = harness.runner(hybrid).model_state.step.stats, plain.references[1].prompt
    hybrid.reset_prefix_cache()
    accepted, found = [], []
    for _ in range(2):
        before, cached = stats.read(), hits(hybrid)
        harness.assert_identical(plain.references[1:], harness.greedy(hybrid, [prompt], 24))
        accepted.append(stats.read()["accepted"] - before["accepted"])
        found.append(hits(hybrid) - cached)
    assert found == [0, BLOCK]
    assert accepted[0] > 0 and abs(accepted[0] - accepted[1]) <= 2, accepted


# --- churn, preemption, aborts ---------------------------------------------------------------------------


def run(*words: str) -> churn.Report:
    report = churn.main(words)
    assert not report.wrong, report.summary()
    return report


def test_a_short_churn() -> None:
    report = run("--minutes", "0", "--least", "24", "--requests", "14", "--max-tokens", "16", "--seed", "3")
    assert report.preemptions and report.hits and report.aborted, report.summary()
    assert report.finished > 5 and report.stats["branching_paths"], report.summary()


@pytest.mark.full
@pytest.mark.parametrize("scheduling", ["--async-scheduling", "--no-async-scheduling"])
@pytest.mark.parametrize("target", ["random", "demo"])
def test_a_longer_churn(target: str, scheduling: str) -> None:
    sizes = ("--minutes", "1", "--least", "40", "--requests", "28", "--concurrency", "6")
    few = ("--blocks", "9") if target == "demo" else ()  # for four short requests of six
    report = run(*sizes, *few, "--max-tokens", "24", "--target", target, scheduling)
    assert report.preemptions and report.aborted and report.finished > 10, report.summary()


@contextlib.contextmanager
def crowd(folder: Path, *words: str, count: int = 14, max_tokens: int = 12) -> Iterator[churn.Churn]:
    """A churn's engine and catalogue, without its random course."""
    rng = random.Random(5)
    where = churn_engines.setting(churn.parser().parse_args(words), folder)
    requests = churn_engines.requests_of(where, count, rng, max_tokens)
    with (
        churn_engines.answered_alone(where, requests) as answers,
        churn_engines.engine(where, requests, answers) as llm,
    ):
        yield churn.Churn(llm, where, requests, answers, rng)


@pytest.mark.full
def test_sixty_four_at_once(tmp_path: Path) -> None:
    """All kinds of requests, all at once, on a cache that holds a part of them."""
    with crowd(tmp_path, "--concurrency", "64", "--blocks", "72", count=28) as many:
        for number in range(64):
            many.add(number % len(many.requests))
        report = many.run(0, 64)
    assert not report.wrong, report.summary()
    assert report.finished == 64 and report.preemptions, report.summary()


@pytest.mark.full
def test_aborts_at_every_point(tmp_path: Path) -> None:
    """A request is aborted after 0, 1, 2, ... steps, beside two others; these and later ones are right."""
    with crowd(tmp_path, "--concurrency", "3", "--blocks", "12", max_tokens=28) as several:
        lengths = [len(answer.tokens) for answer in several.answers.all()]
        longest = lengths.index(max(lengths))
        for steps in range(10):
            for which in (steps, steps + 1):
                several.add(which % len(several.requests))
            victim = several.add(longest)
            for _ in range(steps):
                several.step()
            if victim in several.live:
                several.abort(victim)
            several.drain(60)
        report = several.run(0, 3)
    assert not report.wrong, report.summary()
    assert sum(report.aborted.values()) >= 5 and len(report.aborted) == 2, report.summary()
