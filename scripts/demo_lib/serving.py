# SPDX-License-Identifier: Apache-2.0
"""The served part of demo.py: a real `vllm serve` with `dflash_tfm`, asked through the `openai` client."""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e.harness import DEMO, MAX_MODEL_LEN, Reference
from tests.e2e.server import START_SECONDS, STOP_SECONDS, Server

from .report import DemoError, Row, say

MODEL = "demo"
Conversation = list[dict[str, str]]


@dataclass
class Answer:
    """Text of an answer; its token ids where it was not streamed, the number of pieces where it was."""

    text: str
    tokens: list[int] = field(default_factory=list)
    pieces: int = 0


class Client:
    """Greedy requests of a fixed number of tokens through the `openai` package."""

    def __init__(self, openai: Any, tokens: int) -> None:
        self._openai = openai
        self._common = {
            "model": MODEL,
            "temperature": 0,
            "max_tokens": tokens,
            "extra_body": {"ignore_eos": True, "return_token_ids": True},
        }

    def completion(self, prompt: str, stream: bool) -> Answer:
        """What follows a text."""
        reply = self._openai.completions.create(prompt=prompt, stream=stream, **self._common)
        if stream:
            return _joined(choice.text for chunk in reply for choice in chunk.choices)
        return Answer(reply.choices[0].text, reply.choices[0].token_ids)

    def chat(self, messages: Conversation, stream: bool) -> Answer:
        """The assistant's next message."""
        reply = self._openai.chat.completions.create(messages=messages, stream=stream, **self._common)
        if stream:
            return _joined(choice.delta.content for chunk in reply for choice in chunk.choices)
        return Answer(reply.choices[0].message.content, reply.choices[0].token_ids)


def _joined(pieces: Iterator[str | None]) -> Answer:
    found = [piece for piece in pieces if piece]
    return Answer("".join(found), pieces=len(found))


def serve(
    speculative_config: dict[str, Any],
    texts: Sequence[tuple[str, Reference]],
    chats: Sequence[tuple[Conversation, Reference]],
    tokens: int,
) -> Row:
    """Start a server, ask it everything, stop it; the table's row. Nothing of it is left, whatever happens.

    Raises DemoError if the server does not start, answer or stop as it should.
    """
    say("server: python -m vllm_weaver.cpu serve scripts/demo_models/target --speculative-config ...")
    options = {
        "--speculative-config": json.dumps(speculative_config),
        "--served-model-name": MODEL,
        "--max-model-len": str(MAX_MODEL_LEN),
        "--max-num-seqs": "4",
    }
    flat = [word for option in options.items() for word in option]
    with tempfile.TemporaryDirectory(prefix="vllm-weaver-demo-") as folder:
        server = Server(Path(folder), DEMO / "target", *flat, "--enforce-eager", VLLM_LOGGING_LEVEL="WARNING")
        try:
            _wait(server)
            row = _ask(server, Client(server.client, tokens), texts, chats)
            _stop(server)
        except Exception:
            say(f"server: the end of its output:\n{server.tail}")
            raise
        finally:
            server.end()
    return row


def _wait(server: Server) -> None:
    start = said = time.monotonic()
    while not server.healthy():
        now = time.monotonic()
        if server.process.poll() is not None:
            raise DemoError(f"the server ended with status {server.process.returncode} while starting")
        if now - start > START_SECONDS:
            raise DemoError(f"the server was not ready within {START_SECONDS:.0f} s")
        if now - said >= 10:
            said = now
            say(f"server: starting, {now - start:.0f} s")
        time.sleep(0.5)
    say(f"server: ready at http://127.0.0.1:{server.port}")


def _ask(
    server: Server,
    client: Client,
    texts: Sequence[tuple[str, Reference]],
    chats: Sequence[tuple[Conversation, Reference]],
) -> Row:
    row = Row("served")
    requests: list[tuple[str, Any, Any, Reference]] = [
        *((f"completion {i}", client.completion, *pair) for i, pair in enumerate(texts)),
        *((f"chat {i}", client.chat, *pair) for i, pair in enumerate(chats)),
    ]
    for name, ask, prompt, reference in requests:
        whole, streamed = ask(prompt, False), ask(prompt, True)
        if whole.text != streamed.text:
            raise DemoError(f"{name}: streamed it is {streamed.text!r}, otherwise {whole.text!r}")
        row.add(name, reference, whole.tokens)
        say(f"server: {name}: {len(whole.tokens)} tokens, the same text in {streamed.pieces} streamed pieces")
    metrics = server.metrics()
    drafts, drafted, accepted = (
        metrics[f"vllm:spec_decode_num_{what}_total"]
        for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    say(f"server: /metrics counts {drafts:.0f} drafts, {drafted:.0f} draft tokens, {accepted:.0f} accepted")
    if not drafts:
        raise DemoError("the server's /metrics count no drafts")
    row.tau = 1 + accepted / drafts
    return row


def _stop(server: Server) -> None:
    server.interrupt()
    try:
        status = server.wait(STOP_SECONDS)
    except AssertionError:
        raise DemoError("the server did not stop after SIGINT and was killed") from None
    if status != 0 or server.living():
        raise DemoError(f"the server did not stop cleanly: status {status}, left {server.living()}")
    say("server: stopped")
