# SPDX-License-Identifier: Apache-2.0
"""The metrics of trees: exact where an oracle says what must be accepted, and none of it for other engines.

What a server shows of them over HTTP is in test_server.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from tests.e2e import fields, harness, models, oracle
from tests.e2e.fields import Case
from vllm_weaver.spec_decode.metrics import (
    CHAIN_REASONS,
    TreeCounts,
    TreeLogging,
    count_verifies,
    depths_of,
    reason_masks,
)
from vllm_weaver.spec_decode.scheduler import tree_scheduler

TOKENS, BUDGET, DEPTH = 15, 8, models.BLOCK - 1
OPTIONS = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32, "max_num_seqs": 8}


# --- counting --------------------------------------------------------------------------------------------


def step(*accepted: int) -> SpecDecodingStats:
    """vLLM's statistics of a step whose verifies accepted so many drafts."""
    stats = SpecDecodingStats.new(BUDGET)
    for count in accepted:
        stats.observe_draft(num_draft_tokens=BUDGET, num_accepted_tokens=count)
    return stats


def test_a_stop_cuts_what_was_accepted() -> None:
    """Whole; cut inside the accepted drafts, before and behind the branching; cut behind the bonus token."""
    stats = step(3, 4, 4, 0)
    verifies = [(3, 4, 8, 2, 0), (4, 1, 7, 2, 0), (4, 2, 6, 2, 0), (0, 1, 5, 0, 0b1001)]
    counts = count_verifies(stats, verifies, DEPTH)
    assert (stats.num_drafts, stats.num_draft_tokens, stats.num_accepted_tokens) == (4, 26, 6)
    assert stats.num_accepted_tokens_per_pos == [3, 2, 1] + [0] * (BUDGET - 3)
    assert depths_of(stats)[:5] == [1, 1, 1, 1, 0]
    assert (counts.nodes, counts.accepted_paths, counts.branching_paths) == (26, 3, 2)
    assert counts.lengths == [0, 2, 1, 0, 1]
    assert {reason for reason, count in counts.chains.items() if count} == {"penalty", "custom_processor"}


def test_counts_survive_the_way_to_the_frontend() -> None:
    """As vLLM encodes them; what is left is vLLM's own. Statistics without counts have none."""
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    stats = step(2, 0)
    counts = count_verifies(stats, [(2, 3, 8, 1, 1), (0, 1, 8, 0, 0)], DEPTH)
    plain = list(stats.num_draft_tokens_per_pos)
    counts.attach(stats)
    sent = EngineCoreOutputs(scheduler_stats=SchedulerStats(spec_decoding_stats=stats))
    received = MsgpackDecoder(EngineCoreOutputs).decode(MsgpackEncoder().encode(sent))
    found = received.scheduler_stats.spec_decoding_stats
    assert TreeCounts.detach(found) == counts
    assert found.num_draft_tokens_per_pos == plain
    assert TreeCounts.detach(found) is None


def test_reasons_are_bits() -> None:
    masks = reason_masks({"penalty": np.array([True, False]), "bad_words": np.array([True, True])})
    assert masks.dtype == np.uint8 and masks.tolist() == [0b11, 0b10]


def test_a_scheduler_stays_what_it_is() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    counting = tree_scheduler(AsyncScheduler, 7)
    assert issubclass(counting, AsyncScheduler) and counting.__name__ == "AsyncScheduler"
    assert tree_scheduler(AsyncScheduler, 7) is counting


def test_the_log_says_what_trees_did_since_the_last_line() -> None:
    lines: list[str] = []

    def log(form: str, *args: Any) -> None:
        lines.append(form % args)

    logging = TreeLogging()
    for accepted, verifies in (
        ((2, 0), [(2, 3, 8, 1, 0), (0, 1, 6, 0, 1)]),
        ((4,), [(4, 2, 8, 0, 0)]),
    ):
        stats = step(*accepted)
        count_verifies(stats, verifies, DEPTH).attach(stats)
        logging.observe(stats)
    logging.log(log)
    depths = ", ".join(["0.333", "0.000", "0.667"] + ["0.000"] * (DEPTH - 2))
    assert lines[0] == (
        f"Tree metrics: Tokens a verify: 2.00, Nodes a verify: 7.3, Depths accepted (from 0): {depths}, "
        "Branching share: 50.0%, Chains in place of trees: penalty 1"
    )
    rates = re.search(r"Per-position acceptance rate: ([\d., ]+),", lines[1])
    assert rates and len(rates[1].split(", ")) == DEPTH, "positions deeper than any path"
    logging.log(log)
    assert len(lines) == 2, "an interval without verifies has no line"
    logging.observe(step(1))  # of another method
    logging.log(log)
    assert len(lines) == 3 and lines[2].startswith("SpecDecoding metrics")


# --- an engine -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    root = tmp_path_factory.mktemp("models")
    models.attention_only(root / "target")
    models.random_draft(root / "draft")
    options = OPTIONS | harness.trees(BUDGET, "ddtree", root / "draft")
    with harness.engine(root / "target", **options) as engine:
        yield engine


def numbers(llm: Any) -> dict[str, Any]:
    """Values of the metrics by name, other labels than the engine's appended."""
    found: dict[str, Any] = {}
    for metric in llm.get_metrics():
        name = metric.name.removeprefix("vllm:")
        labels = [v for k, v in metric.labels.items() if k not in ("model_name", "engine")]
        key = " ".join([name, *labels])
        if hasattr(metric, "values"):
            found[key] = list(metric.values)
        elif hasattr(metric, "buckets"):
            found[key] = (metric.count, metric.sum, list(metric.buckets.values()))
        else:
            found[key] = metric.value
    return found


def test_metrics_are_what_the_run_must_give(llm: Any) -> None:
    """The oracle drafts the true text behind wrong first children, 4 levels of 2 nodes: every verify accepts
    4 drafts and the bonus token, until the text ends."""
    from vllm import SamplingParams

    def params(**more: Any) -> Any:
        return SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **more)

    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, models.VOCAB - 1, (12 + i,), generator=generator).tolist() for i in range(3)]
    long = [Case(prompt, params(max_tokens=2 * TOKENS)) for prompt in prompts]
    texts = [answer.outputs[0].token_ids for answer in fields.ask(llm, long)]
    runner = harness.runner(llm)
    oracle.install(runner, fields.references(long, fields.ask(llm, long)), [oracle.second_child])
    stop = texts[1][7]
    first = list(texts[1]).index(stop) + 1  # tokens up to the stop
    cases = [
        Case(prompts[0], params(max_tokens=1 + 5 + 5 + 3)),  # the limit inside the third verify's drafts
        Case(prompts[1], params(max_tokens=TOKENS, stop_token_ids=[stop])),
        Case(prompts[2], params(max_tokens=1 + 5, presence_penalty=1e-6)),  # a chain of one wrong draft
    ]
    before = numbers(llm)
    answers = fields.ask(llm, cases)
    grown = numbers(llm)
    lengths = [len(answer.outputs[0].token_ids) for answer in answers]
    assert lengths == [14, first, 6]
    # Tokens committed by each verify; the first token of each request is the prefill's.
    committed = []
    for total in lengths[:2]:
        rest = total - 1
        while rest > 0:
            committed.append(min(5, rest))
            rest -= 5
    committed += [1] * 5  # the chain's
    depths = [min(4, tokens) for tokens in committed[:-5]] + [0] * 5
    wanted = {
        "spec_decode_num_drafts": len(committed),
        "spec_decode_num_draft_tokens": 8 * len(committed[:-5]) + 5,
        "spec_decode_num_accepted_tokens": sum(depths),
        "dflash_tfm_tree_nodes": 8 * len(committed[:-5]) + 5,
        "dflash_tfm_accepted_paths": len(committed) - 5,
        "dflash_tfm_branching_paths": len(committed) - 5,
        "dflash_tfm_chain_fallbacks penalty": 5,
        "dflash_tfm_chain_fallbacks bad_words": 0,
        "generation_tokens": sum(lengths),
    }
    assert {name: grown[name] - before[name] for name in wanted} == wanted
    assert grown["dflash_tfm_tree_budget"] == BUDGET
    assert set(CHAIN_REASONS) == {key.split()[1] for key in grown if "chain_fallbacks" in key}
    for name, values in (("dflash_tfm_accepted_length", committed), ("dflash_tfm_accepted_depth", depths)):
        count, total, buckets = (
            [b - a for a, b in zip(before[name][2], grown[name][2], strict=True)]
            if part == 2
            else grown[name][part] - before[name][part]
            for part in range(3)
        )
        lowest = 1 if name.endswith("length") else 0
        upto = [sum(v <= edge for v in values) for edge in range(lowest, lowest + DEPTH + 1)]
        assert (count, total) == (len(values), sum(values))
        assert buckets == [*upto, len(values)]
    positions = [
        b - a
        for a, b in zip(
            before["spec_decode_num_accepted_tokens_per_pos"],
            grown["spec_decode_num_accepted_tokens_per_pos"],
            strict=True,
        )
    ]
    assert positions == [sum(depth > position for depth in depths) for position in range(DEPTH)]
