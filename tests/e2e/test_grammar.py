# SPDX-License-Identifier: Apache-2.0
"""Masks of grammars on trees: a node's row is what vLLM makes of its path alone, with a fresh grammar."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.parser.engine.adapters import ParserEngineReasoningAdapter
from vllm.sampling_params import StructuredOutputsParams
from vllm.tokenizers import get_tokenizer
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

from tests.e2e.harness import DEMO
from vllm_weaver.kernels.tree_step import PARENT_SHIFT, unpack_drafts
from vllm_weaver.spec_decode.grammar import TreeGrammars, path_to

BUDGET, OPEN = 24, -1
KINDS: dict[str, dict[str, Any]] = {
    "regex": {"regex": r"\+[1-9][0-9]{1,2} [0-9]{1,4}"},
    "choice": {"regex": "alpha|alphabet|beta"},
    "schema": {"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 1, "maxItems": 2}},
}
BACKENDS = ("xgrammar", "guidance", "outlines")


class Thinking:
    """A reasoning parser: thoughts end with the token `end`."""

    end: int

    def __init__(self, tokenizer: Any) -> None: ...

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self.end in input_ids

    def is_reasoning_end_streaming(self, input_ids: Sequence[int], delta_ids: Sequence[int]) -> bool:
        return self.end in delta_ids


class Implicit(ParserEngineReasoningAdapter):
    """A reasoning parser: thoughts end where the token `end` begins the answer."""

    end: int

    def __init__(self, tokenizer: Any) -> None: ...

    def is_reasoning_end(self, input_ids: Sequence[int]) -> bool:
        return self.end in input_ids

    @property
    def reasoning_end_token_ids(self) -> frozenset[int]:
        return frozenset([self.end])

    def find_reasoning_end(self, token_ids: Sequence[int]) -> Any:
        return (
            SimpleNamespace(offset=token_ids.index(self.end), implicit=True)
            if self.end in token_ids
            else None
        )


class World:
    """A manager of one backend, and requests of one kind to it; all that a test asks is asked of vLLM."""

    def __init__(self, backend: str, kind: str, reasoner: type | None = None) -> None:
        self.tokenizer = get_tokenizer(str(DEMO / "target"))
        self.vocab = len(self.tokenizer)
        self.backend, self.kind, self.reasoner = backend, kind, reasoner
        self.manager = self._manager()

    def _manager(self) -> StructuredOutputManager:
        options = SimpleNamespace(
            enable_in_reasoning=False,
            disable_any_whitespace=True,
            disable_additional_properties=False,
        )
        config: Any = SimpleNamespace(
            parallel_config=SimpleNamespace(distributed_executor_backend="external_launcher"),
            scheduler_config=SimpleNamespace(max_num_seqs=4),
            model_config=SimpleNamespace(
                skip_tokenizer_init=True,
                is_diffusion=False,
                get_vocab_size=lambda: self.vocab,
                hf_config=SimpleNamespace(model_type="qwen3_5"),
            ),
            structured_outputs_config=options,
            speculative_config=SimpleNamespace(num_speculative_tokens=BUDGET),
            num_speculative_tokens=BUDGET,
        )
        manager = StructuredOutputManager(config)
        manager.tokenizer, manager.reasoner_cls = self.tokenizer, self.reasoner
        return manager

    def request(self, committed: Sequence[int] = (), name: str = "r") -> Request:
        """A new request that has written `committed`."""
        constraint = StructuredOutputsParams(**KINDS[self.kind])
        constraint._backend = self.backend
        params = SamplingParams(structured_outputs=constraint, max_tokens=99)
        params.update_from_generation_config({}, self.tokenizer.eos_token_id)
        request = Request(name, self.tokenizer.encode("Some text"), params, None)
        self.manager.grammar_init(request)
        self.commit(request, committed)
        return request

    def commit(self, request: Request, tokens: Sequence[int]) -> None:
        for token in tokens:
            request.append_output_token_ids([token])
            assert self.manager.accept_tokens(request, [token])

    def row(self, committed: Sequence[int], path: Sequence[int]) -> np.ndarray:
        """vLLM's mask after `path`, in a request and a grammar of its own."""
        masks = self.manager.grammar_bitmask({"r": self.request(committed)}, ["r"], {"r": list(path)})
        assert masks is not None and len(masks) == len(path) + 1
        return masks[-1].copy()

    def state(self, request: Request) -> np.ndarray:
        """What the request's grammar, wherever its masks begin, allows next."""
        assert self.manager.backend is not None and request.structured_output_request is not None
        mask = self.manager.backend.allocate_token_bitmask(1)
        grammar: Any = request.structured_output_request.grammar
        if not grammar.is_terminated():
            grammar.fill_bitmask(mask, 0)
        return mask.numpy()

    def allowed(self, row: np.ndarray) -> list[int]:
        """The tokens of the vocabulary that a mask leaves."""
        bits = np.unpackbits(row.view(np.uint8), bitorder="little")[: self.vocab]
        return bits.nonzero()[0].tolist()


def grow(
    world: World, committed: Sequence[int], nodes: int, rng: random.Random, special: Sequence[int]
) -> tuple[list[int], list[int], dict[int, np.ndarray]]:
    """A random tree (tokens and parents, root first) of allowed, refused and special tokens, and the rows of
    the nodes that can be reached."""
    tokens, parents, rows = [-1], [-1], {0: world.row(committed, [])}
    used: set[tuple[int, int]] = set()
    while len(tokens) < nodes:
        parent = rng.choice([len(tokens) - 1, rng.randrange(len(tokens)), rng.choice(list(rows))])
        choices = world.allowed(rows[parent]) if parent in rows else []
        token = rng.choice(
            [*special, rng.randrange(world.vocab), *([rng.choice(choices)] * 9 if choices else [])]
        )
        if (parent, token) in used:
            continue
        used.add((parent, token))
        tokens.append(token)
        parents.append(parent)
        if token in choices:
            path = path_to(len(tokens) - 1, parents)
            rows[len(tokens) - 1] = world.row(committed, [tokens[node] for node in path])
    return tokens, parents, rows


def pack(tokens: Sequence[int], parents: Sequence[int], width: int) -> list[int]:
    """What the worker reports of a tree."""
    drafts = [t | p << PARENT_SHIFT for t, p in zip(tokens[1:], parents[1:], strict=True)]
    return drafts + [-1] * (width - len(drafts))


def check(world: World, seed: int, special: Sequence[int], rounds: int = 4) -> tuple[int, int, int]:
    """Follows random trees to the end of an answer: how many rows could be reached, how many nodes could not,
    and how many rows beyond the root were open."""
    rng = random.Random(seed)
    grammars = TreeGrammars(world.manager)
    request = world.request()
    committed: list[int] = []
    reached = refused = unmasked = 0
    for round_ in range(rounds):
        tokens, parents, rows = grow(world, committed, rng.randrange(2, BUDGET + 1), rng, special)
        drafts = pack(tokens, parents, BUDGET)
        assert grammars.validate_tokens(request, drafts) == drafts
        found = grammars.grammar_bitmask({"r": request}, ["r"], {"r": drafts})
        assert found is not None and found.shape[0] == BUDGET + 1
        np.testing.assert_array_equal(world.state(request), world.state(world.request(committed)))
        for node, row in rows.items():
            np.testing.assert_array_equal(found[node], row, err_msg=f"{node} of {tokens}, {parents}")
        reached, refused = reached + len(rows), refused + len(tokens) - len(rows)
        unmasked += sum(bool((row == OPEN).all()) for node, row in rows.items() if node)
        for node, parent in enumerate(parents[1:], start=1):
            if parent in rows and node not in rows:
                assert tokens[node] not in world.allowed(found[parent]), "a walk would go to a refused node"
        path = [tokens[node] for node in path_to(rng.choice(list(rows)), parents)]
        if world.tokenizer.eos_token_id in path or round_ == rounds - 1:
            break
        world.commit(request, path)
        committed += path
    return reached, refused, unmasked


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_rows_are_those_of_paths(backend: str, kind: str) -> None:
    """Refused tokens, ends of answers and what lies beyond them among the nodes."""
    world = World(backend, kind)
    end = world.tokenizer.eos_token_id
    reached, refused, unmasked = np.sum([check(world, seed, [end]) for seed in range(6)], axis=0)
    assert min(reached, refused) > 15 and unmasked > 15, (reached, refused, unmasked)


@pytest.mark.parametrize("parser, text", [(Thinking, "#"), (Implicit, "+"), (Implicit, "#")])
@pytest.mark.parametrize("backend", BACKENDS)
def test_masks_begin_on_each_path_where_its_reasoning_ends(
    backend: str, parser: type, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last parser takes a token for the answer's first that the grammar refuses: nothing is masked."""
    world = World(backend, "regex", parser)
    (end,) = world.tokenizer.encode(text)
    monkeypatch.setattr(parser, "end", end, raising=False)
    refuses = parser is Implicit and text == "#"
    rounds = 1 if refuses else 2
    reached, _, unmasked = np.sum([check(world, seed, [end], rounds) for seed in range(6)], axis=0)
    assert unmasked > 20 and (reached - unmasked > 20 or refuses), (reached, unmasked)


def test_a_batch_of_trees_chains_and_requests_without_drafts() -> None:
    """Each has its rows in its place. Where no drafts were reported, all but the root's row are open."""
    world = World("xgrammar", "choice")
    rng = random.Random(1)
    requests = {name: world.request(name=name) for name in "abcd"}
    trees = {name: grow(world, [], count, rng, []) for name, count in (("a", 9), ("c", 5))}
    drafts = {name: pack(tokens, parents, 10) for name, (tokens, parents, _) in trees.items()}
    drafts["d"] = [-1] * 7
    found = TreeGrammars(world.manager).grammar_bitmask(requests, ["c", "b", "a", "d"], drafts)
    assert found is not None and len(found) == 11 + 1 + 11 + 8
    root = world.row([], [])
    for name, first in (("c", 0), ("a", 12)):
        for node, row in trees[name][2].items():
            np.testing.assert_array_equal(found[first + node], row)
        assert (found[first + len(trees[name][0]) : first + 11] == OPEN).all()
    for first in (0, 11, 12, 23):
        np.testing.assert_array_equal(found[first], root)
    assert (found[24:] == OPEN).all()
    assert TreeGrammars(world.manager).grammar_bitmask(requests, [], drafts) is None


@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_beyond_an_end_are_accepted_as_plain_decoding_does(backend: str) -> None:
    """In one call, which is a step of several tokens; a refused token is still refused."""
    world = World(backend, "choice")
    grammars, answer = TreeGrammars(world.manager), world.tokenizer.encode("beta")
    for tokens, right in (([*answer, world.tokenizer.eos_token_id, 77, 78], True), ([answer[0], 77], False)):
        request = world.request()
        request.append_output_token_ids(tokens)
        assert grammars.accept_tokens(request, tokens) == right
    plain = Request("p", [1], SamplingParams(max_tokens=9), None)
    assert grammars.accept_tokens(plain, [1, 2])


def test_a_tree_without_nodes_is_no_drafts() -> None:
    """For a grammar; of other requests placeholders may stand for drafts that vLLM was not told."""
    world = World("xgrammar", "choice")
    plain = Request("p", [1], SamplingParams(max_tokens=9), None)
    grammars = TreeGrammars(world.manager)
    assert grammars.validate_tokens(world.request(), [-1, -1]) == []
    assert grammars.validate_tokens(plain, [-1, -1]) == [-1, -1]


def test_unpacking_ends_at_the_first_draft_that_is_none() -> None:
    tokens, parents = [7, 2**31 - 1, 0], [0, 1, 256]
    assert unpack_drafts(pack([-1, *tokens], [-1, *parents], 6)) == (tokens, parents)
    assert unpack_drafts([-1, 5]) == ([], [])
    assert unpack_drafts([]) == ([], [])
