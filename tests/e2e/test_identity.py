# SPDX-License-Identifier: Apache-2.0
"""Losslessness (invariant 1): greedy output equals plain decoding over proposals, budgets, batches, chunks.

`--all` (see the root conftest) runs the whole grid; without it a covering part runs, in which every pair of
proposal, budget and chunking values that matters together occurs (but for budget 1, see `test_targets`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.e2e import harness

PROPOSALS, BUDGETS, CHUNKS = ("weaver", "ddtree", "chain"), (1, 7, 16, 33), (True, False)
FULL = [(p, b, c) for p in PROPOSALS for b in BUDGETS for c in CHUNKS]
COVERING = [
    ("weaver", 16, True),
    ("weaver", 33, False),
    ("ddtree", 7, False),
    ("ddtree", 33, True),
    ("chain", 16, False),
]
TOKENS = 64


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "grid_engine" in metafunc.fixturenames:
        grid = FULL if metafunc.config.getoption("--all") else COVERING
        ids = [f"{p}-{b}-{'chunked' if c else 'whole'}" for p, b, c in grid]
        metafunc.parametrize("grid_engine", grid, ids=ids, indirect=True, scope="module")


@pytest.fixture(scope="module")
def grid_engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    proposal, budget, chunked = request.param
    # Prompts become several chunks, which run beside the others' verify rows. vLLM holds drafts to the
    # threshold too, so that it must leave room for a whole tree.
    threshold = max(8, budget + 1)
    chunking = {"long_prefill_token_threshold": threshold} if chunked else {"enable_chunked_prefill": False}
    with harness.engine(harness.DEMO / "target", **harness.trees(budget, proposal), **chunking) as llm:
        yield llm


@pytest.mark.parametrize("batch", [1, 4])
def test_greedy_is_plain_decoding(grid_engine: Any, references: list[harness.Reference], batch: int) -> None:
    """At least 64 tokens a request, token for token."""
    stats = harness.runner(grid_engine).model_state.step.stats
    before = stats.read()
    chosen = references[:batch]
    outputs = harness.greedy(grid_engine, [list(r.prompt) for r in chosen], TOKENS)
    assert all(len(output.token_ids) == TOKENS for output in outputs)
    harness.assert_identical(chosen, outputs)
    after = stats.read()
    assert after["verifies"] > before["verifies"], "no tree was verified"
    if harness.runner(grid_engine).model_state.settings.budget > 1:
        assert after["accepted"] > before["accepted"], "nothing was ever accepted: the run shows nothing"


def test_requests_join_and_leave(references: list[harness.Reference]) -> None:
    """Ten requests of different lengths through four places: prefills run beside verify rows all the time."""
    lengths = [5, 33, 72, 17, 1, 64, 29, 2, 48, 40]
    chosen = [references[i % len(references)] for i in range(len(lengths))]
    options = harness.trees(16) | {"long_prefill_token_threshold": 17}
    with harness.engine(harness.DEMO / "target", **options) as llm:
        outputs = harness.greedy(llm, [list(r.prompt) for r in chosen], lengths)
    assert [len(output.token_ids) for output in outputs] == lengths
    harness.assert_identical(chosen, outputs, max_ties=2)
