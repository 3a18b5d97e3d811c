# SPDX-License-Identifier: Apache-2.0
"""The three proposals against sequential, heap-based searches in float64; limits, hostile inputs, and no host
sync."""

import heapq
import math
import random

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from tests.test_weaver import random_head
from tests.trees import ancestors
from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.kernels.greedy_walk import greedy_walk, row_argmax
from vllm_weaver.spec_decode.proposers import (
    ChainProposer,
    DDTreeProposer,
    TreeProposer,
    WeaverProposer,
    count_rounds,
)
from vllm_weaver.spec_decode.tree import Tree
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead

VOCAB, WIDTH, D_MODEL, D_EMBED = 97, 104, 24, 20
BUDGETS = (1, 2, 7, 16, 33, 64, 129)
Nodes = list[tuple[int, int, int, float]]
"""Token, parent, depth and log-probability of every node."""


def config(pool: int = 40, k: int = 15) -> WeaverConfig:
    return WeaverConfig(D_MODEL, D_EMBED, 16, 2, 2, 12, K=k, candidate_pool_size=pool)


def weaver(
    pool: int | None = None,
    dtype: torch.dtype = torch.float64,
    impl: str = "auto",
    device: torch.device | str = "cpu",
) -> WeaverProposer:
    head = random_head(config(), seed=3, dtype=dtype).to(device)
    generator = torch.Generator().manual_seed(4)
    embed = torch.randn(VOCAB, D_EMBED, generator=generator).to(device, dtype)
    lm_head = torch.randn(VOCAB, D_MODEL, generator=generator).to(device, dtype)
    with torch.no_grad():
        tables = head.token_table(embed), head.residual_table(lm_head) * 0.2
    return WeaverProposer(head, *tables, pool, impl=impl)


def proposers() -> list[TreeProposer]:
    return [weaver(), DDTreeProposer(VOCAB), ChainProposer(VOCAB)]


def inputs(requests: int, depth: int, seed: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Hidden states, logits with a padded tail that would win, and root tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(requests, D_MODEL, generator=generator).to(dtype)
    draft_hidden = torch.randn(requests, depth, D_MODEL, generator=generator).to(dtype)
    logits = torch.randn(requests, depth, WIDTH, generator=generator).mul(3).to(dtype)
    logits[..., VOCAB:] = 99.0
    return [hidden, draft_hidden, logits, torch.randint(0, VOCAB, (requests,), generator=generator)]


def search_weaver(proposer: WeaverProposer, args: list[Tensor], r: int, budget: int, limit: int) -> Nodes:
    """One request, one node at a time, the head run over the whole tree for every expansion."""
    head = proposer.head
    hidden, draft_hidden, logits, roots = (a[r : r + 1] for a in args)
    depth = logits.shape[1]
    width = min(max(1, math.ceil(budget / 16)), budget)
    prefix = head.prompt(hidden, draft_hidden)
    nodes: Nodes = [(int(roots[0]), -1, 0, 0.0)]
    frontier: list[tuple[float, int, int, int]] = []
    published = 0

    def expand(node: int) -> None:
        nonlocal published
        path = ancestors([n[1] for n in nodes], node)
        x = proposer.token_table[[nodes[i][0] for i in path]][None]
        rope = torch.tensor([[min(nodes[i][2], depth - 1) + 1 for i in path]])
        causal = torch.ones(len(path), len(path), dtype=torch.bool).tril()
        query = head.forward_nodes(x, rope, causal, prefix)[0, -1]
        row = logits[0, min(nodes[node][2], depth - 1), :VOCAB].tolist()
        pool = sorted((t for t in range(VOCAB) if math.isfinite(row[t])), key=lambda t: (-row[t], t))
        pool = pool[: proposer.pool_size]
        scores = (
            torch.tensor([row[t] for t in pool], dtype=torch.float64) + proposer.residual_table[pool] @ query
        )
        logprobs = torch.log_softmax(scores, 0).tolist()
        best = sorted(range(len(pool)), key=lambda i: (-logprobs[i], i))[:8]
        for i in best if nodes[node][2] < limit else []:
            heapq.heappush(frontier, (-(nodes[node][3] + logprobs[i]), published, node, pool[i]))
            published += 1

    expand(0)
    while frontier and len(nodes) <= budget:
        taken = [heapq.heappop(frontier) for _ in range(min(width, len(frontier), budget + 1 - len(nodes)))]
        first = len(nodes)
        nodes += [(token, parent, nodes[parent][2] + 1, -score) for score, _, parent, token in taken]
        for node in range(first, len(nodes)):
            expand(node)
    return nodes


def search_ddtree(logits: Tensor, root: int, budget: int, limit: int, pool: int = 64) -> Nodes:
    """Best-first search with a heap: a popped node pushes its next sibling and its first child."""
    rows = []
    for row in logits[:, :VOCAB].double():
        finite = sorted((t for t in range(VOCAB) if row[t].isfinite()), key=lambda t: (-float(row[t]), t))
        total = torch.logsumexp(row[finite], 0) if finite else 0
        rows.append([(t, float(row[t] - total)) for t in finite[: min(budget, pool)]])
    nodes: Nodes = [(root, -1, 0, 0.0)]
    heap: list[tuple[float, tuple[int, ...], int]] = []

    def push(path: tuple[int, ...], parent: int) -> None:
        row = rows[len(path) - 1] if len(path) <= limit else []
        if path[-1] < len(row):
            heapq.heappush(heap, (-(nodes[parent][3] + row[path[-1]][1]), path, parent))

    push((0,), 0)
    while heap and len(nodes) <= budget:
        score, path, parent = heapq.heappop(heap)
        nodes.append((rows[len(path) - 1][path[-1]][0], parent, len(path), -score))
        push((*path[:-1], path[-1] + 1), parent)
        push((*path, 0), len(nodes) - 1)
    return nodes


def check(tree: Tree, r: int, nodes: Nodes) -> None:
    count = int(tree.num_nodes[r])
    assert count == len(nodes)
    assert tree.tokens[r, :count].tolist() == [n[0] for n in nodes]
    assert tree.parents[r, :count].tolist() == [n[1] for n in nodes]
    assert tree.depths[r, :count].tolist() == [n[2] for n in nodes]
    expected = torch.tensor([n[3] for n in nodes], dtype=torch.float32)
    torch.testing.assert_close(tree.logprobs[r, :count], expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("depth", [1, 2, 5, 15])
@pytest.mark.parametrize("budget", BUDGETS)
def test_weaver_is_the_sequential_search(budget: int, depth: int) -> None:
    proposer, args = weaver(), inputs(2, depth, seed=budget)
    tree = proposer.propose(*args, budget)
    tree.validate(VOCAB, depth)
    assert tree.num_slots == budget + 1
    for r in range(2):
        check(tree, r, search_weaver(proposer, args, r, budget, depth))


@torch.no_grad()
@pytest.mark.parametrize("pool", [1, 3, 8])
def test_weaver_with_a_small_pool(pool: int) -> None:
    proposer, args = weaver(pool), inputs(2, 6, seed=pool)
    tree = proposer.propose(*args, 40)
    tree.validate(VOCAB, 6)
    for r in range(2):
        check(tree, r, search_weaver(proposer, args, r, 40, 6))
    assert pool > 1 or tree.num_nodes.tolist() == [7, 7]


@torch.no_grad()
def test_weaver_ties_go_to_the_earlier_entry() -> None:
    """A new head scores as the draft; equal logits then make equal children of one node."""
    head = WeaverHead(config()).double()
    proposer = WeaverProposer(head, torch.zeros(VOCAB, 16).double(), torch.zeros(VOCAB, 16).double())
    args = inputs(2, 5, seed=1)
    args[2] = args[2].div(6).round()
    tree = proposer.propose(*args, 33)
    tree.validate(VOCAB, 5)
    siblings = tree.logprobs[0, 1:9].tolist()
    assert len(set(siblings)) < 8
    for r in range(2):
        check(tree, r, search_weaver(proposer, args, r, 33, 5))


@pytest.mark.parametrize("depth", [1, 2, 5, 15])
@pytest.mark.parametrize("budget", BUDGETS)
def test_ddtree_is_the_heap_search(budget: int, depth: int) -> None:
    args = inputs(3, depth, seed=budget)
    tree = DDTreeProposer(VOCAB).propose(*args, budget)
    tree.validate(VOCAB, depth)
    for r in range(3):
        check(tree, r, search_ddtree(args[2][r], int(args[3][r]), budget, depth))


@pytest.mark.parametrize("pool", [1, 3, 64])
def test_ddtree_takes_a_smaller_pool(pool: int) -> None:
    args = inputs(2, 5, seed=pool)
    tree = DDTreeProposer(VOCAB, pool).propose(*args, 17)
    for r in range(2):
        check(tree, r, search_ddtree(args[2][r], int(args[3][r]), 17, 5, pool))
    with pytest.raises(ValueError, match="candidate_pool_size is 0"):
        DDTreeProposer(VOCAB, 0)


@pytest.mark.parametrize("depth", [3, 20])
def test_ddtree_ties_go_by_rank_path(depth: int) -> None:
    """Rows of equal logits: whole levels tie. Powers of two keep sums exact, so that ties are real ones."""
    args = inputs(2, depth, seed=1)
    args[2][...] = -math.inf
    args[2][0, :, :4] = 0.0  # four tokens of probability 1/4 at every depth
    args[2][1, :, 7] = 0.0  # certain tokens: a child ties with its parent
    args[2][1, -1, 3] = 0.0
    proposer = DDTreeProposer(VOCAB)
    tree = proposer.propose(*args, 33)
    tree.validate(VOCAB, depth)
    for r in range(2):
        check(tree, r, search_ddtree(args[2][r], int(args[3][r]), 33, depth))


@pytest.mark.parametrize("budget, depth", [(1, 5), (5, 5), (9, 5), (3, 1)])
def test_chain(budget: int, depth: int) -> None:
    args = inputs(2, depth, seed=budget)
    tree = ChainProposer(VOCAB).propose(*args, budget)
    tree.validate(VOCAB, depth)
    steps = min(budget, depth)
    logprobs = torch.log_softmax(args[2][..., :VOCAB], -1)
    for r in range(2):
        tokens = args[2][r, :steps, :VOCAB].argmax(-1).tolist()
        score, nodes = 0.0, [(int(args[3][r]), -1, 0, 0.0)]
        for t, token in enumerate(tokens):
            score += float(logprobs[r, t, token])
            nodes.append((token, t, t + 1, score))
        check(tree, r, nodes)


@torch.no_grad()
@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: type(p).__name__)
def test_limits_of_single_requests(proposer: TreeProposer) -> None:
    args = inputs(5, 6, seed=2)
    max_depth = torch.tensor([6, 2, 0, 99, -3])
    max_nodes = torch.tensor([99, 99, 99, 5, 3])
    tree = proposer.propose(*args, 16, max_depth=max_depth, max_nodes=max_nodes)
    tree.validate(VOCAB, 6)
    full = proposer.propose(*args, 16)
    chain = isinstance(proposer, ChainProposer)
    assert tree.num_nodes.tolist() == ([7, 3, 1, 5, 1] if chain else [17, 17, 1, 5, 1])
    assert tree.depths.amax(1).tolist()[1:3] == [2, 0]
    for r, count in ((0, int(full.num_nodes[0])), (3, 5)):  # a limit on nodes cuts the same tree short
        assert torch.equal(tree.tokens[r, :count], full.tokens[r, :count])
        assert torch.equal(tree.parents[r, :count], full.parents[r, :count])
    if isinstance(proposer, DDTreeProposer):
        check(tree, 1, search_ddtree(args[2][1], int(args[3][1]), 16, 2))
    if isinstance(proposer, WeaverProposer):
        check(tree, 1, search_weaver(proposer, args, 1, 16, 2))


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 7, 33])
@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: type(p).__name__)
def test_hostile_rows_and_roots(proposer: TreeProposer, budget: int) -> None:
    """Every token stays in range, bad requests come back small, and their neighbours do not notice."""
    clean = inputs(8, 4, seed=7)
    args = [a.clone() for a in clean]
    args[2][0] = math.nan
    args[2][1] = -math.inf
    args[2][2] = math.inf
    args[2][3, 1:] = math.nan
    args[2][4, :, 5:VOCAB] = math.nan
    args[0][5], args[1][5] = math.nan, math.inf
    args[3][6] = -1
    args[3][7] = VOCAB
    tree = proposer.propose(*args, budget)
    tree.validate(VOCAB, 4)
    assert tree.num_nodes[:3].tolist() == [1, 1, 1] and tree.num_nodes[6:].tolist() == [0, 0]
    assert tree.depths[3].max() == 1
    assert (tree.tokens[4, 1 : int(tree.num_nodes[4])] < 5).all() and tree.num_nodes[4] > 1
    assert (tree.num_nodes[5] == 1) == isinstance(proposer, WeaverProposer)
    args[2][:], args[0][:], args[1][:] = math.nan, math.nan, math.nan
    for a, b in zip(args[:3], clean[:3], strict=True):
        a[4] = b[4]
    alone = proposer.propose(*args, budget)
    whole = proposer.propose(*clean, budget)
    assert torch.equal(alone.tokens[4], whole.tokens[4]) and torch.equal(alone.parents[4], whole.parents[4])


@torch.no_grad()
@pytest.mark.parametrize("kind", ["weaver", "ddtree", "chain"])
def test_triton_grows_the_same_trees(device: torch.device, kind: str) -> None:
    trees = []
    for impl in ("torch", "triton"):
        if kind == "weaver":
            proposer: TreeProposer = weaver(12, torch.float32, impl, device)
        else:
            proposer = (DDTreeProposer if kind == "ddtree" else ChainProposer)(VOCAB, impl=impl)
        args = [a.to(device) for a in inputs(3, 4, seed=5, dtype=torch.float32)]
        args[2][1, 2] = math.nan
        trees.append(proposer.propose(*args, 17))
    trees[1].validate(VOCAB, 4)
    for name in ("tokens", "parents", "depths", "num_nodes"):
        assert torch.equal(getattr(trees[0], name), getattr(trees[1], name)), name
    torch.testing.assert_close(trees[0].logprobs, trees[1].logprobs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("budget", [1, 33])
@pytest.mark.parametrize("proposer", proposers(), ids=lambda p: type(p).__name__)
def test_no_host_synchronisation(proposer: TreeProposer, budget: int) -> None:
    """Under fake tensors, reading any value on the host raises: from the proposal to the moved rows."""
    args = inputs(2, 5, seed=1)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tree = proposer.propose(
            *args, budget, max_depth=torch.tensor([5, 2]), max_nodes=torch.tensor([3, 99])
        )
        tree = tree.truncate(torch.tensor([1, 2]))
        logits = torch.randn(2 * (budget + 1), VOCAB)
        starts = torch.tensor([0, budget + 1, 2 * (budget + 1)])
        walk = greedy_walk(row_argmax(logits), starts, tree.tokens, tree.parents, tree.num_nodes, VOCAB)
        gather_rows(logits, starts, walk.path)
        assert tuple(walk.path.shape) == (2, budget + 1)
        with pytest.raises(DataDependentOutputException):
            walk.path.sum().item()


def grow(rng: random.Random, budget: int, width: int, children: int, depth: int, greed: float) -> int:
    """Rounds that a search needs whose preferences are random, or deep-first with probability `greed`."""
    frontier, nodes, rounds = [1] * children, 0, 0
    while frontier and nodes < budget:
        rng.shuffle(frontier)
        if rng.random() < greed:
            frontier.sort()
        taken = [frontier.pop() for _ in range(min(width, len(frontier), budget - nodes))]
        nodes += len(taken)
        frontier += [d + 1 for d in taken if d < depth for _ in range(children)]
        rounds += 1
    return rounds


def test_rounds_are_enough() -> None:
    rng = random.Random(0)
    for _ in range(3000):
        budget, depth, children = rng.randint(1, 256), rng.randint(1, 16), rng.randint(1, 8)
        width = rng.choice([min(max(1, math.ceil(budget / 16)), budget), rng.randint(1, budget)])
        needed = grow(rng, budget, width, children, depth, rng.choice([0.0, 0.5, 1.0]))
        assert needed <= count_rounds(budget, width, children, depth), (budget, width, children, depth)


@pytest.mark.parametrize(
    "budget, width, rounds", [(1, 1, 1), (16, 1, 16), (32, 2, 16), (128, 8, 16), (256, 16, 17)]
)
def test_usual_sizes_waste_no_round(budget: int, width: int, rounds: int) -> None:
    assert count_rounds(budget, width, children=8, depth=15) == rounds


def test_wrong_arguments_are_named() -> None:
    args = inputs(2, 4, seed=1)
    with pytest.raises(ValueError, match="budget must be at least 1, but is 0"):
        ChainProposer(VOCAB).propose(*args, 0)
    with pytest.raises(ValueError, match=r"draft_logits has shape \(2, 4, 104\).*at least 105"):
        DDTreeProposer(105).propose(*args, 4)
    with pytest.raises(ValueError, match=r"root_tokens has shape \(1,\)"):
        ChainProposer(VOCAB).propose(*args[:3], args[3][:1], 4)
    with pytest.raises(ValueError, match="vocab_size must be at least 1, but is 0"):
        ChainProposer(0)
    with pytest.raises(ValueError, match=r"candidate_pool_size is 41, but must be in \[1, 40\]"):
        weaver(41)
    head = WeaverHead(config())
    with pytest.raises(ValueError, match=r"residual_table has shape \(5, 16\)"):
        WeaverProposer(head, torch.zeros(6, 16), torch.zeros(5, 16))
