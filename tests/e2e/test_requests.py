# SPDX-License-Identifier: Apache-2.0
"""Requests whose logits depend on the tokens before a row: their trees are chains, their answers the same.

The attention-only target is random and in float32: its answers must be equal, without any allowance for ties.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e import harness, models, oracle

TOKENS = 32
PLAIN = {"dtype": "float32", "skip_tokenizer_init": True, "block_size": 32, "max_num_seqs": 8}
HISTORY: dict[str, dict[str, Any]] = {
    "repetition penalty": {"repetition_penalty": 1.3},
    "presence and frequency penalty": {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    "banned pair": {},
}
# These look at one row alone, and keep their trees; upstream refuses the first two beside speculation.
ROW: dict[str, dict[str, Any]] = {
    "min-p": {"temperature": 0.8, "seed": 1, "min_p": 0.2},
    "logit bias": {"logit_bias": {3: 40.0, 9: 41.0}},
    "allowed ids": {"allowed_token_ids": list(range(20, 60))},
    "greedy": {},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("models")
    models.attention_only(root / "target")
    models.random_draft(root / "draft")
    return root


def run(llm: Any, prompts: list[list[int]], banned: list[int], kinds: list[str]) -> list[harness.Reference]:
    """Answers, one prompt for each kind."""
    from vllm import SamplingParams

    params = []
    for kind in kinds:
        common = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, "detokenize": False}
        given = SamplingParams(**(common | (HISTORY | ROW)[kind]))
        if kind == "banned pair":
            given._bad_words_token_ids = [banned]  # as bad_words become where there is a tokenizer
        params.append(given)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    return [
        harness.Reference(tuple(prompt), tuple(output.outputs[0].token_ids), ())
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def test_answers_are_those_of_plain_decoding(folder: Path) -> None:
    """Drafts come from an oracle, by turns as a chain and behind wrong first children."""
    generator = torch.Generator().manual_seed(7)
    kinds = [*HISTORY, *ROW]
    lengths = [9 + 8 * i for i in range(len(kinds))]
    prompts = [torch.randint(0, models.VOCAB - 1, (n,), generator=generator).tolist() for n in lengths]
    with harness.engine(folder / "target", **PLAIN) as llm:
        # A pair of tokens that plain decoding writes where drafts will have been accepted.
        free = run(llm, prompts[2:3], [], ["greedy"])[0]
        banned = list(free.tokens[8:10])
        expected = run(llm, prompts, banned, kinds)
        plainly = run(llm, prompts, [], ["greedy"] * len(kinds))
    for kind, found, without in zip(kinds, expected, plainly, strict=True):
        assert (found.tokens == without.tokens) == (kind == "greedy"), f"{kind}: the test shows nothing"

    options = PLAIN | harness.trees(16, "ddtree", folder / "draft")
    with harness.engine(folder / "target", **options) as llm:
        runner = harness.runner(llm)
        stats = runner.model_state.step.stats
        oracle.install(runner, expected, [oracle.chain, oracle.second_child])
        assert run(llm, prompts[:3], banned, kinds[:3]) == expected[:3]
        chains = stats.read()
        assert chains["accepted"] > 3 * TOKENS // 3, chains
        assert chains["branching_paths"] == 0, "a path left the first children: that was no chain"
        assert run(llm, prompts, banned, kinds) == expected
        assert stats.read()["branching_paths"] >= len(ROW), "the other requests had no trees"


def test_a_grammar_holds_and_drafts_are_accepted() -> None:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    pattern = "[a-z ]{12,40}"
    params = SamplingParams(
        temperature=0, max_tokens=24, structured_outputs=StructuredOutputsParams(regex=pattern)
    )
    with harness.engine(harness.DEMO / "target", **harness.trees(16)) as llm:
        prompts = harness.demo_prompts(llm.get_tokenizer(), 3)
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        texts = [o.outputs[0] for o in llm.generate(requests, params, use_tqdm=False)]
        stats = harness.runner(llm).model_state.step.stats.read()
    for output in texts:
        whole = re.fullmatch(pattern, output.text)
        assert (
            whole
            if output.finish_reason == "stop"
            else set(output.text) <= set(" abcdefghijklmnopqrstuvwxyz")
        )
    assert stats["accepted"] > 0 and stats["branching_paths"] == 0, stats
