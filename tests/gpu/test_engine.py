# SPDX-License-Identifier: Apache-2.0
"""dflash_tfm in a real vLLM engine on a GPU, eager and in graphs: losslessness, siblings, no host sync."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_lib.shapes import SHAPES, write_models  # noqa: E402

from tests.e2e import following, harness, oracle  # noqa: E402  (the environment comes first)
from vllm_weaver import plugin  # noqa: E402

GPU = harness.GPU | {"max_num_seqs": 8}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {
        "enforce_eager": False,
        "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    },
}


@contextlib.contextmanager
def engine(mode: str, model: str | Path = harness.DEMO / "target", **options: Any) -> Iterator[Any]:
    """An engine on the GPU; `replays` on its runner counts whole graphs of the target and of the draft."""
    plugin.register()  # where the package is not installed there is no entry point
    with harness.engine(model, **(GPU | MODES[mode] | options)) as llm:
        runner = harness.runner(llm)
        runner.replays = harness.count_replays(runner)
        yield llm


@functools.cache
def references(cache_dtype: str, count: int, tokens: int) -> list[harness.Reference]:
    with engine("graphs", kv_cache_dtype=cache_dtype, max_model_len=2048) as llm:
        return harness.references(llm, harness.demo_prompts(llm.get_tokenizer(), count), tokens)


def compare(mode: str, plain: list[harness.Reference], batch: int, tokens: int, **options: Any) -> None:
    """Decodes the prompts with trees, `batch` at a time: plain decoding's tokens, and graphs where wanted."""
    with engine(mode, max_model_len=2048, **options) as llm:
        outputs = []
        for at in range(0, len(plain), batch):
            outputs += harness.greedy(llm, [r.prompt for r in plain[at : at + batch]], tokens)
        runner = harness.runner(llm)
        stats = runner.model_state.step.stats.read()
        print(f"tau {1 + stats['accepted'] / stats['verifies']:.2f}, {stats}, replays {runner.replays}")
        steps = stats["verifies"] / batch
        if mode == "graphs":
            assert min(runner.replays.values()) > 0.5 * steps, "decode steps did not replay their graphs"
        else:
            assert not any(runner.replays.values())
    assert stats["accepted"] > 0
    harness.assert_identical(plain, outputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("proposal, budget, batch", [("weaver", 16, 4), ("ddtree", 33, 8), ("chain", 7, 1)])
def test_greedy_is_plain_decoding(
    proposal: str, budget: int, batch: int, cache_dtype: str, mode: str
) -> None:
    options = harness.trees(budget, proposal) | {"long_prefill_token_threshold": 2 * budget}
    compare(mode, references(cache_dtype, 8, 128), batch, 128, kv_cache_dtype=cache_dtype, **options)


@pytest.mark.parametrize("cache_dtype", ["auto", "fp8"])
def test_long_runs_cross_pages(cache_dtype: str) -> None:
    with engine("graphs", kv_cache_dtype=cache_dtype, max_model_len=2048) as llm:
        plain = harness.references(llm, harness.demo_prompts(llm.get_tokenizer(), 4), 1900)
        noise = following.own_noise(llm, plain)
    with engine("graphs", kv_cache_dtype=cache_dtype, max_model_len=2048, **harness.trees(32)) as llm:
        ties = following.follow(llm, plain)
        stats = harness.runner(llm).model_state.step.stats.read()
        assert min(harness.runner(llm).replays.values()) > 0.2 * stats["verifies"] / len(plain)
    assert stats["branching_paths"] > 100, stats
    following.assert_near_ties(ties, noise, sum(len(r.tokens) for r in plain))


def use_oracle(runner: Any, plain: list[harness.Reference], mode: str) -> None:
    """Winding trees in turns with wrong ones."""
    if mode == "graphs":  # the oracle proposes on the host: only the target's steps can be graphs
        runner.speculator.query_cudagraph_manager._graphs_captured = False
    oracle.install(runner, plain, [oracle.second_child, oracle.wrong, oracle.late])


@pytest.mark.parametrize("mode", MODES)
def test_winding_paths(mode: str) -> None:
    plain = references("auto", 8, 128)
    with engine(mode, **harness.trees(16, "chain")) as llm:
        use_oracle(harness.runner(llm), plain, mode)
        outputs = harness.greedy(llm, [r.prompt for r in plain], 128)
        stats = harness.runner(llm).model_state.step.stats.read()
    assert stats["branching_paths"] > 20, stats
    harness.assert_identical(plain, outputs)


def test_prefix_hits_on_a_hybrid() -> None:
    """The second time most of a prompt comes from the cache, recurrent states included."""
    with engine("graphs", max_model_len=2048) as llm:
        text = [token for prompt in harness.demo_prompts(llm.get_tokenizer()) for token in prompt]
        plain = harness.references(llm, [text[:600], text[20:]], 64)
        noise = following.own_noise(llm, plain)
    with engine("graphs", max_model_len=2048, enable_prefix_caching=True, **harness.trees(16)) as llm:
        for _ in range(2):
            following.assert_near_ties(following.follow(llm, plain), noise, sum(len(r.tokens) for r in plain))
        counters = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
    assert counters["vllm:prefix_cache_hits"] >= 512


def test_traversal_in_graphs() -> None:
    """Greedy requests give plain decoding's text; sampled ones between them repeat theirs by seed."""
    from vllm import SamplingParams

    plain = references("auto", 8, 128)
    prompts = [{"prompt_token_ids": list(reference.prompt)} for reference in plain]
    common = {"max_tokens": 128, "ignore_eos": True, "detokenize": False}
    sampling = [SamplingParams(temperature=0.8 * (i % 2), seed=i, **common) for i in range(len(plain))]
    with engine("graphs", max_model_len=2048, **harness.trees(16, tree_verify="traversal")) as llm:
        runs = [
            [output.outputs[0] for output in llm.generate(prompts, sampling, use_tqdm=False)]
            for _ in range(2)
        ]
        runner = harness.runner(llm)
        stats = runner.model_state.step.stats.read()
    assert stats["accepted"] > 100 and stats["branching_paths"] > 10, stats
    assert min(runner.replays.values()) > 0.5 * stats["verifies"] / len(plain)
    harness.assert_identical(plain[::2], runs[0][::2])
    first, second = ([list(output.token_ids) for output in run[1::2]] for run in runs)
    assert first == second


def test_a_steady_step_does_not_wait_for_the_device() -> None:
    """torch raises at any operation that synchronises, in every step but the first ones of a run."""
    plain = references("auto", 8, 128)
    with engine("graphs", **harness.trees(16)) as llm:
        harness.greedy(llm, [r.prompt for r in plain], 32)
        runner = harness.runner(llm)
        watched = {"steps": 0}

        def strict(run: Any, *args: Any, **kwargs: Any) -> Any:
            watched["steps"] += 1
            steady = 12 < watched["steps"] < 60
            torch.cuda.set_sync_debug_mode("error" if steady else "default")
            try:
                return run(*args, **kwargs)
            finally:
                torch.cuda.set_sync_debug_mode("default")

        runner.execute_model = functools.partial(strict, runner.execute_model)
        runner.sample_tokens = functools.partial(strict, runner.sample_tokens)
        outputs = harness.greedy(llm, [r.prompt for r in plain], 128)
    assert watched["steps"] > 60
    harness.assert_identical(plain, outputs)


def randomize(model: torch.nn.Module, scale: float) -> None:
    """Normal weights that depend on nothing but their names' order; norms stay as dummy loading made them."""
    generator = torch.Generator(model.lm_head.weight.device).manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.ndim >= 2:
            parameter.data.normal_(0, scale / parameter.shape[-1] ** 0.5, generator=generator)


RANDOM: dict[str, Any] = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "gpu_memory_utilization": 0.1,
    "max_model_len": 3072,
}


@pytest.fixture(scope="module")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("2b"), SHAPES["2b"])


@functools.cache
def random_references(target: Path, cache_dtype: str) -> tuple[list[harness.Reference], tuple[float, int]]:
    """Eight prompts of 100 to 359 tokens, 2,000 tokens each, and plain decoding's own noise."""
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(1000, 100_000, (100 + 37 * i,), generator=generator).tolist() for i in range(8)]
    with engine("graphs", target, kv_cache_dtype=cache_dtype, **RANDOM) as llm:
        randomize(harness.runner(llm).model, 1.0)
        plain = harness.references(llm, prompts, 2000)
        return plain, following.own_noise(llm, plain)


@pytest.mark.parametrize("mode, cache_dtype, batch, drafts", [
    ("graphs", "auto", 1, "own"), ("graphs", "auto", 8, "own"), ("graphs", "auto", 4, "oracle"),
    ("graphs", "fp8", 8, "oracle"), ("eager", "auto", 8, "oracle"), ("eager", "fp8", 4, "oracle"),
])  # fmt: skip
def test_random_hybrid_of_two_billion(
    random_models: dict[str, Path], mode: str, cache_dtype: str, batch: int, drafts: str
) -> None:
    """Near-ties are common in random weights: every divergence must be one. Nearly no draft of a random draft
    model is accepted, and nearly every one of the oracle."""
    plain, noise = random_references(random_models["target"], cache_dtype)
    plain = plain[:batch]
    config = {"method": "dflash_tfm", "model": str(random_models["draft"]), "num_speculative_tokens": 32}
    config["weaver"] = str(random_models["weaver"])
    options = RANDOM | {"kv_cache_dtype": cache_dtype, "speculative_config": config}
    with engine(mode, random_models["target"], **options) as llm:
        runner = harness.runner(llm)
        randomize(runner.model, 1.0)
        if drafts == "oracle":
            use_oracle(runner, plain, mode)
        ties = following.follow(llm, plain)
        stats = runner.model_state.step.stats.read()
        print(f"{mode}, {cache_dtype}, batch {batch}, {drafts}: {stats}, replays {runner.replays}")
        assert mode == "eager" or runner.replays["target"] > 0.2 * stats["verifies"] / batch
    assert drafts == "own" or stats["accepted"] > stats["verifies"], stats
    following.assert_near_ties(ties, noise, 2000 * batch)
