# SPDX-License-Identifier: Apache-2.0
"""The bundled demo models fit together and show what they are for; their training is reproducible."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

from vllm_weaver import cpu
from vllm_weaver.spec_decode.tree import Tree
from vllm_weaver.spec_decode.weaver_checkpoint import load_weaver, resolve_weaver

if not torch.cuda.is_available():
    cpu.prepare()  # transformers fails to import beside media packages that were built for CUDA

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"
MODELS = SCRIPTS / "demo_models"
sys.path.insert(0, str(SCRIPTS))

import train_demo  # noqa: E402
from demo_lib import corpus, evaluate  # noqa: E402
from demo_lib.draft import DFlashDraft, load_draft  # noqa: E402
from demo_lib.target import greedy_continuations, loop_share, target_features  # noqa: E402
from transformers import AutoTokenizer, Qwen3_5ForCausalLM  # noqa: E402


def read(name: str) -> Any:
    return json.loads((MODELS / name).read_text())


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODELS / "target")


@pytest.fixture(scope="module")
def target() -> Qwen3_5ForCausalLM:
    return Qwen3_5ForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()


# --- the bundle ------------------------------------------------------------------------------------------


def test_bundle_is_small() -> None:
    assert sum(p.stat().st_size for p in MODELS.rglob("*") if p.is_file()) < 7.5 * 2**20


@pytest.mark.parametrize(
    "text", ["def f(x):\n    return x  # ½ π 漢字\n", "  two  spaces\t\r\n\n", "", "\x00\x7f", "a<|b|>c"]
)
def test_tokenizer_gives_the_text_back(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_tokenizer_special_tokens_and_chat(tokenizer: Any) -> None:
    assert tokenizer.convert_tokens_to_ids(corpus.SPECIAL_TOKENS) == [0, 1, 2, 3]
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 0
    messages = [{"role": "user", "content": "What is io?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat == "<|im_start|>user\nWhat is io?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat)["input_ids"].count(1) == 2


def test_configs_agree(tokenizer: Any) -> None:
    target, draft = read("target/config.json"), read("draft/config.json")
    weaver = load_weaver(resolve_weaver(str(MODELS / "weaver"))).config
    assert target["vocab_size"] == draft["vocab_size"] == len(tokenizer)
    assert target["hidden_size"] == draft["hidden_size"] == weaver.d_model == weaver.d_embed
    assert target["num_hidden_layers"] == draft["num_target_layers"]
    assert max(draft["dflash_config"]["target_layer_ids"]) < target["num_hidden_layers"]
    assert draft["dflash_config"]["mask_token_id"] == tokenizer.convert_tokens_to_ids(corpus.MASK)
    assert draft["block_size"] - 1 == weaver.K
    assert weaver.candidate_pool_size <= target["vocab_size"]


def test_target_is_a_hybrid_that_cpu_kernels_take() -> None:
    config = read("target/config.json")
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]
    assert config["linear_key_head_dim"] == config["linear_value_head_dim"] == 128
    assert config["linear_num_value_heads"] == 2 * config["linear_num_key_heads"]


@pytest.mark.parametrize("name", ["target/model", "draft/model", "weaver/weaver"])
def test_weights_are_finite_bfloat16(name: str) -> None:
    with safe_open(MODELS / f"{name}.safetensors", framework="pt") as file:
        tensors = [file.get_tensor(key) for key in file.keys()]  # noqa: SIM118 (not a mapping)
    assert {t.dtype for t in tensors} == {torch.bfloat16}
    assert all(t.isfinite().all() for t in tensors)


def test_prompts_have_the_promised_lengths(tokenizer: Any) -> None:
    prompts = read("prompts.json")
    assert len(set(prompts["text"])) == 16 and len(prompts["chat"]) == 2
    assert all(20 <= len(tokenizer(t)["input_ids"]) <= 60 for t in prompts["text"])
    assert all(m["role"] == "user" for chat in prompts["chat"] for m in chat)


def test_trees_matter_on_held_out_prompts(tokenizer: Any, target: Qwen3_5ForCausalLM) -> None:
    """Greedy texts do not loop, and the accepted lengths are ordered 1 < chain < weaver, with branching."""
    ids = [tokenizer(t)["input_ids"][:20] for t in read("prompts.json")["text"]]
    texts = greedy_continuations(target, torch.tensor(ids), 64)
    assert loop_share(texts[:, 20:]) == 0
    head = load_weaver(resolve_weaver(str(MODELS / "weaver")), dtype=torch.float32)
    scores = evaluate.evaluate(target, load_draft(MODELS / "draft"), head, texts, prompt=20, budget=16)
    assert 1.1 < scores["chain"].tau < scores["ddtree"].tau < scores["weaver"].tau
    assert scores["weaver"].tau > scores["chain"].tau + 0.3
    assert scores["weaver"].branching > 0.25


# --- the parts of the training ---------------------------------------------------------------------------


def test_draft_block_reads_only_what_serving_gives_it(target: Qwen3_5ForCausalLM) -> None:
    """A block equals the one of a text that ends at its anchor, alone in its batch."""
    draft = load_draft(MODELS / "draft")
    embedding = target.model.embed_tokens.weight.detach()
    tokens = torch.randint(4, 1024, (2, 30), generator=torch.Generator().manual_seed(0))
    anchors = torch.tensor([[3, 9, 21], [1, 10, 22]])
    features, _ = target_features(target, tokens, draft.layer_ids)
    together = draft(embedding, features, tokens, anchors)
    for row in range(2):
        for index, anchor in enumerate(anchors[row].tolist()):
            cut = tokens[row : row + 1, : anchor + 1]
            alone = draft(
                embedding, target_features(target, cut, draft.layer_ids)[0], cut, torch.tensor([[anchor]])
            )
            torch.testing.assert_close(together[row, index], alone[0, 0], atol=2e-4, rtol=2e-4)


def test_accepted_counts_the_matching_path_and_its_branching() -> None:
    #        0
    #      1   2      token 10 + node; the true text is 10, 12, 14: node 2 is its parent's second child
    #      3   4
    tree = Tree.empty(2, 6, "cpu")
    tree.tokens[:, :5] = torch.tensor([10, 11, 12, 13, 14])
    tree.parents[:, :5] = torch.tensor([-1, 0, 0, 1, 2], dtype=torch.int32)
    tree.depths[:, :5] = torch.tensor([0, 1, 1, 2, 2], dtype=torch.int32)
    tree.num_nodes[:] = 5
    truth = torch.tensor([[10, 12, 14, 9], [10, 11, 14, 9]])
    counts, branches = evaluate.accepted(tree, truth)
    assert counts.tolist() == [2, 1]
    assert branches.tolist() == [True, False]


def test_walk_visits_what_decoding_would_visit() -> None:
    counts, branches = torch.tensor([[2, 5, 5, 0, 1]]), torch.tensor([[True, False, False, False, False]])
    score = evaluate._walk(counts, branches)  # positions 0, 3, 4: 3 + 1 + 2 tokens
    assert (score.steps, score.tau, score.branching) == (3, 2.0, 0.5)


def test_looping_text_is_recognised() -> None:
    loop, text = torch.arange(4).repeat(16), torch.arange(64)
    assert loop_share(torch.stack((loop, text))) == 0.5


def tiny_run(documents: list[corpus.Document]) -> dict[str, torch.Tensor]:
    """All weights of the three models after a few steps at tiny sizes."""
    settings = train_demo.Settings(
        vocab_size=300,
        hidden=32,
        target_intermediate=32,
        draft_layers=1,
        draft_intermediate=32,
        weaver_rank=32,
        weaver_mlp=32,
        pool=16,
        window=24,
        target_batch=2,
        target_steps=2,
        prompt=8,
        new_tokens=16,
        texts=4,
        draft_steps=2,
        draft_batch=2,
        weaver_steps=2,
        weaver_batch=2,
        anchors=2,
    )
    tokenizer = corpus.train_tokenizer(documents, settings.vocab_size)
    target = train_demo.make_target(settings, documents, tokenizer, torch.device("cpu")).float()
    texts = train_demo.make_texts(
        settings, documents, tokenizer, target, ("train", "prompts"), settings.texts
    )
    draft = train_demo.make_draft(settings, tokenizer, target, texts)
    head = train_demo.make_weaver(settings, target, draft, texts)
    models = {"target": target, "draft": draft, "weaver": head}
    return {f"{m}.{k}": v for m, model in models.items() for k, v in model.state_dict().items()}


def test_same_seed_gives_the_same_weights() -> None:
    words = "a tree of tokens is a list of nodes whose parents come first "
    parts = ["train", "train", "prompts", "held_out"]
    documents = [corpus.Document(f"m{i}", words * (i + 2), part) for i, part in enumerate(parts)]
    first, second = tiny_run(documents), tiny_run(documents)
    assert all(torch.equal(first[name], second[name]) for name in first)
    fresh = DFlashDraft(read("draft/config.json")).state_dict()
    assert not torch.equal(first["draft.norm.weight"], torch.ones(32))  # it did learn something
    assert set(fresh) >= {k.removeprefix("draft.") for k in first if k.startswith("draft.")}
    assert first["weaver.lm_head_query_in.weight"].abs().max() > 0


def test_documents_are_split_by_source_and_unique() -> None:
    documents = corpus.read_documents()
    assert {d.part for d in documents} == {"train", "prompts", "held_out"}
    assert len({d.text for d in documents}) == len(documents) > 1000
    topics = {d.title: d.part for d in documents if d.title.startswith("the topic ")}
    assert all(part == corpus.part_of(title.removeprefix("the ")) for title, part in topics.items())
