# SPDX-License-Identifier: Apache-2.0
"""Other targets, and edges: the multimodal wrapper class (M-RoPE, text requests) and attention-only Qwen3.

The attention-only pair is random and in float32: outputs must be equal, without any allowance for ties. What
an untrained draft cannot give, accepted paths, comes from an oracle.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import harness, models, oracle

PLAIN = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32}
TEXT_ONLY = {"limit_mm_per_prompt": {"image": 0, "video": 0}}
LONG = 32


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target, draft and Weaver of the attention-only pair, and the wrapped demo target."""
    root = tmp_path_factory.mktemp("models")
    models.attention_only(root / "target")
    models.random_draft(root / "draft")
    models.random_weaver(root / "weaver")
    models.wrapper(root / "wrapped")
    return root


def prompts(lengths: list[int]) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(4)
    return [torch.randint(0, models.VOCAB - 1, (n,), generator=generator).tolist() for n in lengths]


@pytest.fixture(scope="module")
def known(folder: Path) -> list[harness.Reference]:
    """Plain decoding of the attention-only target: prompts of 1 to 70 tokens, two with a common prefix."""
    made = prompts([23, 5, 1, 70])
    made.append(made[3][:64] + made[0])
    with harness.engine(folder / "target", **PLAIN) as llm:
        return harness.references(llm, made, LONG)


def options(folder: Path, budget: int, proposal: str = "ddtree", **more: Any) -> dict[str, Any]:
    """Engine options for the attention-only pair."""
    speculative = harness.trees(budget, proposal, folder / "draft")
    if proposal == "weaver":
        speculative["speculative_config"]["weaver"] = str(folder / "weaver")
    return PLAIN | speculative | more


def assert_equal(references: list[harness.Reference], outputs: list[Any]) -> None:
    """Token identity, no ties allowed."""
    for reference, output in zip(references, outputs, strict=True):
        assert output.token_ids, "empty output"
        assert harness.difference(reference, output.token_ids) is None


@pytest.mark.parametrize("proposal", ["weaver", "ddtree", "chain"])
def test_attention_only(folder: Path, known: list[harness.Reference], proposal: str) -> None:
    with harness.engine(
        folder / "target", **options(folder, 7, proposal, long_prefill_token_threshold=16)
    ) as llm:
        assert_equal(known, harness.greedy(llm, [r.prompt for r in known], 20))
        assert harness.runner(llm).model_state.step.stats.read()["verifies"] > 40


@pytest.mark.parametrize("budget", [1, 33])
def test_attention_only_accepts_winding_paths(
    folder: Path, known: list[harness.Reference], budget: int
) -> None:
    shapes = [oracle.second_child, oracle.wrong, oracle.late, oracle.none, oracle.chain]
    with harness.engine(folder / "target", **options(folder, budget)) as llm:
        offered = oracle.install(harness.runner(llm), known, shapes)
        assert_equal(known, harness.greedy(llm, [r.prompt for r in known], [LONG, 24, LONG, 9, 17]))
        stats = harness.runner(llm).model_state.step.stats.read()
    assert max(map(max, offered)) == budget if budget == 1 else max(map(max, offered)) > 20
    assert stats["accepted"] > 15 and (budget == 1 or stats["branching_paths"] > 3), stats


@pytest.mark.parametrize("budget", [1, 16])
def test_prefix_cache_hits(folder: Path, known: list[harness.Reference], budget: int) -> None:
    """Case C7: concurrent requests hit a cached prefix; its blocks stay as they are, in all layers."""
    shared = 2  # blocks of 32 tokens that the last two prompts have in common
    with harness.engine(folder / "target", **options(folder, budget, enable_prefix_caching=True)) as llm:
        runner = harness.runner(llm)
        oracle.install(runner, known, [oracle.second_child])
        assert_equal(known[3:4], harness.greedy(llm, [known[3].prompt], 4))
        blocks = runner.block_tables.input_block_tables[0][0, :shared].long().clone()
        before = [cache[blocks].clone() for cache in runner.kv_caches]
        assert_equal(known[3:], harness.greedy(llm, [r.prompt for r in known[3:]], LONG))
        hits = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}["vllm:prefix_cache_hits"]
        after = [cache[blocks] for cache in runner.kv_caches]
    # vLLM lets a drafting request recompute the last block of a hit, for the draft's own hidden states.
    assert hits >= 2 * (shared - 1) * 32, f"only {hits} tokens came from the cache"
    assert len(before) == 5, "three target layers and two draft layers"
    for number, (old, new) in enumerate(zip(before, after, strict=True)):
        assert torch.equal(old.view(torch.int32), new.view(torch.int32)), f"cache {number} was written"


@pytest.mark.parametrize("draft_positions", [1024, 48])
@pytest.mark.parametrize("budget", [1, 16])
def test_up_to_max_model_len(
    folder: Path, known: list[harness.Reference], budget: int, draft_positions: int, tmp_path: Path
) -> None:
    """Case C15: the last position is used, nothing is drafted past it; a short draft is extended."""
    limit = 90
    draft = models.random_draft(tmp_path / "draft", draft_positions)
    chosen = [r for r in known if limit - LONG <= len(r.prompt) < limit]
    assert len(chosen) == 2
    wanted = [limit - len(r.prompt) for r in chosen]
    engine_options = options(folder, budget, max_model_len=limit)
    engine_options["speculative_config"]["model"] = str(draft)
    with harness.engine(folder / "target", **engine_options) as llm:
        offered = oracle.install(harness.runner(llm), known, [oracle.chain, oracle.second_child])
        outputs = harness.greedy(llm, [r.prompt for r in chosen], wanted)
        assert_equal(chosen, outputs)
    assert [len(o.token_ids) for o in outputs] == wanted
    assert {o.finish_reason for o in outputs} == {"length"}
    assert offered


def test_a_prompt_of_one_token_joins(folder: Path, known: list[harness.Reference]) -> None:
    """Case C12: the scheduler pads it with placeholder drafts; they are never embedded, never accepted."""
    order = [known[0], known[1], known[2], known[2], known[3]]
    with harness.engine(folder / "target", **options(folder, 16, max_num_seqs=2)) as llm:
        runner = harness.runner(llm)
        oracle.install(runner, known, [oracle.second_child])
        embed, lowest = runner.model.model.embed_tokens, []
        hook = embed.register_forward_pre_hook(lambda _, inputs: lowest.append(int(inputs[0].min())))
        outputs = harness.greedy(llm, [r.prompt for r in order], [20, 7, 28, 14, 12])
        hook.remove()
    assert_equal(order, outputs)
    assert lowest and min(lowest) >= 0, "a placeholder reached the embedding"


def test_preempted_requests_resume(folder: Path, known: list[harness.Reference]) -> None:
    """Case C12: four requests on a cache that holds two; the resumed ones start without a tree."""
    cramped = options(folder, 7, num_gpu_blocks_override=10, max_model_len=160)
    with harness.engine(folder / "target", **cramped) as llm:
        oracle.install(harness.runner(llm), known, [oracle.none, oracle.second_child])
        outputs = harness.greedy(llm, [r.prompt for r in known], LONG)
        metrics = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    assert metrics["vllm:num_preemptions"] > 0, "nothing was preempted: the run shows nothing"
    assert_equal(known, outputs)


def test_more_trees_than_a_step_holds(folder: Path, known: list[harness.Reference]) -> None:
    """Case C6: 8 x 34 rows would be needed, 64 fit; drafts are cut, nothing is lost."""
    chosen = [known[i % len(known)] for i in range(8)]
    narrow = options(folder, 33, max_num_seqs=8, max_num_batched_tokens=64)
    with harness.engine(folder / "target", **narrow) as llm:
        oracle.install(harness.runner(llm), known, [oracle.late])
        assert_equal(chosen, harness.greedy(llm, [r.prompt for r in chosen], 20))


@pytest.mark.parametrize("where", ["target", "draft"])
def test_nan_logits(folder: Path, known: list[harness.Reference], where: str) -> None:
    """Case C13: rows of NaN give ids in range, and the engine goes on; in the draft they change nothing."""
    with harness.engine(folder / "target", **options(folder, 7, "weaver")) as llm:
        runner = harness.runner(llm)
        owner = runner.model if where == "target" else runner.speculator.model
        compute, calls = owner.compute_logits, []

        def poisoned(hidden: torch.Tensor) -> torch.Tensor:
            logits = compute(hidden)
            calls.append(len(logits))
            if len(calls) % 3 == 0:
                logits[:: 1 + len(calls) % 2] = float("nan")
            return logits

        owner.compute_logits = poisoned
        outputs = harness.greedy(llm, [r.prompt for r in known], 24)
        owner.compute_logits = compute
        assert len(calls) > 6
        for output in outputs:
            assert len(output.token_ids) == 24
            assert all(0 <= token < models.VOCAB for token in output.token_ids)
        if where == "draft":
            assert_equal(known, outputs)
        assert_equal(known, harness.greedy(llm, [r.prompt for r in known], 12))


@pytest.mark.full  # test_requests and test_sampling have such requests, too
def test_sampled_and_processed_requests(folder: Path, known: list[harness.Reference]) -> None:
    """One batch of seeded, penalized, banned and logprob requests gives what it gives without speculation."""
    from vllm import SamplingParams

    base: dict[str, Any] = {"max_tokens": 20, "ignore_eos": True, "detokenize": False}
    params = [
        SamplingParams(temperature=0.9, seed=11, **base),
        SamplingParams(temperature=0, repetition_penalty=1.3, frequency_penalty=0.4, **base),
        SamplingParams(temperature=0, logprobs=4, **base),
        SamplingParams(temperature=1.2, top_k=20, top_p=0.9, seed=12, **base),
        SamplingParams(temperature=0, min_tokens=5, **base),
    ]
    requests = [{"prompt_token_ids": list(r.prompt)} for r in known]

    def run(**more: Any) -> list[Any]:
        with harness.engine(folder / "target", **(PLAIN | more)) as llm:
            return [o.outputs[0] for o in llm.generate(requests, params, use_tqdm=False)]

    plain, ours = run(), run(**options(folder, 16))
    for expected, found in zip(plain, ours, strict=True):
        assert list(found.token_ids) == list(expected.token_ids)
        assert found.finish_reason == expected.finish_reason
    for expected, found in zip(plain[2].logprobs, ours[2].logprobs, strict=True):
        assert found.keys() == expected.keys()
        for token, entry in expected.items():
            assert found[token].logprob == pytest.approx(entry.logprob, abs=1e-4)
            assert found[token].rank == entry.rank


@pytest.mark.parametrize(
    "budget, proposal", [(16, "weaver"), pytest.param(7, "ddtree", marks=pytest.mark.full)]
)
def test_multimodal_wrapper(
    folder: Path, references: list[harness.Reference], budget: int, proposal: str
) -> None:
    """The wrapped demo target, text requests: M-RoPE positions follow the tree's depths."""
    with harness.engine(folder / "wrapped", **TEXT_ONLY) as llm:
        plain = harness.references(llm, [r.prompt for r in references[:2]], 24)
    with harness.engine(folder / "wrapped", **TEXT_ONLY, **harness.trees(budget, proposal)) as llm:
        runner = harness.runner(llm)
        assert type(runner.model).__name__ == "Qwen3_5ForConditionalGeneration"
        assert runner.model_state.rope_state is not None, "no M-RoPE: the test shows nothing"
        harness.assert_identical(plain, harness.greedy(llm, [r.prompt for r in plain], 24))
        oracle.install(runner, plain, [oracle.second_child])
        harness.assert_identical(plain, harness.greedy(llm, [r.prompt for r in plain], 24))
        assert runner.model_state.step.stats.read()["branching_paths"] > 2
