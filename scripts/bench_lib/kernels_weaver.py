# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of what proposes a tree: candidate pool, Weaver prompt, one round, whole proposals.

Calls go round through several heads with weights of their own, and inputs of their own. Within a proposal
the weights are read once a round and partly stay in the L2 cache.

A Weaver tree is right when its log-probabilities are those that the plain fp32 head gives the same nodes, and
when the plain fp32 proposer grows the same tree up to a choice between two nodes that score alike.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench_lib import kernels_floor as floor
from bench_lib.kernels_common import Call, Case, Setting, relative_error, require, require_equal
from vllm_weaver.kernels.ancestors import ancestor_mask_reference
from vllm_weaver.kernels.candidate_pool import candidate_pool
from vllm_weaver.kernels.frontier import CHILDREN, select_nodes, start_growth
from vllm_weaver.spec_decode.proposers import (
    ChainProposer,
    DDTreeProposer,
    TreeProposer,
    WeaverProposer,
    count_rounds,
)
from vllm_weaver.spec_decode.tree import Tree
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead, node_rows, pool_logprobs
from vllm_weaver.spec_decode.weaver_growth import WeaverGrowth

NAMES = ("candidate_pool", "weaver_prompt", "weaver_round", "weaver_proposal", "ddtree", "chain")
HEADS = 4
SCORE_LIMIT = 0.1  # of a path's log-probability: bf16 activations and fp32 sums against fp32
PROMPT_LIMIT = 1.5e-2
PLAIN_LIMIT = 1e-3  # ddtree and chain, which have fp32 sums on either side


class Inputs:
    """What a proposer is given for `requests` requests."""

    def __init__(self, setting: Setting, requests: int, seed: int) -> None:
        torch.manual_seed(seed)
        shape = setting.shape
        self.hidden = setting.randn(requests, shape.hidden)
        self.draft_hidden = setting.randn(requests, setting.depth, shape.hidden)
        self.logits = setting.randn(requests, setting.depth, shape.vocab) * 3
        self.roots = torch.randint(0, shape.vocab, (requests,), device=setting.device)
        self.room = torch.full((requests,), 1000, device=setting.device)

    def propose(self, proposer: TreeProposer, budget: int, dtype: torch.dtype | None = None) -> Tree:
        """The trees; inputs in `dtype` when given."""
        given = (self.hidden, self.draft_hidden, self.logits)
        hidden, draft_hidden, logits = given if dtype is None else (x.to(dtype) for x in given)
        return proposer.propose(hidden, draft_hidden, logits, self.roots, budget, max_depth=self.room)


def check_growth(what: str, got: Tree, want: Tree, limit: float) -> float:
    """The largest difference of log-probabilities up to where the trees part, that place included."""
    same = (got.tokens == want.tokens) & (got.parents == want.parents)
    prefix = same.int().cumprod(1).sum(1, keepdim=True)
    seen = torch.arange(got.num_slots, device=same.device) <= prefix
    gap = (got.logprobs - want.logprobs).abs().masked_fill(~seen | (got.logprobs == want.logprobs), 0)
    return require(f"{what}: scores up to the first difference", gap.max().item(), limit)


class Weavers:
    """Heads of random weights, their tables, and the same in fp32 for comparison."""

    @torch.no_grad()
    def __init__(self, setting: Setting, heads: int) -> None:
        torch.manual_seed(0)
        shape = setting.shape
        self.setting, self.depth = setting, setting.depth
        self.config = WeaverConfig(
            shape.hidden, shape.hidden, shape.rank, shape.weaver_layers, shape.weaver_heads, shape.weaver_mlp,
            K=setting.depth, candidate_pool_size=shape.pool,
        )  # fmt: skip
        with setting.device:
            head = WeaverHead(self.config)
        for name, parameter in head.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
            elif "norm" in name and name.endswith("weight"):
                parameter.normal_(1.0, 0.1)
            else:
                parameter.normal_(std=0.05)
        head = head.to(setting.dtype)
        self.plain_head = copy.deepcopy(head).float()
        self.heads = [head, *(copy.deepcopy(head) for _ in range(heads - 1))]
        self.token_table = setting.randn(shape.vocab, shape.rank)
        self.residual_table = setting.randn(shape.vocab, shape.rank) * 0.03
        self.proposers = [
            WeaverProposer(head, self.token_table, self.residual_table, impl=setting.impl)
            for head in self.heads
        ]
        self.errors: dict[tuple[int, int], dict[str, float]] = {}

    @property
    def growths(self) -> list[WeaverGrowth]:
        """The heads, ready for the kernels."""
        return [proposer.growth for proposer in self.proposers if proposer.growth is not None]

    def rescored(self, inputs: Inputs, tree: Tree) -> Tensor:
        """Log-probabilities [R, N] of the tree's nodes by the plain head: all nodes at once, fp32."""
        shape, head, num_requests = self.setting.shape, self.plain_head, len(tree.tokens)
        logits = inputs.logits.flatten(0, 1)
        values, ids, _ = candidate_pool(logits, min(shape.pool, shape.vocab), shape.vocab, impl="torch")
        values, ids = (x.unflatten(0, (num_requests, self.depth)) for x in (values, ids))
        rows = node_rows(tree.depths, self.depth).long()
        queries = head.forward_nodes(
            self.token_table[tree.tokens.clamp(min=0)].float(), rows + 1,
            ancestor_mask_reference(tree.parents, tree.num_nodes),
            head.prompt(inputs.hidden.float(), inputs.draft_hidden.float()),
        )  # fmt: skip
        result = torch.zeros_like(tree.logprobs)
        for r in range(num_requests):
            for i in range(1, int(tree.num_nodes[r])):
                parent = int(tree.parents[r, i])
                pool = ids[r, rows[r, parent]]
                scores = pool_logprobs(
                    values[r, rows[r, parent]], pool, self.residual_table[pool.clamp(min=0)].float(),
                    queries[r, parent],
                )  # fmt: skip
                result[r, i] = result[r, parent] + scores[pool == tree.tokens[r, i]].sum()
        return result

    @torch.no_grad()
    def check(self, inputs: Inputs, budget: int) -> dict[str, float]:
        """A whole proposal against the plain fp32 head; once for each size."""
        key = (len(inputs.roots), budget)
        if key not in self.errors:
            what = f"weaver proposal, budget {budget}"
            got = inputs.propose(self.proposers[0], budget)
            try:
                got.validate(self.setting.shape.vocab, self.depth)
            except ValueError as error:
                require(f"{what} ({error})", float("inf"), 0)
            valid = got.valid()
            off = (got.logprobs - self.rescored(inputs, got)).abs()[valid].max().item()
            plain = WeaverProposer(
                self.plain_head, self.token_table.float(), self.residual_table.float(), impl="torch"
            )
            want = inputs.propose(plain, budget, torch.float32)
            self.errors[key] = {
                "log-probabilities": require(f"{what}: log-probabilities", off, SCORE_LIMIT),
                "growth": check_growth(what, got, want, SCORE_LIMIT),
            }
        return self.errors[key]

    @torch.no_grad()
    def check_prompt(self, inputs: Inputs) -> dict[str, float]:
        """Keys and values of the prompt rows."""
        cache = self.growths[0].new_cache(len(inputs.roots), self.depth + 1)
        self.growths[0].prompt(inputs.hidden, inputs.draft_hidden, cache)
        prefix = self.plain_head.prompt(inputs.hidden.float(), inputs.draft_hidden.float())
        want = torch.stack([torch.stack(pair) for pair in zip(prefix.keys, prefix.values, strict=True)])
        return {"cache": require("weaver prompt", relative_error(cache, want), PROMPT_LIMIT)}

    def prompt_calls(self, requests: int, inputs: list[Inputs]) -> list[Call]:
        """One call a head."""
        caches = [growth.new_cache(requests, self.depth + 1) for growth in self.growths]
        return [
            partial(growth.prompt, x.hidden, x.draft_hidden, cache)
            for growth, x, cache in zip(self.growths, inputs, caches, strict=True)
        ]

    @torch.no_grad()
    def round_calls(self, requests: int, budget: int, width: int, inputs: list[Inputs]) -> list[Call]:
        """The second round of a growth, over and over, one call a head: `width` nodes expanded and the next
        ones taken. Once the node list is full none is taken, which saves a few stores."""
        vocab, pool = self.setting.shape.vocab, self.proposers[0].pool_size
        calls: list[Call] = []
        for head, x in zip(self.growths, inputs, strict=True):
            values, ids, _ = candidate_pool(x.logits.flatten(0, 1), pool, vocab, impl=self.setting.impl)
            values, ids = (part.unflatten(0, (requests, self.depth)) for part in (values, ids))
            cache = head.new_cache(requests, self.depth + 2 + budget)
            head.prompt(x.hidden, x.draft_hidden, cache)
            growth, root = start_growth(x.roots, budget + 1, self.depth, vocab)
            rows = select_nodes(growth, root, head.expand(growth, root, cache, values, ids), ids, width)

            def call(head=head, growth=growth, rows=rows, cache=cache, values=values, ids=ids) -> None:
                scores = head.expand(growth, rows, cache, values, ids)
                select_nodes(growth, rows, scores, ids, width, early=True)

            calls.append(torch.no_grad()(call))
        return calls


def pool_cases(setting: Setting) -> Iterator[Case]:
    """The pool of all draft rows."""
    shape = setting.shape
    for requests in setting.batches:
        rows = setting.depth * requests
        torch.manual_seed(requests)
        work = floor.candidate_pool(rows, shape.vocab, shape.pool)
        copies = range(setting.copies(work.bytes))
        logits = [setting.randn(rows, shape.vocab) * 3 for _ in copies]

        def check(logits: Tensor = logits[0]) -> dict[str, float]:
            got = candidate_pool(logits, shape.pool, shape.vocab, impl=setting.impl)
            want = candidate_pool(logits, shape.pool, shape.vocab, impl="torch")
            require_equal("candidate_pool", got[:2], want[:2])
            off = (got[2] - want[2]).abs().max().item()
            return {"logsumexp": require("candidate_pool: logsumexp", off, PLAIN_LIMIT)}

        yield Case(
            "candidate_pool", f"{rows} rows of {shape.vocab}, P={shape.pool}", work,
            [partial(candidate_pool, x, shape.pool, shape.vocab, impl=setting.impl) for x in logits], check,
        )  # fmt: skip


def weaver_cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """Prompt, round and whole proposals: all budgets for one batch, a middle one for the others."""
    shape = setting.shape
    first, *others = setting.batches
    main = 32 if 32 in setting.budgets else setting.budgets[-1]
    weavers = Weavers(setting, min(HEADS, setting.copies(1 << 26)))
    for requests, budgets in [(first, setting.budgets), *((r, (main,)) for r in others)]:
        inputs = [Inputs(setting, requests, seed) for seed in range(len(weavers.heads))]
        if "weaver_prompt" in wanted:
            yield Case(
                "weaver_prompt", f"{setting.depth + 1} rows, R={requests}",
                floor.weaver_prompt(weavers.config, setting.depth, requests),
                weavers.prompt_calls(requests, inputs), partial(weavers.check_prompt, inputs[0]),
            )  # fmt: skip
        for budget in budgets:
            width = min(max(1, -(-budget // 16)), budget)
            rounds = count_rounds(budget, width, min(CHILDREN, shape.pool), setting.depth)
            check = partial(weavers.check, inputs[0], budget)
            if "weaver_round" in wanted:
                yield Case(
                    "weaver_round", f"B={budget}, {width} nodes, R={requests}",
                    floor.weaver_round(weavers.config, width * requests, shape.pool),
                    weavers.round_calls(requests, budget, width, inputs), check,
                )  # fmt: skip
            if "weaver_proposal" in wanted:
                yield Case(
                    "weaver_proposal", f"B={budget}, {rounds} rounds, R={requests}",
                    floor.weaver_proposal(
                        weavers.config, shape.vocab, setting.depth, shape.pool, width, rounds, requests
                    ),
                    [partial(x.propose, p, budget) for x, p in zip(inputs, weavers.proposers, strict=True)],
                    check,
                )  # fmt: skip


def plain_cases(setting: Setting, name: str) -> Iterator[Case]:
    """The two proposals without a Weaver head; their floor is that of the pool."""
    vocab = setting.shape.vocab
    makers: dict[str, Any] = {"ddtree": DDTreeProposer, "chain": ChainProposer}
    proposer, plain = (makers[name](vocab, impl=impl) for impl in (setting.impl, "torch"))
    budget = setting.depth if name == "chain" else (32 if 32 in setting.budgets else setting.budgets[-1])
    for requests in setting.batches:
        pool = 1 if name == "chain" else min(budget, proposer.largest_pool)
        work = floor.candidate_pool(setting.depth * requests, vocab, pool)
        inputs = [Inputs(setting, requests, seed) for seed in range(setting.copies(work.bytes))]

        def check(x: Inputs = inputs[0]) -> dict[str, float]:
            got, want = (x.propose(p, budget) for p in (proposer, plain))
            return {"growth": check_growth(name, got, want, PLAIN_LIMIT)}

        yield Case(
            name, f"B={budget}, R={requests}", work,
            [partial(x.propose, proposer, budget) for x in inputs], check,
        )  # fmt: skip


def cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """The cases of this file's kernels."""
    if "candidate_pool" in wanted:
        yield from pool_cases(setting)
    if wanted & {"weaver_prompt", "weaver_round", "weaver_proposal"}:
        yield from weaver_cases(setting, wanted)
    for name in ("ddtree", "chain"):
        if name in wanted:
            yield from plain_cases(setting, name)
