# SPDX-License-Identifier: Apache-2.0
"""The checks of smoke_gate.py. Each is a function of a Gate that returns one clause of detail, or raises
CheckFailed; a connection that breaks is a failure of the check during which it broke."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from . import haystack
from .client import Answer, Server, ServerError

TIE = (
    0.065  # bfloat16: how close two tokens may be, in log-probability, for rows of another width to swap them
)
TOP = 20
HANG_HINT_SECONDS = 10.0


class CheckFailed(Exception):
    """What is wrong, as one clause."""


class Stop(CheckFailed):
    """A failure after which the other checks would only repeat it."""


@dataclass
class Gate:
    """What is being judged. `expectations`: see expectations.json; `plain`: a server without speculation."""

    server: Server
    expectations: dict[str, Any]
    speculation: bool = True
    plain: Server | None = None
    first_timeout: float = 900.0
    long_tokens: int | None = None
    say: Callable[[str], None] = print
    before: dict[str, float] = field(default_factory=dict)
    generated: int = 0

    def ask(self, prompt: str, tokens: int, **parameters: Any) -> Answer:
        """A greedy answer in the mode of the expectations."""
        body = {
            **self.expectations.get("parameters", {}),
            "temperature": 0,
            "max_tokens": tokens,
            **parameters,
        }
        if self.expectations["mode"] == "chat":
            answer = self.server.chat([{"role": "user", "content": prompt}], **body)
        else:
            answer = self.server.complete(prompt, **body)
        self.generated += answer.tokens
        return answer

    @property
    def first_prompt(self) -> str:
        """The prompt of the first canary."""
        return str(self.expectations["canaries"][0]["prompt"])


def health(gate: Gate) -> str:
    """The server answers at all."""
    try:
        gate.server.get("/health")
    except ServerError as error:
        raise Stop(str(error)) from None
    return "the engine lives (which is not yet that it generates)"


def model(gate: Gate) -> str:
    """The model that is asked for is the one that is served."""
    served = gate.server.models()
    names = [card["id"] for card in served]
    if gate.server.model not in names:
        raise Stop(f"the server has {', '.join(map(repr, names))}, not {gate.server.model!r}")
    return (
        f"{gate.server.model!r}, up to {served[names.index(gate.server.model)].get('max_model_len')} tokens"
    )


def first_generation(gate: Gate) -> str:
    """A generation really happens. A first request may compile kernels for minutes: told apart from a hang by
    whether it ends within `first_timeout`, and by the second request's time."""
    outcome: list[Answer | Exception] = []

    def run() -> None:
        try:
            outcome.append(gate.ask(gate.first_prompt, 16))
        except Exception as error:  # reported by the thread that waits
            outcome.append(error)

    gate.before = gate.server.counts()
    start = time.monotonic()
    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(HANG_HINT_SECONDS)
        waited = time.monotonic() - start
        if not thread.is_alive():
            break
        if waited > gate.first_timeout:
            alive = "says that it is healthy" if gate.server.healthy() else "does not answer /health any more"
            raise Stop(f"no answer within {waited:.0f} s, the server {alive}: it hangs")
        gate.say(f"first request: {waited:.0f} s, kernels may be compiling")
    first = outcome[0]
    if isinstance(first, Exception):
        raise Stop(str(first)) from None
    if not first.text.strip() or not first.tokens:
        raise CheckFailed(f"an answer of {first.tokens} tokens without text")
    second = gate.ask(gate.first_prompt, 16)
    compiled = first.seconds > 3 * second.seconds + 1
    once = " (the first compiled kernels, once)" if compiled else ""
    return f"{first.tokens} tokens in {first.seconds:.1f} s, then in {second.seconds:.1f} s{once}"


def canaries(gate: Gate) -> str:
    """Questions with one right answer."""
    wrong = []
    for canary in gate.expectations["canaries"]:
        answer = gate.ask(canary["prompt"], gate.expectations["max_tokens"])
        if not re.search(canary["expect"], answer.text):
            shown = " ".join(answer.text.split())[:60]
            wrong.append(f"{canary['prompt'][-50:]!r} gives {shown!r}, not {canary['expect']!r}")
    total = len(gate.expectations["canaries"])
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {total} wrong: {wrong[0]}")
    return f"{total} of {total} right"


def speculation(gate: Gate) -> str:
    """Speculative counters move, and the accepted length is in the healthy range."""
    grown = gate.server.settled(gate.before, gate.generated)
    if not gate.speculation:
        if grown["drafts"]:
            raise CheckFailed(f"{grown['drafts']:.0f} drafts were made by a server that should make none")
        return "none, as expected"
    if not grown["drafts"]:
        raise CheckFailed(
            "the server made no drafts: it was started without --speculative-config (if it should be so: "
            "--no-speculation)"
        )
    length = 1 + grown["accepted"] / grown["drafts"]
    low, high = gate.expectations["accepted_length"]
    shown = f"accepted length {length:.2f} over {grown['drafts']:.0f} verify steps"
    if not low <= length <= high:
        raise CheckFailed(
            f"{shown} is outside of {low} to {high}: draft, head and target do not fit each other"
        )
    return shown


def identity(gate: Gate) -> str:
    """Greedy answers equal those of the server without speculation, near-ties excused and counted."""
    assert gate.plain is not None
    prompts = [canary["prompt"] for canary in gate.expectations["canaries"]]
    tokens = min(48, gate.expectations["max_tokens"])
    body = {"temperature": 0, "max_tokens": tokens, "return_token_ids": True}
    ties, compared = 0, 0
    for prompt in prompts:
        plain = gate.plain.ask(
            "/v1/completions",
            {**body, "prompt": prompt, "logprobs": TOP, "return_tokens_as_token_ids": True},
        )["choices"][0]
        answer = gate.server.complete(prompt, **body)
        gate.generated += answer.tokens
        gap = parting_gap(plain["token_ids"], answer.token_ids, plain["logprobs"]["top_logprobs"])
        compared += len(answer.token_ids)
        if gap is None:
            continue
        position, distance = gap
        if distance > TIE:
            raise CheckFailed(
                f"the answer to {prompt[-50:]!r} parts from plain decoding at token {position}, whose other "
                f"choice is {distance:.3f} less likely"
            )
        ties += 1
    if ties > max(1, len(prompts) // 4):
        raise CheckFailed(f"{ties} of {len(prompts)} answers part from plain decoding, if only at near-ties")
    return f"{len(prompts)} answers, {compared} tokens as without speculation" + (
        f", {ties} near-ties" if ties else ""
    )


def parting_gap(
    plain: Sequence[int], found: Sequence[int], logprobs: Sequence[dict[str, float]]
) -> tuple[int, float] | None:
    """Where two answers part, and how much less likely plain decoding found the other token; or None."""
    for position, (expected, token) in enumerate(zip(plain, found, strict=False)):
        if expected != token:
            scores = logprobs[position]
            other = scores.get(f"token_id:{token}", float("-inf"))
            return position, scores[f"token_id:{expected}"] - other
    if len(plain) != len(found):
        return min(len(plain), len(found)), float("inf")
    return None


_CITY = {"type": "string", "enum": ["Paris", "Rome"]}
_SCHEMA = {
    "type": "object",
    "properties": {"city": _CITY},
    "required": ["city"],
    "additionalProperties": False,
}


def json_output(gate: Gate) -> str:
    """Structured output is what its schema says."""
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": _SCHEMA}}
    answer = gate.ask("Which city has the Eiffel tower? Answer in JSON.", 64, response_format=form)
    return f"{_checked_json(answer.text, 'the answer')}"


def tool_call(gate: Gate) -> str:
    """A tool is called with arguments of its schema."""
    function = {"name": "weather", "description": "The weather of a city.", "parameters": _SCHEMA}
    choice: Any = gate.expectations["tool_choice"]
    if choice == "named":
        choice = {"type": "function", "function": {"name": "weather"}}
    answer = gate.server.chat(
        [{"role": "user", "content": "What is the weather in Paris? Use the tool."}],
        tools=[{"type": "function", "function": function}], tool_choice=choice, temperature=0, max_tokens=256,
        **gate.expectations.get("parameters", {}),
    )  # fmt: skip
    gate.generated += answer.tokens
    if not answer.tool_calls:
        raise CheckFailed(f"no tool was called, but text: {' '.join(answer.text.split())[:60]!r}")
    call = answer.tool_calls[0]
    if call["name"] != "weather":
        raise CheckFailed(f"the tool {call['name']!r} was called, not 'weather'")
    return f"weather({_checked_json(call['arguments'], 'the call')})"


def _checked_json(text: str, what: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        raise CheckFailed(f"{what} is not JSON: {' '.join(text.split())[:60]!r}") from None
    if not isinstance(found, dict) or set(found) != {"city"} or found["city"] not in _CITY["enum"]:
        raise CheckFailed(f"{what} does not keep to its schema: {text[:60]!r}")
    return json.dumps(found)


def long_context(gate: Gate) -> str:
    """A fact in the middle of a long prompt is found (or, for a model that answers no questions, the recorded
    continuation of one)."""
    wanted = gate.expectations["long_context"]
    if "prompt" in wanted:
        answer = gate.ask(wanted["prompt"] * wanted["repeat"], gate.expectations["max_tokens"])
        if not re.search(wanted["expect"], answer.text):
            raise CheckFailed(
                f"{answer.prompt_tokens} tokens go on as {' '.join(answer.text.split())[:60]!r}"
            )
        return f"{answer.prompt_tokens} tokens go on as they should"
    limit = next(c for c in gate.server.models() if c["id"] == gate.server.model).get("max_model_len") or 0
    tokens = gate.long_tokens or min(wanted["tokens"], limit - 128)
    prompt, number, length = haystack.of_length(gate.server, tokens, 0.5, seed=7)
    answer = gate.ask(prompt, 64)
    if number not in answer.text:
        raise CheckFailed(
            f"in {length} tokens {number} was not found: {' '.join(answer.text.split())[:60]!r}"
        )
    return f"found in {length} tokens"


def still_alive(gate: Gate) -> str:
    """The engine has survived all that."""
    gate.server.get("/health")
    return "the engine lives"


CHECKS: dict[str, Callable[[Gate], str]] = {
    "health": health,
    "model": model,
    "generation": first_generation,
    "canaries": canaries,
    "speculation": speculation,
    "identity": identity,
    "json": json_output,
    "tool call": tool_call,
    "long context": long_context,
    "alive": still_alive,
}


@dataclass
class Result:
    """One check's outcome: `ok`, `failed`, `skipped` (with the reason) and the seconds it took."""

    name: str
    status: str
    detail: str
    seconds: float


def run(gate: Gate, skip: Sequence[str] = (), report: Callable[[Result], None] | None = None) -> list[Result]:
    """Every check in order. After a Stop, or when the server is gone, the rest is skipped."""
    results: list[Result] = []
    gone = ""
    for name, check in CHECKS.items():
        start = time.monotonic()
        if gone or name in skip:
            result = Result(name, "skipped", gone or "as asked", 0.0)
        elif name == "identity" and gate.plain is None:
            result = Result(name, "skipped", "no server without speculation was named (--plain-url)", 0.0)
        else:
            try:
                status, detail = "ok", check(gate)
            except (CheckFailed, ServerError) as error:
                status, detail = "failed", str(error)
                if isinstance(error, Stop) or not gate.server.healthy():
                    gone = f"after the failure of {name!r} there is nothing to judge"
            result = Result(name, status, detail, round(time.monotonic() - start, 3))
        results.append(result)
        if report is not None:
            report(result)
    return results
