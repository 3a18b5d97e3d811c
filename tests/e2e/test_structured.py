# SPDX-License-Identifier: Apache-2.0
"""Structured output beside trees: valid every time, and what plain decoding says under the same grammar.

The target is random and in float32. Drafts come from an oracle that knows plain decoding's answers, so that
grammars advance over accepted drafts, by turns as a chain and behind wrong first children. `--all` runs
500 requests over 20 schemas, and other backends of grammars. Tool calls, which a server turns into grammars,
are in test_server.py.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from tests.e2e import churn_engines, fields, harness, models, oracle
from tests.e2e.fields import Case

BIAS = 3.0
TOKENS = 80  # more than any answer needs that these grammars allow
PHONE = r"\+[1-9][0-9]{1,2} [0-9]{3,7}"
CHOICES = ["alpha", "alphabet", "beta", "a much longer answer than the others"]
EBNF = """root ::= "select " list " from " table (" where " column " = " number)?
list ::= column ("," column){0,2}
column ::= "id" | "name" | "price"
table ::= "t" [0-9]
number ::= [1-9] [0-9]{0,3}"""
QUERY = (
    r"select (id|name|price)(,(id|name|price)){0,2} from t[0-9]( where (id|name|price) = [1-9][0-9]{0,3})?"
)


def schemas() -> list[dict[str, Any]]:
    """Twenty JSON schemas, all of bounded length: four kinds of object over five kinds of value."""
    values: list[dict[str, Any]] = [
        {"enum": ["red", "green", "blue", 7, None]},
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "string", "pattern": "^[a-z ]{0,8}$"},
        {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{1,4}$"},
        {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 3},
    ]
    found = []
    for index, value in enumerate(values):
        other = values[(index + 1) % len(values)]
        closed = {"type": "object", "additionalProperties": False}
        found += [
            closed | {"properties": {"v": value}, "required": ["v"]},
            closed
            | {"properties": {"id": {"const": index}, "first": value, "second": other}, "required": ["id"]},
            closed
            | {
                "properties": {
                    "in": closed | {"properties": {"x": value, "y": other}, "required": ["x", "y"]}
                },
                "required": ["in"],
            },
            {"type": "array", "items": {"anyOf": [value, {"type": "null"}]}, "minItems": 1, "maxItems": 3},
        ]
    return found


@dataclass(frozen=True)
class Kind:
    """A constraint, and what an answer to it must be: raises where it is not."""

    constraint: dict[str, Any]
    check: Callable[[str], None]
    params: dict[str, Any]
    thinks: bool = False


def fits(schema: dict[str, Any]) -> Callable[[str], None]:
    return lambda text: jsonschema.validate(json.loads(text), schema)


def matches(pattern: str) -> Callable[[str], None]:
    def check(text: str) -> None:
        assert re.fullmatch(pattern, text), text

    return check


def json_kind(index: int, **params: Any) -> Kind:
    schema = schemas()[index]
    return Kind({"json": schema}, fits(schema), params)


SEEDED = {"temperature": 0.9, "seed": 11}
KINDS = {
    "a value": json_kind(2),
    "optional keys": json_kind(5, **SEEDED),
    "an object in an object": json_kind(14),
    "an array": json_kind(19, **SEEDED),
    "with log-probabilities": json_kind(9, logprobs=2),
    "with a penalty": json_kind(13, repetition_penalty=1.2),
    "a regular expression": Kind({"regex": PHONE}, matches(PHONE), {}),
    "a choice": Kind({"choice": CHOICES}, lambda text: CHOICES.index(text), SEEDED),
    "a grammar": Kind({"grammar": EBNF}, matches(QUERY), SEEDED),
    "after reasoning": Kind(
        {"json": schemas()[4]},
        lambda text: fits(schemas()[4])(text.partition(models.THINKING[1])[2]),
        {"thinking_token_budget": 6, "skip_special_tokens": False},
        thinks=True,
    ),
    "after open thinking": Kind(
        {"json": schemas()[4]},
        lambda text: fits(schemas()[4])(text.partition(models.THINKING[1])[2]),
        {"skip_special_tokens": False},
        thinks=True,
    ),
    "beyond its end": Kind(
        {"choice": CHOICES},
        lambda text: CHOICES.index(re.split(r"<\|", text)[0]),
        {"ignore_eos": True, "max_tokens": 30, "skip_special_tokens": False},
    ),
}
CHAINS = {"with a penalty", "after reasoning"}  # history beside the grammar
OPTIONS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": 32,
    "max_num_seqs": 8,
    # A request is past its reasoning if its prompt is.
    "structured_outputs_config": {
        "backend": "xgrammar",
        "disable_any_whitespace": True,  # else white space has no end
        "reasoning_parser": "deepseek_r1",
    },
    "reasoning_config": {"reasoning_parser": "deepseek_r1"},
}


def case(kind: Kind, prompt: list[int], tokenizer: Any) -> Case:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    start, end = (tokenizer.convert_tokens_to_ids(text) for text in models.THINKING)
    given = {"temperature": 0, "max_tokens": TOKENS} | kind.params
    params = SamplingParams(**given, structured_outputs=StructuredOutputsParams(**kind.constraint))
    if kind.thinks and "thinking_token_budget" not in kind.params:
        params.logit_bias = {end: BIAS}  # else a random model thinks for ever
    return Case([*prompt, start if kind.thinks else end], params)


@dataclass(frozen=True)
class Plain:
    folder: Path
    cases: dict[str, Case]
    answers: dict[str, Any]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    folder = models.with_text(tmp_path_factory.mktemp("models"))
    with harness.engine(folder / "target", **OPTIONS) as llm:
        tokenizer = llm.get_tokenizer()
        prompts = harness.demo_prompts(tokenizer, len(KINDS))
        cases = {
            name: case(kind, prompt[: 12 + i], tokenizer)
            for i, ((name, kind), prompt) in enumerate(zip(KINDS.items(), prompts, strict=True))
        }
        answers = dict(zip(cases, fields.ask(llm, list(cases.values())), strict=True))
    return Plain(folder, cases, answers)


@pytest.fixture(scope="module")
def trees(plain: Plain) -> Iterator[Any]:
    options = OPTIONS | harness.trees(16, "ddtree", plain.folder / "draft")
    with harness.engine(plain.folder / "target", **options) as llm:
        yield llm


def follow(llm: Any, plain: Plain, names: Sequence[str], shapes: Sequence[oracle.Shape]) -> dict[str, int]:
    """Asks for what `plain` was asked for, with drafts of these shapes, and compares; what the walks counted.
    Under Traversal Verification a sampled answer need only be valid."""
    runner = harness.runner(llm)
    cases, wanted = ([each[name] for name in names] for each in (plain.cases, plain.answers))
    oracle.install(runner, fields.references(cases, wanted), shapes)
    before = runner.model_state.step.stats.read()
    traversal = runner.model_state.settings.tree_verify == "traversal"
    for name, case, expected, answer in zip(names, cases, wanted, fields.ask(llm, cases), strict=True):
        assert expected.outputs[0].finish_reason == ("length" if case.params.ignore_eos else "stop"), name
        if not (traversal and case.params.temperature):
            fields.assert_equal(name, answer, expected)
        KINDS[name].check(answer.outputs[0].text)
    return {name: value - before[name] for name, value in runner.model_state.step.stats.read().items()}


def test_every_answer_is_valid_and_plain_decodings(plain: Plain, trees: Any) -> None:
    grown = follow(trees, plain, list(KINDS), [oracle.chain, oracle.second_child])
    assert grown["accepted"] > 100, f"grammars saw hardly any accepted draft: {grown}"


def test_accepted_paths_branch(plain: Plain, trees: Any) -> None:
    """Every path runs through second children, the first of which are wrong, most of them to the grammar."""
    grown = follow(trees, plain, sorted(KINDS.keys() - CHAINS), [oracle.second_child])
    assert grown["branching_paths"] == grown["nonempty_paths"] > 20, grown
    assert grown["accepted"] > 4 * grown["branching_paths"], grown
    thoughts, _, answer = plain.answers["after open thinking"].outputs[0].text.partition(models.THINKING[1])
    assert thoughts and answer, "masks began inside the drafts"


def test_a_request_beside_grammars_that_needs_a_chain_gets_one(plain: Plain, trees: Any) -> None:
    grown = follow(trees, plain, sorted(CHAINS), [oracle.chain, oracle.second_child])
    assert grown["accepted"] > 10 and grown["branching_paths"] == 0, grown


@pytest.mark.full
def test_five_hundred_answers_are_valid(plain: Plain, trees: Any) -> None:
    """Twenty schemas, 25 draws each; drafts follow the answers of the round before as long as a draw does."""
    tokenizer = trees.get_tokenizer()
    (text, *_) = harness.demo_prompts(tokenizer, 1)
    prompts = [text[i : i + 12] for i in range(len(schemas()))]
    known: list[harness.Reference] = []
    oracle.install(harness.runner(trees), known, [oracle.chain, oracle.second_child])
    stats = harness.runner(trees).model_state.step.stats
    before, invalid = stats.read(), []
    for draw in range(25):
        kinds = [json_kind(i, temperature=0.4, seed=draw) for i in range(len(prompts))]
        cases = [case(kind, prompt, tokenizer) for kind, prompt in zip(kinds, prompts, strict=True)]
        answers = fields.ask(trees, cases)
        for kind, answer in zip(kinds, answers, strict=True):
            text = answer.outputs[0].text
            try:
                kind.check(text)
            except (ValueError, jsonschema.ValidationError) as error:
                invalid.append((kind.constraint, text, str(error)))
        known[:0] = fields.references(cases, answers)
    grown = {name: value - before[name] for name, value in stats.read().items()}
    print(f"500 requests, {len(invalid)} invalid, {grown}")
    assert not invalid, invalid[:3]
    assert grown["accepted"] > 500, grown


SIMPLE = {
    "xgrammar": ("a value", "an array", "a regular expression", "a choice"),
    "guidance": ("a value", "an array", "a regular expression", "a choice", "beyond its end"),
    "outlines": ("a regular expression", "a choice", "beyond its end"),  # knows no limits of integers
}


# An engine of its own ends the one of `trees`, so this comes last.
@pytest.mark.parametrize(
    "backend, ahead, more",
    [
        ("xgrammar", True, {}),
        ("xgrammar", True, {"tree_verify": "traversal"}),
        pytest.param("guidance", True, {}, marks=pytest.mark.full),
        pytest.param("guidance", False, {}, marks=pytest.mark.full),
        pytest.param("outlines", True, {}, marks=pytest.mark.full),
        pytest.param("outlines", False, {}, marks=pytest.mark.full),
    ],
)
def test_paths_branch_whatever_the_engine(
    plain: Plain, backend: str, ahead: bool, more: dict[str, Any]
) -> None:
    """Other backends of grammars, and asynchronous scheduling, where masks are made while the target runs."""
    of_outputs = OPTIONS["structured_outputs_config"] | {"backend": backend}
    of_outputs["disable_any_whitespace"] = backend != "outlines"  # which has no such option
    options = OPTIONS | {"structured_outputs_config": of_outputs}
    if backend != "xgrammar":  # its white space may be another one
        with harness.engine(plain.folder / "target", **options) as llm:
            answers = fields.ask(llm, [plain.cases[name] for name in SIMPLE[backend]])
        plain = Plain(plain.folder, plain.cases, dict(zip(SIMPLE[backend], answers, strict=True)))
    options |= harness.trees(16, "ddtree", plain.folder / "draft", **more)
    with churn_engines.asynchronous(ahead), harness.engine(plain.folder / "target", **options) as llm:
        assert llm.llm_engine.vllm_config.scheduler_config.async_scheduling == ahead
        grown = follow(llm, plain, SIMPLE[backend], [oracle.second_child])
    assert grown["branching_paths"] == grown["nonempty_paths"] > 3, grown
