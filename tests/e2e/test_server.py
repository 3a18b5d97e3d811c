# SPDX-License-Identifier: Apache-2.0
"""A server with trees beside a plain one, over HTTP: every answer is that of plain decoding, and nothing that
a client asks for or breaks off takes the engine down."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jsonschema
import openai
import pytest
import torch

from tests.e2e import harness
from tests.e2e.harness import DEMO, MAX_MODEL_LEN, Reference
from tests.e2e.server import ANSWER_SECONDS, STOP_SECONDS, Server, running, until

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
MODEL = "demo"
BUDGET, DEPTH = 16, 7
LENGTH = 32  # tokens of most answers: enough for a dozen trees
OPTIONS = (
    "--served-model-name", MODEL, "--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", "4",
    "--enforce-eager", "--dtype", "bfloat16", "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
    # Else a grammar of JSON allows white space without end.
    "--structured-outputs-config", '{"backend": "xgrammar", "disable_any_whitespace": true}',
)  # fmt: skip
# Token ids in the answer, and token ids as keys of its log-probabilities.
WITH_IDS = {"return_token_ids": True, "return_tokens_as_token_ids": True}
# Keys of a request that are vLLM's own.
OURS = ("ignore_eos", "logprob_token_ids", "min_p", "repetition_penalty", "response_format", "top_k")
PROMPTS = json.loads((DEMO / "prompts.json").read_text())


@dataclass(frozen=True)
class Pair:
    trees: Server
    plain: Server


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Both servers, started at the same time. Prefix caching is left at its default (off for this hybrid)."""
    folder = tmp_path_factory.mktemp("server")
    speculative = json.dumps(harness.trees(BUDGET)["speculative_config"])
    trees = Server(folder / "trees", DEMO / "target", *OPTIONS, "--speculative-config", speculative)
    plain = Server(folder / "plain", DEMO / "target", *OPTIONS, "--no-enable-prefix-caching")
    with running(trees, plain):
        yield Pair(trees, plain)


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """The demo's tokenizer."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(DEMO / "target" / "tokenizer.json"))


@pytest.fixture(scope="module")
def prompts(tokenizer: Any) -> list[list[int]]:
    """Token ids of four held-out prompts."""
    return [tokenizer.encode(text).ids for text in PROMPTS["text"][:4]]


@pytest.fixture(scope="module")
def references(servers: Pair, prompts: list[list[int]]) -> list[Reference]:
    """Plain decoding of each prompt alone, EOS ignored."""
    return [reference(complete(servers.plain, p, logprobs=harness.TOP), p) for p in prompts]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "choice" in metafunc.fixturenames:
        everything = metafunc.config.getoption("--all")
        metafunc.parametrize("choice", ["required", "named", "auto"] if everything else ["required"])


# --- asking ----------------------------------------------------------------------------------------------


def arguments(more: dict[str, Any]) -> dict[str, Any]:
    """A greedy request that ignores EOS, unless `more` says otherwise, with the keys that are vLLM's own."""
    extra = {"ignore_eos": True, **WITH_IDS} | {key: more[key] for key in OURS if key in more}
    standard = {key: value for key, value in more.items() if key not in OURS}
    return {"model": MODEL, "max_tokens": LENGTH, "temperature": 0, "extra_body": extra} | standard


def complete(server: Server, prompt: Sequence[int] | str, **more: Any) -> Any:
    """A completion."""
    text = prompt if isinstance(prompt, str) else list(prompt)
    return server.client.completions.create(prompt=text, **arguments(more))


def chat(server: Server, messages: list[dict[str, str]], **more: Any) -> Any:
    """A chat completion."""
    return server.client.chat.completions.create(messages=messages, **arguments(more))


def status(request: Any, *args: Any, **more: Any) -> tuple[int, Any]:
    """HTTP status of a request, and its answer or the error."""
    try:
        return 200, request(*args, **more)
    except openai.APIStatusError as error:
        return error.status_code, error


def token_id(key: str) -> int:
    return int(key.removeprefix("token_id:"))


def reference(answer: Any, prompt: Sequence[int] = ()) -> Reference:
    """What a plain completion or chat answer with log-probabilities says."""
    (choice,) = answer.choices
    if hasattr(choice, "text"):
        steps = [{token_id(key): value for key, value in top.items()} for top in choice.logprobs.top_logprobs]
    else:
        steps = [
            {token_id(t.token): t.logprob for t in entry.top_logprobs} for entry in choice.logprobs.content
        ]
    return Reference(tuple(prompt), tuple(choice.token_ids), tuple(steps))


def check_usage(answer: Any, prompt_tokens: int, completion_tokens: int) -> None:
    usage = answer.usage
    found = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
    assert found == (prompt_tokens, completion_tokens, prompt_tokens + completion_tokens)


# --- texts -----------------------------------------------------------------------------------------------


def test_completions_are_those_of_plain_decoding(servers: Pair, references: list[Reference]) -> None:
    """One at a time, with token ids and (the first) with text as prompt."""
    answers = [
        complete(servers.trees, r.prompt if i else PROMPTS["text"][0]) for i, r in enumerate(references)
    ]
    for answer, expected in zip(answers, references, strict=True):
        assert answer.choices[0].finish_reason == "length"
        check_usage(answer, len(expected.prompt), LENGTH)
    harness.assert_identical(references, [answer.choices[0] for answer in answers])


def test_four_requests_at_once_are_those_of_plain_decoding(
    servers: Pair, references: list[Reference]
) -> None:
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda r: complete(servers.trees, r.prompt), references))
    assert [len(answer.choices[0].token_ids) for answer in answers] == [LENGTH] * 4
    harness.assert_identical(references, [answer.choices[0] for answer in answers])


def test_a_streamed_completion_is_the_whole_one(servers: Pair, references: list[Reference]) -> None:
    prompt = references[1].prompt
    whole = complete(servers.trees, prompt)
    *chunks, last = complete(servers.trees, prompt, stream=True, stream_options={"include_usage": True})
    assert len(chunks) > 1 and not last.choices
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert [t for chunk in chunks for t in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert [chunk.choices[0].finish_reason for chunk in chunks if chunk.choices[0].finish_reason] == [
        "length"
    ]
    check_usage(last, len(prompt), LENGTH)


def test_chat_is_that_of_plain_decoding_streamed_or_not(servers: Pair) -> None:
    messages = PROMPTS["chat"][0]
    expected = chat(servers.plain, messages, logprobs=True, top_logprobs=harness.TOP)
    whole = chat(servers.trees, messages)
    harness.assert_identical([reference(expected)], whole.choices)
    check_usage(whole, expected.usage.prompt_tokens, LENGTH)
    stream = chat(servers.trees, messages, stream=True)
    assert "".join(c.choices[0].delta.content or "" for c in stream) == whole.choices[0].message.content


def test_a_stop_string_ends_the_text_where_it_begins(servers: Pair, references: list[Reference]) -> None:
    """The string lies in the middle of an answer, across the nodes of a tree as it comes."""
    prompt = references[2].prompt
    text = complete(servers.trees, prompt).choices[0].text
    middle = len(text) // 2
    stop = text[middle : middle + 5]
    assert len(stop) == 5 and text.strip()
    answer = complete(servers.trees, prompt, stop=[stop])
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.stop_reason) == ("stop", stop)
    assert choice.text == text[: text.index(stop)]
    assert answer.usage.completion_tokens == len(choice.token_ids) < LENGTH


def test_a_seed_gives_the_same_text_again(servers: Pair, references: list[Reference]) -> None:
    def text(seed: int) -> str:
        sampled = complete(servers.trees, references[1].prompt, temperature=1.5, seed=seed, max_tokens=16)
        return sampled.choices[0].text

    first, second = text(1), text(2)
    assert first != second
    assert text(1) == first


def test_echo_is_the_prompt_with_its_log_probabilities(servers: Pair, references: list[Reference]) -> None:
    prompt = references[0].prompt
    text = PROMPTS["text"][0]
    extra = {"ignore_eos": True, "return_tokens_as_token_ids": True}  # beside token ids no text is echoed
    ours, plain = (
        complete(server, text, echo=True, logprobs=2, max_tokens=8, extra_body=extra)
        for server in (servers.trees, servers.plain)
    )
    check_usage(ours, len(prompt), 8)
    check_usage(plain, len(prompt), 8)
    found, expected = ours.choices[0].logprobs, plain.choices[0].logprobs
    assert ours.choices[0].text.startswith(text)
    assert len(found.tokens) == len(found.top_logprobs) == len(expected.tokens) == len(prompt) + 8
    assert found.tokens[: len(prompt)] == expected.tokens[: len(prompt)]
    assert found.token_logprobs[0] is expected.token_logprobs[0] is None
    # bf16, and another attention kernel: values near -25 are 0.1 apart. Closer in float32: test_requests.py.
    assert found.token_logprobs[1 : len(prompt)] == pytest.approx(
        expected.token_logprobs[1 : len(prompt)], abs=0.3
    )


TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a name up.",
        "strict": True,  # else the grammar allows any arguments
        "parameters": {
            "type": "object",
            "properties": {
                "kind": {"enum": ["method", "class", "module"]},
                "lines": {"type": "integer", "minimum": 0, "maximum": 99},
            },
            "required": ["kind", "lines"],
            "additionalProperties": False,
        },
    },
}


def test_tool_calls_are_valid_and_those_of_plain_decoding(choice: str, servers: Pair, tokenizer: Any) -> None:
    """Where a call must come, a grammar makes it one that fits the tool."""
    wanted = {"type": "function", "function": {"name": "look_up"}} if choice == "named" else choice
    # The grammar of calls allows white space without end, and further calls.
    ids = range(tokenizer.get_vocab_size())
    bias = {str(id): -100 for id in ids if not tokenizer.decode([id], False).strip()}
    bias |= {str(tokenizer.token_to_id(text)): 100 for text in ("<|endoftext|>", "<|im_end|>")}
    more = {"tools": [TOOL], "tool_choice": wanted, "max_tokens": 100, "ignore_eos": False}
    if choice != "auto":
        more["logit_bias"] = bias
    messages = PROMPTS["chat"][0]
    with ThreadPoolExecutor(2) as pool:
        ours, plain = pool.map(
            lambda server: chat(server, messages, logprobs=True, top_logprobs=harness.TOP, **more),
            (servers.trees, servers.plain),
        )
    harness.assert_identical([reference(plain)], ours.choices)
    check_usage(ours, plain.usage.prompt_tokens, len(ours.choices[0].token_ids))
    (answer,) = ours.choices
    if choice == "auto":  # here the model is not made to call
        assert not answer.message.tool_calls and answer.message.content
        return
    assert answer.message.tool_calls
    for call in answer.message.tool_calls:
        assert call.function.name == "look_up"
        jsonschema.validate(json.loads(call.function.arguments), TOOL["function"]["parameters"])


# --- lengths ---------------------------------------------------------------------------------------------


def test_generation_up_to_exactly_max_model_len(servers: Pair, prompts: list[list[int]]) -> None:
    room = 20  # the last steps have less room than a tree or a block of the draft
    prompt = (prompts[0] + prompts[1] + prompts[2]) * 10
    prompt = prompt[: MAX_MODEL_LEN - room]
    assert len(prompt) == MAX_MODEL_LEN - room
    answer = complete(servers.trees, prompt, max_tokens=room)
    assert answer.choices[0].finish_reason == "length"
    check_usage(answer, len(prompt), room)
    expected = reference(complete(servers.plain, prompt, max_tokens=room, logprobs=harness.TOP), prompt)
    harness.assert_identical([expected], answer.choices)
    beyond = complete(servers.trees, prompt, max_tokens=room + 50)
    assert beyond.choices[0].token_ids == answer.choices[0].token_ids


def test_a_prompt_of_one_token_is_answered(servers: Pair) -> None:
    """Alone in its step, which the plain server does not survive on a CPU."""
    answer = complete(servers.trees, [5], max_tokens=8)
    check_usage(answer, 1, 8)
    assert servers.trees.healthy()


def test_a_prompt_that_is_too_long_is_a_bad_request(servers: Pair, references: list[Reference]) -> None:
    long = [5] * (MAX_MODEL_LEN + 1)
    answers = [status(complete, server, long) for server in (servers.trees, servers.plain)]
    assert [code for code, _ in answers] == [400, 400]
    assert str(answers[0][1].body) == str(answers[1][1].body)
    assert len(complete(servers.trees, references[0].prompt, max_tokens=2).choices[0].token_ids) == 2


# --- requests of every kind ------------------------------------------------------------------------------

KINDS: dict[str, dict[str, Any]] = {
    "presence penalty": {"presence_penalty": 1.5},
    "frequency penalty": {"frequency_penalty": 1.5},
    "repetition penalty": {"repetition_penalty": 1.3},
    "logprobs": {"logprobs": 3},
    "log-probabilities of given tokens": {"logprobs": 3, "logprob_token_ids": [9, 30, 6]},
    "two choices": {"n": 2, "temperature": 0.8, "seed": 3},
    "JSON": {"response_format": {"type": "json_object"}},
    "top-k and top-p": {"temperature": 0.8, "seed": 3, "top_k": 20, "top_p": 0.9},
    "min-p": {"temperature": 0.8, "seed": 3, "min_p": 0.1},
    "logit bias": {"logit_bias": {"9": 4}},
    "logprobs beyond the limit": {"logprobs": harness.TOP + 1},
    "penalty beyond the limit": {"presence_penalty": 3},
}
BAD = {"logprobs beyond the limit", "penalty beyond the limit"}


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_fares_as_on_the_plain_server(
    kind: str, servers: Pair, references: list[Reference]
) -> None:
    """The status, and the form of the answer; the texts of such requests are compared elsewhere."""

    def ask(server: Server) -> tuple[int, Any]:
        return status(complete, server, references[1].prompt, max_tokens=8, **KINDS[kind])

    with ThreadPoolExecutor(2) as pool:
        (code, answer), (plain_code, plain) = pool.map(ask, (servers.trees, servers.plain))
    assert code == plain_code == (400 if kind in BAD else 200)
    assert servers.trees.healthy()
    if kind in BAD:
        return
    check_usage(answer, plain.usage.prompt_tokens, plain.usage.completion_tokens)
    assert len(answer.choices) == len(plain.choices)
    for choice, expected in zip(answer.choices, plain.choices, strict=True):
        assert choice.finish_reason == expected.finish_reason
        assert len(choice.token_ids) == len(expected.token_ids)
        assert (choice.logprobs is None) == (expected.logprobs is None)
        if choice.logprobs is not None:
            assert [len(top) for top in choice.logprobs.top_logprobs] == [
                len(top) for top in expected.logprobs.top_logprobs
            ]
    if kind == "JSON":
        assert answer.choices[0].text.lstrip().startswith("{")


def test_a_client_that_goes_away_disturbs_nobody(servers: Pair, references: list[Reference]) -> None:
    gone, *others = references[:3]
    before = servers.trees.metrics()["vllm:generation_tokens_total"]
    with ThreadPoolExecutor(2) as pool:
        stream = complete(servers.trees, gone.prompt, max_tokens=400, stream=True)
        next(stream)
        answers = pool.map(lambda r: complete(servers.trees, r.prompt), others)
        next(stream)
        stream.close()
        choices = [answer.choices[0] for answer in answers]
    harness.assert_identical(others, choices)
    idle = "vllm:num_requests_running"
    until(
        lambda: servers.trees.metrics()[idle] == 0, ANSWER_SECONDS, "the end of the request without a client"
    )
    assert servers.trees.metrics()["vllm:generation_tokens_total"] - before < 2 * LENGTH + 200
    again = complete(servers.trees, gone.prompt)
    harness.assert_identical([gone], again.choices)


# --- what the server says --------------------------------------------------------------------------------


def test_metrics_count_drafts_and_tokens(servers: Pair, references: list[Reference]) -> None:
    """One request alone: the figures of speculative decoding and of trees agree with its tokens."""
    spec, trees = "vllm:spec_decode_num_", "vllm:dflash_tfm_"
    names = {
        "drafts": f"{spec}drafts_total",
        "drafted": f"{spec}draft_tokens_total",
        "accepted": f"{spec}accepted_tokens_total",
        "by position": f"{spec}accepted_tokens_per_pos_total",
        "prompt": "vllm:prompt_tokens_total",
        "generated": "vllm:generation_tokens_total",
        "nodes": f"{trees}tree_nodes_total",
        "verifies": f"{trees}accepted_length_count",
        "committed": f"{trees}accepted_length_sum",
        "walks": f"{trees}accepted_depth_count",
        "depths": f"{trees}accepted_depth_sum",
        "paths": f"{trees}accepted_paths_total",
        "branching": f"{trees}branching_paths_total",
        "chains": f"{trees}chain_fallbacks_total",
    }

    def counts() -> dict[str, float]:
        metrics = servers.trees.metrics()
        assert set(names.values()) <= set(metrics)
        assert metrics[f"{trees}tree_budget"] == BUDGET
        return {name: metrics[full] for name, full in names.items()}

    def grown(since: dict[str, float], tokens: int) -> dict[str, float]:
        until(
            lambda: counts()["generated"] - since["generated"] >= tokens,
            STOP_SECONDS,
            "counts of the request",
        )
        return {name: value - since[name] for name, value in counts().items()}

    before = counts()
    prompt = references[1].prompt
    check_usage(complete(servers.trees, prompt), len(prompt), LENGTH)
    found = grown(before, LENGTH)
    assert (found["prompt"], found["generated"]) == (len(prompt), LENGTH)
    assert 0 < found["drafts"] < LENGTH - 1  # fewer verifies than plain steps: drafts were accepted
    assert found["verifies"] == found["walks"] == found["drafts"]
    assert found["committed"] == LENGTH - 1  # the prefill gives the first token; nothing past the last
    assert found["accepted"] == found["by position"] == found["depths"]
    # Every verify but the last has a bonus token; the last has one unless the limit cut it.
    assert found["committed"] - found["accepted"] - found["drafts"] in (0, -1)
    assert found["accepted"] < found["nodes"] == found["drafted"] <= found["drafts"] * BUDGET
    assert 0 <= found["branching"] <= found["paths"] <= found["drafts"]
    assert found["chains"] == 0

    before = counts()
    complete(servers.trees, prompt, presence_penalty=1.0)
    found = grown(before, LENGTH)
    assert found["chains"] == found["drafts"] > 0 and found["branching"] == 0
    chains = [
        line
        for line in (servers.trees.get("/metrics") or "").splitlines()
        if "chain_fallbacks_total{" in line
    ]
    assert {'reason="penalty"', 'reason="bad_words"'} <= {
        part for line in chains for part in re.split("[{,}]", line)
    }
    until(
        lambda: "Tree metrics: Tokens a verify" in servers.trees.stdout + servers.trees.stderr,
        STOP_SECONDS,
        "a line in the log",
    )


def test_interrupt_leaves_no_process_behind(servers: Pair, references: list[Reference]) -> None:
    """The last test: SIGINT while a request is running."""
    stream = complete(servers.trees, references[0].prompt, max_tokens=400, stream=True)
    next(stream)
    assert len(servers.trees.living()) >= 3  # server, engine, worker
    servers.trees.interrupt()
    stream.close()  # the server may wait for its clients
    assert servers.trees.wait(STOP_SECONDS) == 0, servers.trees.tail
    until(lambda: not servers.trees.living(), STOP_SECONDS, "no process left")
