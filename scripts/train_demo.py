#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Train the demo models in one command: a tiny Qwen3.5-style hybrid target, a DFlash draft, a Weaver head.

    python scripts/train_demo.py --out scripts/demo_models

The text is the documentation inside the Python installation that runs this (see `demo_lib/corpus.py`), so the
result depends on its version; `training.json` beside the models records it. The stages: tokenizer, target on
the text, greedy texts of the target, draft and Weaver on those, prompts, evaluation on held-out text. A stage
whose files the folder already holds is not repeated. Seeds are fixed; on one machine and one set of versions
the same weights come out, on a GPU up to the order of additions. An H200 takes six minutes, most of it for
the target; a CPU is enough for a trial with fewer steps (`--set target_steps=200` and so on).
"""

import argparse
import json
import logging
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package itself, installed or not

from vllm_weaver import cpu

if not torch.cuda.is_available():
    cpu.prepare()  # transformers fails to import beside media packages that were built for CUDA

import transformers
from demo_lib.corpus import (
    CHAT_END,
    END,
    MASK,
    Document,
    Prompt,
    encode_part,
    fingerprint,
    held_out_prompts,
    read_documents,
    sample_windows,
    train_tokenizer,
)
from demo_lib.draft import DFlashDraft, draft_config, load_draft, save_draft, train_draft
from demo_lib.evaluate import evaluate
from demo_lib.target import greedy_continuations, loop_share, smallest_gaps, target_config, train_target
from demo_lib.weaver import train_weaver
from transformers import PreTrainedTokenizerFast, Qwen3_5ForCausalLM

from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
from vllm_weaver.spec_decode.weaver_checkpoint import load_weaver, save_weaver

log = logging.getLogger("train_demo")


@dataclass(frozen=True)
class Settings:
    """Sizes of the models and of their training; the defaults make the bundled ones."""

    vocab_size: int = 1024
    hidden: int = 192
    target_intermediate: int = 576
    draft_layers: int = 2
    draft_intermediate: int = 384
    target_layer_ids: tuple[int, ...] = (1, 2, 3)
    weaver_rank: int = 128
    weaver_mlp: int = 256
    pool: int = 64
    window: int = 256
    target_batch: int = 128
    target_steps: int = 3000
    prompt: int = 32
    new_tokens: int = 160
    texts: int = 8192
    text_batch: int = 2048
    draft_steps: int = 2200
    draft_batch: int = 256
    weaver_steps: int = 1000
    weaver_batch: int = 64
    anchors: int = 16
    eval_texts: int = 64
    budget: int = 16
    seed: int = 0


def seeded(settings: Settings, stage: int) -> int:
    """Seed of a stage; also seeds torch, which initialises that stage's weights."""
    seed = 1000 * settings.seed + stage
    torch.manual_seed(seed)
    return seed


def make_target(
    settings: Settings, documents: list[Document], tokenizer: PreTrainedTokenizerFast, device: torch.device
) -> Qwen3_5ForCausalLM:
    """The trained target in bfloat16."""
    seed = seeded(settings, 1)
    stream = encode_part(documents, "train", tokenizer, seed)
    config = target_config(settings.vocab_size, settings.hidden, settings.target_intermediate)
    model = Qwen3_5ForCausalLM(config).to(device)
    loss = train_target(
        model,
        stream.to(device),
        steps=settings.target_steps,
        batch=settings.target_batch,
        length=settings.window,
        rate=2e-3,
        seed=seed,
    )
    log.info("target: %d training tokens, final loss %.3f", stream.numel(), loss)
    model.generation_config.eos_token_id = tokenizer.convert_tokens_to_ids([END, CHAT_END])
    return model.to(torch.bfloat16)


def make_texts(
    settings: Settings,
    documents: list[Document],
    tokenizer: PreTrainedTokenizerFast,
    target: Qwen3_5ForCausalLM,
    parts: tuple[str, ...],
    count: int,
) -> torch.Tensor:
    """Greedy texts [count, prompt + new_tokens] after windows of documents of `parts`, in equal shares."""
    seed = seeded(settings, 2)
    generator = torch.Generator().manual_seed(seed)
    prompts = torch.cat(
        [
            sample_windows(
                encode_part(documents, p, tokenizer, seed), count // len(parts), settings.prompt, generator
            )
            for p in parts
        ]
    ).to(target.device)
    return torch.cat(
        [greedy_continuations(target, p, settings.new_tokens) for p in prompts.split(settings.text_batch)]
    )


def make_draft(
    settings: Settings, tokenizer: PreTrainedTokenizerFast, target: Qwen3_5ForCausalLM, texts: torch.Tensor
) -> DFlashDraft:
    """The trained draft in float32."""
    seed = seeded(settings, 3)
    draft = DFlashDraft(
        draft_config(
            target.config.to_dict(),
            layers=settings.draft_layers,
            intermediate=settings.draft_intermediate,
            target_layer_ids=list(settings.target_layer_ids),
            mask_token=tokenizer.convert_tokens_to_ids(MASK),
        )
    ).to(target.device)
    train_draft(
        draft,
        target,
        texts,
        prompt=settings.prompt,
        steps=settings.draft_steps,
        batch=settings.draft_batch,
        anchors=settings.anchors,
        rate=3e-3,
        seed=seed,
    )
    return draft


def make_weaver(
    settings: Settings, target: Qwen3_5ForCausalLM, draft: DFlashDraft, texts: torch.Tensor
) -> WeaverHead:
    """The trained Weaver head in float32."""
    seed = seeded(settings, 4)
    config = WeaverConfig(
        d_model=settings.hidden,
        d_embed=settings.hidden,
        d_rank=settings.weaver_rank,
        num_layers=1,
        num_heads=4,
        mlp_dim=settings.weaver_mlp,
        K=draft.block - 1,
        candidate_pool_size=settings.pool,
    )
    head = WeaverHead(config).to(target.device)
    train_weaver(
        head,
        target,
        draft,
        texts,
        prompt=settings.prompt,
        steps=settings.weaver_steps,
        batch=settings.weaver_batch,
        anchors=settings.anchors,
        rate=2e-3,
        seed=seed,
    )
    return head


def most_decided(
    prompts: list[Prompt], ids: list[list[int]], target: Qwen3_5ForCausalLM, count: int
) -> list[Prompt]:
    """The `count` prompts (token `ids`) after which 128 tokens of greedy text stay furthest from any tie.

    A tie of two logits may fall either way with the order of additions, so a text with one is no test of
    whether two runtimes agree. One prompt a document and three a package at most; loops come last.
    """
    same_length: dict[int, list[int]] = {}
    for index, tokens in enumerate(ids):
        same_length.setdefault(len(tokens), []).append(index)
    merit = [0.0] * len(prompts)
    for length, members in same_length.items():
        given = torch.tensor([ids[i] for i in members], device=target.device)
        texts = greedy_continuations(target, given, 128)
        gaps = smallest_gaps(target, texts, length).tolist()
        for index, text, gap in zip(members, texts, gaps, strict=True):
            merit[index] = gap - 100 * loop_share(text[None, length:])
    chosen: list[Prompt] = []
    for index in sorted(range(len(prompts)), key=lambda i: -merit[i]):
        prompt = prompts[index]
        fresh = all(c.title != prompt.title for c in chosen)
        if fresh and sum(c.package == prompt.package for c in chosen) < 3 and len(chosen) < count:
            chosen.append(prompt)
            log.info("prompt with smallest gap %.2f: %r", merit[index], prompt.text)
    return chosen


def save_prompts(
    settings: Settings,
    documents: list[Document],
    tokenizer: PreTrainedTokenizerFast,
    target: Qwen3_5ForCausalLM,
    out: Path,
) -> None:
    """prompts.json: `text`, 16 held-out beginnings, and `chat`, 2 held-out conversations of one message."""
    texts, questions = held_out_prompts(documents, tokenizer, seeded(settings, 5))
    chats = [[{"role": "user", "content": q.text}] for q in questions]
    chat_ids = [
        tokenizer(tokenizer.apply_chat_template(c, tokenize=False, add_generation_prompt=True))["input_ids"]
        for c in chats
    ]
    kept = most_decided(texts, [tokenizer(t.text)["input_ids"] for t in texts], target, 16)
    kept_chats = most_decided(questions, chat_ids, target, 2)
    content = {
        "text": [p.text for p in kept],
        "chat": [[{"role": "user", "content": p.text}] for p in kept_chats],
    }
    (out / "prompts.json").write_text(json.dumps(content, indent=1) + "\n")


def run(settings: Settings, out: Path, device: torch.device) -> dict[str, object]:
    """Train what the folder `out` lacks, evaluate all of it; returns what training.json holds.

    Every stage starts from the files of the stages before it, so an interrupted run continues to the same
    result.
    """
    start = time.monotonic()
    documents = read_documents()
    if not (out / "target").exists():
        tokenizer = train_tokenizer(documents, settings.vocab_size)
        make_target(settings, documents, tokenizer, device).save_pretrained(out / "target")
        tokenizer.save_pretrained(out / "target", save_jinja_files=False)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out / "target")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32  # bfloat16 is slow on a CPU
    target = Qwen3_5ForCausalLM.from_pretrained(out / "target", dtype=dtype).to(device).requires_grad_(False)
    texts = make_texts(settings, documents, tokenizer, target, ("train", "prompts"), settings.texts)
    unseen = make_texts(settings, documents, tokenizer, target, ("held_out",), settings.eval_texts)
    loops = loop_share(unseen[:, settings.prompt :])
    log.info("greedy texts: %d made, %.0f %% of the held-out ones loop", len(texts), 100 * loops)
    if not (out / "draft").exists():
        save_draft(make_draft(settings, tokenizer, target, texts), out / "draft")
    draft = load_draft(out / "draft").to(device)
    weaver = out / "weaver" / "weaver.safetensors"
    if not weaver.exists():
        weaver.parent.mkdir(exist_ok=True)
        save_weaver(make_weaver(settings, target, draft, texts).cpu().to(torch.bfloat16), weaver)
    head = load_weaver(weaver, dtype=torch.float32, device=device)
    if not (out / "prompts.json").exists():
        save_prompts(settings, documents, tokenizer, target, out)
    scores = evaluate(target, draft, head, unseen, prompt=settings.prompt, budget=settings.budget)
    print(f"{'drafts':8} {'budget':>6} {'tau':>6} {'branching paths':>16}")
    for name, score in scores.items():
        nodes = draft.block - 1 if name == "chain" else settings.budget
        print(f"{name:8} {nodes:6d} {score.tau:6.2f} {score.branching:15.0%}")
    report: dict[str, object] = {
        "settings": asdict(settings),
        "corpus_sha256": fingerprint(documents),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "held_out_loop_share": loops,
        "held_out": {name: asdict(score) for name, score in scores.items()},
        "seconds": round(time.monotonic() - start),
    }
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for target/, draft/, weaver/, prompts.json"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument(
        "--set", action="append", default=[], metavar="NAME=NUMBER", help="change one of Settings"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    changed = {name: int(value) for name, _, value in (item.partition("=") for item in arguments.set)}
    run(Settings(**changed), arguments.out, torch.device(arguments.device))


if __name__ == "__main__":
    main()
