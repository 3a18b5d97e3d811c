# SPDX-License-Identifier: Apache-2.0
"""Ends of mamba blocks (cache mode `align`): each that a path passes is filled; most steps launch nothing.

What was filled is compared with what the device committed in each step, and the host's bounds with the
device's counts, under both kinds of scheduling.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest
from torch import Tensor

from tests.e2e import churn_engines, harness, oracle
from tests.e2e.test_life import ALIGNED, BLOCK

TOKENS = 80
ENDS = {n * BLOCK - 12: [n * BLOCK] for n in (1, 2)}  # by prompt length: ends of blocks that answers pass


@dataclass
class Seen:
    """What happened to the boundaries of an engine's requests, by prompt length."""

    passed: dict[int, list[int]] = field(default_factory=dict)
    filled: dict[int, list[int]] = field(default_factory=dict)
    behind: int = 0  # times that the host counted tokens that the device had rejected
    jumps: int = 0  # paths that went on behind a boundary
    steps: int = 0
    launches: int = 0


def watch(runner: Any) -> Seen:
    """Record every step of an engine from now on."""
    seen, state, lengths = Seen(), runner.model_state, runner.req_states.prompt_len.np
    slots, step, post, start = (
        state._slots,
        state.step,
        state.postprocess_state,
        state._slots.start_boundaries,
    )

    def count(*arguments: Any) -> None:
        seen.launches += 1
        start(*arguments)

    def record(index: Tensor, sampled: Tensor, computed: Tensor) -> None:
        counted = state._step_batch.num_computed_tokens_np
        slots.boundary_path.zero_()
        post(index, sampled, computed)
        seen.steps += step.any_tree
        for row, request in enumerate(index.tolist()):
            base, nodes = int(step.base[row]), int(step.num_path[row])
            if nodes == 0:
                continue
            assert counted[row] - slots.unsettled_drafts <= base <= counted[row], "the host's bounds"
            assert nodes <= slots.longest_path
            seen.behind += bool(base < counted[row])
            passed = [end for end in range(base + 1, base + nodes + 1) if end % BLOCK == 0]
            seen.passed.setdefault(int(lengths[request]), []).extend(passed)
            filled = seen.filled.setdefault(int(lengths[request]), [])
            if int(slots.boundary_path[row]):
                filled.append(base + int(slots.boundary_path[row]))
                seen.jumps += filled[-1] < base + nodes
            elif passed == [base + nodes] and slots._buffers.columns[row] == passed[0] // BLOCK - 1:
                filled += passed  # the working block itself

    state.postprocess_state, slots.start_boundaries = record, count
    return seen


def run(known: list[harness.Reference], asynchronous: bool) -> tuple[Seen, list[harness.Reference]]:
    """A watched run, with an oracle where the answers are known, and the answers."""
    options = ALIGNED | harness.trees(16) | ({"async_scheduling": True} if asynchronous else {})
    with churn_engines.asynchronous(asynchronous), harness.engine(harness.DEMO / "target", **options) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == asynchronous
        runner = harness.runner(llm)
        depth = runner.model_state.settings.depth
        if known:

            def siblings(continuation: list[int], budget: int, vocab: int) -> tuple[list[int], list[int]]:
                return oracle.second_child(continuation[:depth], budget, vocab)

            oracle.install(runner, known, [siblings])
        text = [token for prompt in harness.demo_prompts(llm.get_tokenizer()) for token in prompt] * 2
        prompts = [text[30 * i : 30 * i + length] for i, length in enumerate(ENDS)]
        seen = watch(runner)
        outputs = harness.greedy(llm, prompts, TOKENS)
    pairs = zip(prompts, outputs, strict=True)
    return seen, [harness.Reference(tuple(p), tuple(output.token_ids), ()) for p, output in pairs]


@pytest.fixture(scope="module")
def asynchronous() -> tuple[Seen, list[harness.Reference]]:
    return run([], asynchronous=True)


def check(seen: Seen) -> None:
    assert seen.passed == ENDS, "the requests did not go the way that the test wants"
    assert seen.filled == ENDS
    assert 2 <= seen.launches < seen.steps / 2, (seen.launches, seen.steps)
    print(f"{seen.launches} of {seen.steps} steps launched the boundaries' kernels")


def test_the_host_is_ahead_of_the_device(asynchronous: tuple[Seen, list[harness.Reference]]) -> None:
    """Asynchronous scheduling: rejected drafts are counted as computed in the next step."""
    check(asynchronous[0])
    assert asynchronous[0].behind


def test_long_paths_over_a_boundary(asynchronous: tuple[Seen, list[harness.Reference]]) -> None:
    """The host's counts are the device's; a path of the trees' whole depth starts well before a boundary."""
    seen, _ = run(asynchronous[1], asynchronous=False)
    check(seen)
    assert seen.behind == 0 and seen.jumps
