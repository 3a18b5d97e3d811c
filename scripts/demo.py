#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Demo on a machine without a GPU: tree speculative decoding beside plain decoding, then a server.

    bash scripts/demo.sh

Decodes held-out prompts plainly and with every proposal in this process, serves the model with `dflash_tfm`
and talks to it. Ends with a table and `demo: ok`, or `demo: FAILED:` and one reason.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `tests`: the demo compares as the tests do

from demo_lib.report import DemoError, Row, check, print_table, say
from demo_lib.serving import Conversation, serve

from tests.e2e.harness import DEMO, TOP, Reference, engine, greedy, runner, trees
from vllm_weaver import cpu

# Threads that share two cores wait for each other: one is five times as fast on such a machine.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
PROPOSALS = ("chain", "ddtree", "weaver")
BUDGET = 16
BATCH = 4
SERVED_TEXTS = 2


def decode(llm: Any, name: str, prompts: Sequence[Sequence[int]], tokens: int, **params: Any) -> list[Any]:
    """Greedy completions, a batch at a time."""
    done: list[Any] = []
    for at in range(0, len(prompts), BATCH):
        done += greedy(llm, prompts[at : at + BATCH], tokens, **params)
        say(f"{name}: {len(done)} of {len(prompts)} prompts, {sum(len(o.token_ids) for o in done)} tokens")
    return done


def plain_decoding(texts: Sequence[str], chats: Sequence[Conversation], tokens: int) -> list[Reference]:
    """What plain decoding says after each text, and then after each conversation."""
    with engine(DEMO / "target", max_num_seqs=BATCH, use_tqdm_on_load=False) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = [tokenizer.encode(text) for text in texts]
        for chat in chats:
            prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
        outputs = decode(llm, "plain", prompts, tokens, logprobs=TOP)
    return [
        Reference(
            tuple(prompt),
            tuple(output.token_ids),
            tuple({token: entry.logprob for token, entry in step.items()} for step in output.logprobs),
        )
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def tree_decoding(proposal: str, references: Sequence[Reference], tokens: int) -> Row:
    """The table's row of one proposal: the prompts of `references`, decoded with it."""
    options = trees(BUDGET, proposal)
    with engine(DEMO / "target", max_num_seqs=BATCH, use_tqdm_on_load=False, **options) as llm:
        outputs = decode(llm, proposal, [r.prompt for r in references], tokens)
        stats = runner(llm).model_state.step.stats.read()
    row = Row(proposal)
    for index, (reference, output) in enumerate(zip(references, outputs, strict=True)):
        row.add(f"prompt {index}", reference, output.token_ids)
    row.tau = 1 + stats["accepted"] / max(1, stats["verifies"])
    row.branching = stats["branching_paths"] / max(1, stats["nonempty_paths"])
    return row


def demo(count: int, tokens: int) -> None:
    """All of it: `count` prompts, `tokens` tokens after each. DemoError at the first broken promise."""
    prompts = json.loads((DEMO / "prompts.json").read_text())
    texts, chats = prompts["text"][:count], prompts["chat"]
    say("loading vLLM")
    cpu.prepare()
    references = plain_decoding(texts, chats, tokens)
    text_references, chat_references = references[: len(texts)], references[len(texts) :]
    plain = Row("plain")
    for index, reference in enumerate(text_references):
        plain.add(f"prompt {index}", reference, reference.tokens)
    rows = {"plain": plain}
    for proposal in PROPOSALS:
        rows[proposal] = tree_decoding(proposal, text_references, tokens)
    rows["served"] = serve(
        trees(BUDGET)["speculative_config"],
        list(zip(texts, text_references, strict=True))[:SERVED_TEXTS],
        list(zip(chats, chat_references, strict=True)),
        tokens,
    )
    print_table(list(rows.values()))
    check(rows)


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=12, help="held-out prompts, 2 to 16 (default 12)")
    parser.add_argument("--tokens", type=int, default=64, help="tokens after each, 8 to 256 (default 64)")
    arguments = parser.parse_args()
    if not (2 <= arguments.prompts <= 16 and 8 <= arguments.tokens <= 256):
        parser.error("--prompts must be 2 to 16, --tokens 8 to 256")
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # an orderly end, as with Ctrl-C
    try:
        demo(arguments.prompts, arguments.tokens)
    except KeyboardInterrupt:
        print("demo: FAILED: interrupted", flush=True)
        return 130
    except DemoError as error:
        print(f"demo: FAILED: {error}", flush=True)
        return 1
    except Exception as error:
        traceback.print_exc()
        print(f"demo: FAILED: {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        return 1
    print("demo: ok", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
