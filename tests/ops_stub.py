# SPDX-License-Identifier: Apache-2.0
"""A stand-in for `vllm serve` in tests: the endpoints that gate and benchmarks use, and faults to order."""

from __future__ import annotations

import contextlib
import json
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """What the server does. `answer` turns a prompt into text; each character is a token, `accepted` of them
    are accepted a step."""

    answer: Callable[[str], str] = lambda prompt: "x" * 12
    model: str = "stub"
    accepted: float | None = 3.0  # a step, without the bonus token; None: no speculation
    prefix_caching: bool = False
    max_model_len: int = 4096
    first_delay: float = 0.0
    step_delay: float = 0.0
    die_after: int | None = None  # pieces of a stream, then the connection breaks and the server is gone
    hang: bool = False
    status: int = 200
    tool_calls: bool = True
    flushes: int = 0
    requests: list[dict[str, Any]] = field(default_factory=list)
    url: str = ""
    counters: dict[str, float] = field(default_factory=lambda: dict.fromkeys(_COUNTERS, 0.0))
    dead: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def count(self, prompt: int, tokens: int) -> None:
        """What a request adds to the counters."""
        with self.lock:
            self.counters["vllm:prompt_tokens_total"] += prompt
            self.counters["vllm:generation_tokens_total"] += tokens
            if self.accepted is not None:
                steps = max(1, round(tokens / (1 + self.accepted)))
                self.counters["vllm:spec_decode_num_drafts_total"] += steps
                self.counters["vllm:spec_decode_num_draft_tokens_total"] += 16 * steps
                self.counters["vllm:spec_decode_num_accepted_tokens_total"] += steps * self.accepted


_COUNTERS = (
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:spec_decode_num_drafts_total",
    "vllm:spec_decode_num_draft_tokens_total",
    "vllm:spec_decode_num_accepted_tokens_total",
)


def _prompt_of(body: dict[str, Any]) -> str:
    return str(body["messages"][-1]["content"] if "messages" in body else body["prompt"])


def _handler(stub: Stub) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *arguments: Any) -> None:
            pass

        def reply(self, content: Any, status: int = 200) -> None:
            text = content if isinstance(content, str) else json.dumps(content)
            self.send_response(status)
            self.send_header("Content-Length", str(len(text.encode())))
            self.end_headers()
            self.wfile.write(text.encode())

        def do_GET(self) -> None:  # noqa: N802
            if stub.dead:
                self.close_connection = True
                return
            if self.path == "/metrics":
                lines = [f'{name}{{engine="0"}} {value}' for name, value in stub.counters.items()]
                lines.append(f'vllm:cache_config_info{{enable_prefix_caching="{stub.prefix_caching}"}} 1.0')
                self.reply("\n".join(lines) + "\n")
            elif self.path == "/v1/models":
                card = {"id": stub.model, "root": "folder", "max_model_len": stub.max_model_len}
                self.reply({"data": [card]})
            elif self.path == "/version":
                self.reply({"version": "0.32.0"})
            else:
                self.reply("", 200 if self.path == "/health" else 404)

        def do_POST(self) -> None:  # noqa: N802
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"] or 0)) or "{}")
            if self.path == "/reset_prefix_cache":
                stub.flushes += 1
                self.reply({"success": True})
            elif self.path == "/tokenize":
                self.reply({"count": len(re.findall(r"\S+", _prompt_of(body)))})
            elif body.get("model") != stub.model:
                self.reply({"error": {"message": f"no model {body.get('model')}"}}, 404)
            elif stub.status != 200:
                self.reply({"error": {"message": "no room"}}, stub.status)
            else:
                stub.requests.append(body)
                self.generate(body)

        def generate(self, body: dict[str, Any]) -> None:
            while stub.hang:
                time.sleep(0.05)
            if len(stub.requests) == 1:
                time.sleep(stub.first_delay)
            prompt, chat = _prompt_of(body), "messages" in body
            text = stub.answer(prompt)
            if body.get("response_format"):
                text = '{"city": "Paris"}'
            text = text[: body.get("max_tokens", 16)]
            tools = stub.tool_calls and body.get("tools")
            ids = [ord(letter) for letter in text]
            usage = {"prompt_tokens": len(prompt.split()), "completion_tokens": len(ids)}
            if not body.get("stream"):
                tops = [{f"token_id:{token}": -0.1, f"token_id:{token + 1}": -0.11} for token in ids]
                choice = {"text": text, "token_ids": ids, "logprobs": {"top_logprobs": tops}}
                stub.count(usage["prompt_tokens"], len(ids))
                self.reply({"choices": [choice], "usage": usage})
                return
            self.send_response(200)
            self.end_headers()
            pieces = [text[at : at + 4] for at in range(0, len(text), 4)]
            for index, piece in enumerate(pieces):
                if stub.die_after is not None and index >= stub.die_after:
                    stub.dead = True
                    self.close_connection = True
                    return
                time.sleep(stub.step_delay)
                choice = {"delta": {"content": piece}} if chat else {"text": piece}
                if tools:
                    function = {"name": tools[0]["function"]["name"], "arguments": '{"city": "Paris"}'}
                    choice = (
                        {"delta": {"tool_calls": [{"index": 0, "function": function}]}} if not index else {}
                    )
                if body.get("return_token_ids"):
                    choice["token_ids"] = [ord(letter) for letter in piece]
                self.event({"choices": [choice]})
            self.event({"choices": [{"finish_reason": "stop"}]})
            self.event({"choices": [], "usage": usage})
            stub.count(usage["prompt_tokens"], len(ids))
            self.wfile.write(b"data: [DONE]\n\n")

        def event(self, content: dict[str, Any]) -> None:
            self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())
            self.wfile.flush()

    return Handler


def main() -> None:
    """`python -m tests.ops_stub PORT BUDGET`: a server whose best budget is 4, until it is interrupted."""
    port, budget = map(int, sys.argv[1:])
    accepted = {0: None, 2: 1.0, 4: 3.0}[budget]
    delay = {0: 0.04, 2: 0.04, 4: 0.003}[budget]
    stub = Stub(lambda prompt: "x" * 16, accepted=accepted, step_delay=delay)
    server = ThreadingHTTPServer(("127.0.0.1", port), _handler(stub))
    with contextlib.suppress(KeyboardInterrupt):
        server.serve_forever(0.02)


@contextlib.contextmanager
def serving(stub: Stub) -> Iterator[Stub]:
    """The stub on a free port, its `url` set."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(stub))
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    stub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield stub
    finally:
        stub.hang = False
        server.shutdown()
        server.server_close()


if __name__ == "__main__":
    main()
