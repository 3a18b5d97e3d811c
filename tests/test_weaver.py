# SPDX-License-Identifier: Apache-2.0
"""The Weaver head against a second, scalar implementation of its definition, and its incremental step against
the whole-tree forward."""

import math
import random
import weakref
from dataclasses import asdict, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.trees import SIZES, ancestors, mixed_batch
from vllm_weaver.kernels.ancestors import unpack_mask
from vllm_weaver.spec_decode import weaver
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead, node_rows, pool_logprobs

CONFIG = WeaverConfig(
    d_model=24, d_embed=20, d_rank=16, num_layers=2, num_heads=2, mlp_dim=12, K=7, candidate_pool_size=32
)
VOCAB = 61


def random_head(
    config: WeaverConfig = CONFIG, seed: int = 0, dtype: torch.dtype = torch.float64
) -> WeaverHead:
    """A head with every parameter random, norms included."""
    head = WeaverHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.4)
    return head.to(dtype)


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def norm(x: Tensor, p: dict[str, Tensor], name: str) -> Tensor:
    return x / math.sqrt(float((x * x).mean()) + 1e-6) * p[f"{name}.weight"] + p[f"{name}.bias"]


def rotated(x: Tensor, position: int, base: float) -> Tensor:
    half = len(x) // 2
    out = torch.empty_like(x)
    for i in range(half):
        angle = position * base ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[half + i] * math.sin(angle)
        out[half + i] = x[half + i] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def rows_by_hand(
    head: WeaverHead, rows: list[Tensor], positions: list[int], sees: list[list[int]]
) -> list[Tensor]:
    """All blocks over single rows; row i attends to the rows sees[i]."""
    p, config = dict(head.state_dict()), head.config
    for layer in range(config.num_layers):
        at = f"blocks.{layer}."
        projected = []
        for x, position in zip(rows, positions, strict=True):
            qkv = (p[at + "qkv_proj.weight"] @ norm(x, p, at + "norm_attn")).reshape(3, config.num_heads, -1)
            q, k = ([rotated(head_row, position, config.rope_base) for head_row in part] for part in qkv[:2])
            projected.append((q, k, qkv[2]))
        out = []
        for i, x in enumerate(rows):
            heads = []
            for h in range(config.num_heads):
                scores = torch.stack([projected[i][0][h] @ projected[j][1][h] for j in sees[i]])
                weights = torch.softmax(scores * config.head_dim**-0.5, 0)
                heads.append(sum(w * projected[j][2][h] for w, j in zip(weights, sees[i], strict=True)))
            x = x + p[at + "o_proj.weight"] @ torch.cat(heads)
            wide = p[at + "gate_up_proj.weight"] @ norm(x, p, at + "norm_mlp") + p[at + "gate_up_proj.bias"]
            gate, up = wide[: config.mlp_dim], wide[config.mlp_dim :]
            inner = gate / (1 + torch.exp(-gate)) * up
            out.append(x + p[at + "down_proj.weight"] @ inner + p[at + "down_proj.bias"])
        rows = out
    return rows


@pytest.mark.parametrize("depth", [1, 4, 7])
def test_against_the_definition(depth: int) -> None:
    head = random_head()
    p = dict(head.state_dict())
    embed, lm_head = randn(VOCAB, 20, seed=1), randn(VOCAB, 24, seed=2)
    hidden, draft_hidden = randn(1, 24, seed=3), randn(1, depth, 24, seed=4)
    parents, depths = [-1, 0, 0, 1, 3, 3, 2], [0, 1, 1, 2, 3, 3, 2]
    tokens = [7, 3, 60, 3, 0, 5, 44]
    rows = [
        p["proposal_in.weight"] @ norm(x, p, "output_norm") + p["proposal_in.bias"]
        for x in [hidden[0], *draft_hidden[0]]
    ]
    rows += [p["token_in.weight"] @ norm(embed[t], p, "embed_norm") + p["token_in.bias"] for t in tokens]
    prompt = list(range(depth + 1))
    positions = prompt + [min(t, depth - 1) + 1 for t in depths]
    sees = [prompt[: i + 1] for i in prompt]
    sees += [prompt + [depth + 1 + a for a in ancestors(parents, i)] for i in range(len(parents))]
    expected = rows_by_hand(head, rows, positions, sees)[depth + 1 :]
    expected = torch.stack([norm(x, p, "out_norm") for x in expected])

    visible = torch.zeros(7, 7, dtype=torch.bool)
    for i in range(7):
        visible[i, ancestors(parents, i)] = True
    table = head.token_table(embed)
    rope = node_rows(torch.tensor([depths]), depth) + 1
    queries = head.forward_nodes(
        table[torch.tensor([tokens])], rope, visible, head.prompt(hidden, draft_hidden)
    )
    torch.testing.assert_close(queries[0], expected, rtol=1e-9, atol=1e-9)

    ids = torch.tensor([3, 9, -1, 60])
    logits = randn(4, seed=5)
    residual = head.residual_table(lm_head)
    scores = logits + (lm_head @ p["lm_head_query_in.weight"])[ids] @ expected[2]
    scores[2] = -math.inf
    got = pool_logprobs(logits, ids, residual[ids.clamp(min=0)], queries[0, 2])
    torch.testing.assert_close(got, torch.log_softmax(scores, 0), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("n", SIZES)
def test_steps_equal_the_whole_forward(n: int) -> None:
    """Rounds of uneven width, four different trees, rows without a node in between; NaN wherever nothing was
    written."""
    head = random_head()
    tree = mixed_batch(n, 4, VOCAB + 200, seed=n)
    table = randn(VOCAB + 200, 16, seed=n)
    with torch.no_grad():
        prefix = head.prompt(randn(4, 24, seed=1), randn(4, 5, 24, seed=2))
        x = table[tree.tokens.clamp(min=0)]
        rope = node_rows(tree.depths, 5) + 1
        words = tree.mask_words()
        expected = head.forward_nodes(x, rope, unpack_mask(words, n), prefix)
        cache = head.new_node_kv(4, n, torch.device("cpu"))
        cache.keys.fill_(math.nan)
        cache.values.fill_(math.nan)
        start, rng, valid = 0, random.Random(n), tree.valid()
        while start < n:
            width = min(n - start, rng.choice([1, 2, 16]) if n < 60 else 40)
            at = slice(start, start + width)
            slots = torch.arange(start, start + width).expand(4, -1).masked_fill(~valid[:, at], -1)
            got = head.step_nodes(x[:, at], rope[:, at], slots, words[:, at], prefix, cache)
            torch.testing.assert_close(
                got[valid[:, at]], expected[:, at][valid[:, at]], rtol=1e-10, atol=1e-10
            )
            start += width
        written = ~cache.keys[:, :, :n].isnan().any(-1).any(-1)
        assert torch.equal(written, valid.expand(2, -1, -1))


def test_requests_do_not_mix() -> None:
    head = random_head()
    hidden, draft_hidden = randn(3, 24, seed=1), randn(3, 4, 24, seed=2)
    alone = head.prompt(hidden[1:2], draft_hidden[1:2])
    hidden[0], draft_hidden[2] = math.nan, math.inf
    together = head.prompt(hidden, draft_hidden)
    for layer in range(2):
        torch.testing.assert_close(together.keys[layer][1:2], alone.keys[layer], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(together.values[layer][1:2], alone.values[layer], rtol=1e-12, atol=1e-12)


def test_every_parameter_gets_a_gradient() -> None:
    head = random_head()
    table, residual = (
        head.token_table(randn(VOCAB, 20, seed=1)),
        head.residual_table(randn(VOCAB, 24, seed=2)),
    )
    prefix = head.prompt(randn(2, 24, seed=3), randn(2, 4, 24, seed=4))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    rope = node_rows(torch.tensor([0, 1, 2]), 4).expand(2, -1) + 1
    queries = head.forward_nodes(table[tokens], rope, torch.ones(3, 3).tril().bool(), prefix)
    ids = torch.tensor([[[1, 5, -1], [-1, -1, -1], [7, 8, 9]]] * 2)
    logprobs = pool_logprobs(randn(2, 3, 3, seed=5), ids, residual[ids.clamp(min=0)], queries)
    assert logprobs[:, 1].eq(-math.inf).all() and logprobs[:, 0, 2].eq(-math.inf).all()
    logprobs[:, [0, 2], 0].sum().backward()
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().sum() > 0, name


def test_new_head_scores_as_the_draft() -> None:
    head = WeaverHead(CONFIG)
    residual = head.residual_table(torch.randn(VOCAB, 24))
    logits = torch.randn(8)
    got = pool_logprobs(logits, torch.arange(8), residual[:8], torch.randn(16))
    torch.testing.assert_close(got, torch.log_softmax(logits, 0))


def test_hostile_scores_give_no_candidates() -> None:
    ids = torch.tensor([4, 5, 6])
    residual, query = torch.ones(3, 4), torch.ones(4)
    logits = torch.tensor([0.0, math.nan, math.inf])
    assert pool_logprobs(logits, ids, residual, query).tolist() == [0.0, -math.inf, -math.inf]
    assert pool_logprobs(torch.zeros(3), ids, residual, query * math.nan).tolist() == [-math.inf] * 3


class LiveBytes(TorchDispatchMode):
    """Most bytes of tensors that operations made and that were alive at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.most = 0
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for tensor in tree_leaves(result):
            storage = tensor.untyped_storage() if isinstance(tensor, Tensor) else None
            if storage is None or id(storage) in given or id(storage) in self.seen:
                continue
            self.seen.add(id(storage))
            size = storage.nbytes()
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.gone, id(storage), size)
        return result

    def gone(self, key: int, size: int) -> None:
        self.seen.discard(key)
        self.now -= size


@pytest.mark.parametrize("quantized", [False, True], ids=["plain", "quantized"])
def test_memory_of_building_tables_at_the_27b_shape(quantized: bool) -> None:
    """On the meta device: what is alive besides the tables stays below half a GiB."""
    vocab, hidden, rank = 248320, 5120, 2048
    shape = dict(d_model=hidden, d_embed=hidden, d_rank=rank, num_layers=1, num_heads=16, mlp_dim=1365, K=15)
    with torch.device("meta"):
        head = WeaverHead(WeaverConfig(**shape, candidate_pool_size=512)).to(torch.bfloat16)
        weight = torch.empty(vocab, hidden, dtype=torch.bfloat16)
    lm_head = (
        (lambda rows: torch.empty(len(rows), vocab, dtype=rows.dtype, device="meta")) if quantized else weight
    )
    with torch.no_grad(), LiveBytes() as live:
        tables = head.token_table(weight), head.residual_table(lm_head)
    assert live.now == sum(table.nbytes for table in tables) == 2 * vocab * rank * 2
    extra = live.most - live.now
    assert 0 < extra < 1 << 29, f"{extra / 2**20:.0f} MiB"


def test_tables_of_a_quantized_head_and_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    head = random_head()
    weight, embed = randn(VOCAB, 24, seed=2), randn(VOCAB, 20, seed=1)
    by_method = head.residual_table(lambda rows: rows @ weight.T)
    torch.testing.assert_close(by_method, head.residual_table(weight), rtol=1e-12, atol=1e-12)
    assert by_method.is_contiguous()
    whole = head.token_table(embed), head.residual_table(weight)
    monkeypatch.setattr(weaver, "SLICE_BYTES", 4 * 20 * 7)
    monkeypatch.setattr(weaver, "HEAD_ROWS", 3)
    asked: list[list[int]] = []

    def lookup(ids: Tensor) -> Tensor:
        asked.append(ids.tolist())
        return embed[ids]

    for table in (head.token_table(embed), head.token_table(lookup, VOCAB)):
        torch.testing.assert_close(table, whole[0], rtol=1e-12, atol=1e-12)
    assert sum(asked, []) == list(range(VOCAB)) and max(map(len, asked)) == 7
    for lm_head in (weight, lambda rows: rows @ weight.T):
        torch.testing.assert_close(head.residual_table(lm_head), whole[1], rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="a lookup needs num_rows"):
        head.token_table(lookup)
    with pytest.raises(ValueError, match=r"returned shape \(61, 3\), expected \(3, vocabulary\)"):
        head.residual_table(lambda rows: (rows @ weight.T).T)
    with pytest.raises(ValueError, match="lm_head has width 23.*d_model is 24"):
        head.residual_table(weight[:, 1:])
    with pytest.raises(ValueError, match="embedding has width 19.*d_embed is 20"):
        head.token_table(embed[:, 1:])


@pytest.mark.parametrize("depth", [0, 8])
def test_depth_beyond_the_checkpoint_is_refused(depth: int) -> None:
    with pytest.raises(ValueError, match=f"draft depth is {depth}.*1 to 7"):
        random_head().prompt(randn(1, 24, seed=1), randn(1, depth, 24, seed=2))


@pytest.mark.parametrize(
    "key, value",
    [
        ("d_model", 0),
        ("d_rank", 16.0),
        ("num_layers", True),
        ("K", -1),
        ("candidate_pool_size", "512"),
        ("mlp_dim", None),
        ("encoder_mode", 2),
        ("encoder_mode", True),
        ("score_head", 1),
        ("activation", "gelu"),
        ("rope_base", 0),
        ("rope_base", math.inf),
        ("rope_base", "1e4"),
        ("num_heads", 3),
        ("num_heads", 16),
        ("dropout", 0.1),
    ],
)
def test_config_names_key_and_value(key: str, value: object) -> None:
    with pytest.raises(ValueError) as caught:
        WeaverConfig.from_mapping({**asdict(CONFIG), key: value})
    message = str(caught.value)
    assert key in message and str(value) in message and "\n" not in message and len(message) < 400


def test_config_defaults_and_missing_keys() -> None:
    mapping = asdict(CONFIG)
    for key in ("encoder_mode", "score_head", "activation", "rope_base"):
        del mapping[key]
    assert WeaverConfig.from_mapping(mapping) == CONFIG
    del mapping["K"], mapping["d_rank"]
    with pytest.raises(ValueError, match="K, d_rank"):
        WeaverConfig.from_mapping(mapping)
    with pytest.raises(ValueError, match="list"):
        WeaverConfig.from_mapping([])  # type: ignore[arg-type]
    assert replace(CONFIG, rope_base=500).rope_base == 500
