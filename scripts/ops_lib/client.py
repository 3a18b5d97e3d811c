# SPDX-License-Identifier: Apache-2.0
"""A running server as gate and benchmarks see it: streamed requests with their times, and /metrics."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts_total",
    "nodes": "vllm:spec_decode_num_draft_tokens_total",
    "accepted": "vllm:spec_decode_num_accepted_tokens_total",
    "generated": "vllm:generation_tokens_total",
    "prompt": "vllm:prompt_tokens_total",
}
SETTLE_SECONDS = 3.0


class ServerError(Exception):
    """A request that did not succeed; the message is one clause for the user."""


@dataclass
class Answer:
    """One answer. Seconds since the request was sent; `tokens` as the server counts them, 0 if unknown."""

    text: str = ""
    tokens: int = 0
    prompt_tokens: int = 0
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    finish: str | None = None
    first_seconds: float = 0.0
    seconds: float = 0.0
    pieces: int = 0


class Server:
    """An OpenAI-compatible server of vLLM at `url` (without `/v1`)."""

    def __init__(self, url: str, model: str | None = None, timeout: float = 600.0) -> None:
        """`timeout`: seconds without a byte from the server before a request counts as failed."""
        self.url = url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._http = httpx.Client(timeout=httpx.Timeout(timeout, connect=10.0), trust_env=False)

    # --- small questions ---

    def get(self, path: str) -> httpx.Response:
        """`GET path`. Raises ServerError if there is no answer with status 200."""
        try:
            answer = self._http.get(self.url + path, timeout=30.0)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer from {self.url}{path}: {_brief(error)}") from None
        if answer.status_code != 200:
            raise ServerError(f"{path} answers {answer.status_code}: {_body(answer.text)}")
        return answer

    def healthy(self) -> bool:
        """Whether the server says that its engine lives."""
        try:
            self.get("/health")
        except ServerError:
            return False
        return True

    def models(self) -> list[dict[str, Any]]:
        """Cards of the served models (`id`, `max_model_len`)."""
        return list(self.get("/v1/models").json()["data"])

    @property
    def model(self) -> str:
        """The model's served name: the one given, or the first that the server has."""
        if self._model is None:
            served = self.models()
            if not served:
                raise ServerError("the server has no model")
            self._model = str(served[0]["id"])
        return self._model

    def metrics(self) -> dict[str, float]:
        """Each metric by name, summed over its labels."""
        totals: dict[str, float] = defaultdict(float)
        for name, _, value in self._samples():
            totals[name] += value
        return totals

    def _samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        from prometheus_client.parser import text_string_to_metric_families

        for family in text_string_to_metric_families(self.get("/metrics").text):
            for sample in family.samples:
                yield sample.name, sample.labels, sample.value

    def counts(self) -> dict[str, float]:
        """The counters named in COUNTERS; those the server does not have are 0."""
        metrics = self.metrics()
        return {name: metrics.get(full, 0.0) for name, full in COUNTERS.items()}

    def settled(self, before: dict[str, float], tokens: int) -> dict[str, float]:
        """How much the counters grew since `before`, once they include `tokens` generated ones.

        The last step of a request is counted after its answer; waits for at most SETTLE_SECONDS. Raises
        ServerError if the counters do not get there.
        """
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            grown = {name: value - before[name] for name, value in self.counts().items()}
            if grown["generated"] >= tokens:
                return grown
            if time.monotonic() > deadline:
                raise ServerError(
                    f"/metrics counts {grown['generated']:.0f} generated tokens, the answers hold {tokens}"
                )
            time.sleep(0.02)

    def prefix_caching(self) -> bool | None:
        """Whether the server keeps prefixes between requests; None if it does not say."""
        for name, labels, _ in self._samples():
            if name == "vllm:cache_config_info" and "enable_prefix_caching" in labels:
                return labels["enable_prefix_caching"] == "True"
        return None

    def flush_cache(self) -> None:
        """Forget cached prefixes. Raises ServerError if the server has no such endpoint or refuses."""
        try:
            answer = self._http.post(self.url + "/reset_prefix_cache", timeout=60.0)
        except httpx.HTTPError as error:
            raise ServerError(f"no answer from /reset_prefix_cache: {_brief(error)}") from None
        if answer.status_code == 404:
            raise ServerError(
                "the server caches prefixes and cannot flush them: start it with --no-enable-prefix-caching "
                "or VLLM_SERVER_DEV_MODE=1, or keep the cache (--keep-cache)"
            )
        if answer.status_code != 200 or answer.json().get("success") is False:
            raise ServerError(f"/reset_prefix_cache did not work: {_body(answer.text)}")

    # --- requests ---

    def chat(self, messages: Sequence[dict[str, str]], **parameters: Any) -> Answer:
        """The assistant's next message, streamed. See `complete`."""
        return self._stream("/v1/chat/completions", {"messages": list(messages), **parameters})

    def complete(self, prompt: str | Sequence[int], **parameters: Any) -> Answer:
        """What follows a text, streamed. Raises ServerError if it fails, or ends before its last piece."""
        return self._stream("/v1/completions", {"prompt": prompt, **parameters})

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """One request that is not streamed, as JSON."""
        try:
            answer = self._http.post(self.url + path, json={"model": self.model, **body})
        except httpx.HTTPError as error:
            raise ServerError(f"the connection was lost: {_brief(error)}") from None
        if answer.status_code != 200:
            raise ServerError(f"status {answer.status_code}: {_body(answer.text)}")
        return dict(answer.json())

    def _stream(self, path: str, body: dict[str, Any]) -> Answer:
        body = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        answer, start = Answer(), time.monotonic()
        finished = False
        try:
            with self._http.stream("POST", self.url + path, json=body) as reply:
                if reply.status_code != 200:
                    reply.read()
                    raise ServerError(f"status {reply.status_code}: {_body(reply.text)}")
                for line in reply.iter_lines():
                    if not line.startswith("data:"):
                        continue
                    data = line[5:].strip()
                    if data == "[DONE]":
                        finished = True
                        break
                    _add(answer, json.loads(data), time.monotonic() - start)
        except (httpx.HTTPError, ValueError) as error:
            lost = f"the connection was lost after {answer.pieces} pieces"
            raise ServerError(f"{lost}: {_brief(error)}") from None
        answer.seconds = time.monotonic() - start
        if not finished or answer.finish is None:
            raise ServerError(f"the stream ended after {answer.pieces} pieces without an end of the answer")
        return answer


def _add(answer: Answer, chunk: dict[str, Any], now: float) -> None:
    """Take one event of a stream into the answer."""
    if "error" in chunk:
        raise ServerError(f"the server reports an error mid-stream: {_body(json.dumps(chunk['error']))}")
    if chunk.get("usage"):
        answer.tokens = chunk["usage"]["completion_tokens"]
        answer.prompt_tokens = chunk["usage"]["prompt_tokens"]
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta")
        text = choice.get("text") if delta is None else delta.get("content") or _reasoning(delta)
        calls = [] if delta is None else delta.get("tool_calls") or []
        for call in calls:
            _add_call(answer, call)
        if (text or calls or choice.get("token_ids")) and not answer.pieces:
            answer.first_seconds = now
        if text or calls:
            answer.pieces += 1
        answer.text += text or ""
        answer.token_ids += choice.get("token_ids") or []
        answer.finish = choice.get("finish_reason") or answer.finish


def _reasoning(delta: dict[str, Any]) -> str | None:
    return delta.get("reasoning") or delta.get("reasoning_content")


def _add_call(answer: Answer, call: dict[str, Any]) -> None:
    index = call.get("index", 0)
    while len(answer.tool_calls) <= index:
        answer.tool_calls.append({"name": "", "arguments": ""})
    function = call.get("function") or {}
    answer.tool_calls[index]["name"] += function.get("name") or ""
    answer.tool_calls[index]["arguments"] += function.get("arguments") or ""


def _brief(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text[:160]


def _body(text: str) -> str:
    """What an error's body says, in short."""
    try:
        found = json.loads(text)
        found = found.get("error", found)
        text = found.get("message", text) if isinstance(found, dict) else str(found)
    except (ValueError, AttributeError):
        pass
    return " ".join(text.split())[:200]
