# SPDX-License-Identifier: Apache-2.0
"""The least that each kernel has to do: bytes that must pass between memory and chip, and operations.

Every input is counted as read once and every output as written once, at the size it has in memory; a
multiply-add is two operations. A kernel's floor is the longer of bytes over the measured memory rate and
operations over the measured bf16 matmul rate. A kernel whose inputs still lie in the L2 cache can beat it.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_weaver.kernels.ancestors import num_mask_words
from vllm_weaver.kernels.gdn_buffers import GdnShape
from vllm_weaver.spec_decode.weaver import WeaverConfig

ACTIVATION = 2  # bytes of a bf16 number


@dataclass(frozen=True)
class Work:
    """Bytes moved and operations done."""

    bytes: float
    operations: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.bytes + other.bytes, self.operations + other.operations)

    def __mul__(self, times: int) -> Work:
        return Work(self.bytes * times, self.operations * times)


@dataclass(frozen=True)
class Ceilings:
    """What the device was measured to do in this run: bytes copied (read plus written), bf16 operations."""

    bytes_per_second: float
    operations_per_second: float

    def floor_us(self, work: Work) -> float:
        """Microseconds that the work takes at least."""
        return 1e6 * max(work.bytes / self.bytes_per_second, work.operations / self.operations_per_second)


def gdn_verify(shape: GdnShape, nodes: int, requests: int, width: int) -> Work:
    """Convolution and tree verify of one layer: the state is read, the stash is written."""
    h, k, v = shape.heads, shape.k_dim, shape.v_dim
    keys = shape.key_heads * k
    read = ACTIVATION * (nodes * (shape.channels + 2 * h) + (width - 1) * shape.channels) + 4 * h * k * v
    stash = ACTIVATION * (shape.channels + keys) + 4 * (shape.key_heads + h + h * v)
    written = nodes * (stash + ACTIVATION * h * v)
    pairs = nodes * (nodes + 1) // 2
    multiply_adds = nodes * (width * shape.channels + 2 * h * k * v) + pairs * (2 * keys + 2 * h * v)
    weights = Work(ACTIVATION * width * shape.channels)
    return Work(read + written, 2 * multiply_adds) * requests + weights


def gdn_commit(shape: GdnShape, layers: int, path: int, requests: int) -> Work:
    """All layers' states read and written once, and the stash of the path read."""
    h, k, v = shape.heads, shape.k_dim, shape.v_dim
    stash = ACTIVATION * shape.key_heads * k + 4 * (shape.key_heads + h + h * v)
    one = Work(2 * 4 * h * k * v + path * stash, 2 * path * h * k * v)
    return one * (layers * requests)


def conv_commit(shape: GdnShape, layers: int, requests: int, width: int) -> Work:
    """All layers' columns written; old ones or inputs of the path read."""
    return Work(2 * ACTIVATION * (width - 1) * shape.channels) * (layers * requests)


def attention(
    nodes: int, prefix: int, requests: int, heads: int, kv_heads: int, dim: int, cache_bytes: int
) -> Work:
    """Keys and values of prefix and tree read once, queries read (as wide as the cache), outputs written."""
    cache = (prefix + nodes) * kv_heads * 2 * dim * cache_bytes
    rows = nodes * heads * dim * (cache_bytes + ACTIVATION)
    # A node sees the prefix and, of the tree, its ancestors alone: the tree's part is not counted.
    return Work(cache + rows, 4 * nodes * prefix * heads * dim) * requests


def move_rows(rows: int, row_bytes: int) -> Work:
    """Rows read and written."""
    return Work(2 * rows * row_bytes)


def candidate_pool(rows: int, vocab: int, pool: int) -> Work:
    """The logits read once; values, ids and one sum a row written."""
    return Work(rows * (ACTIVATION * vocab + 12 * pool + 4))


def weaver_prompt(config: WeaverConfig, depth: int, requests: int) -> Work:
    """The weights that the prompt needs (of the last block keys and values alone), rows in, cache out."""
    r, rows = config.d_rank, (depth + 1) * requests
    weights = config.d_model * r + (config.num_layers - 1) * _block(config) + 2 * r * r
    numbers = weights + rows * (config.d_model + 2 * r * config.num_layers)
    return Work(ACTIVATION * numbers, 2 * rows * weights)


def _block(config: WeaverConfig) -> int:
    return config.d_rank * (4 * config.d_rank + 3 * config.mlp_dim)


def weaver_round(config: WeaverConfig, rows: int, pool: int) -> Work:
    """The blocks' weights once, and for each of the new rows its candidates' residual rows and logits."""
    weights = config.num_layers * _block(config)
    candidates = rows * pool
    read = ACTIVATION * (weights + candidates * config.d_rank) + 12 * candidates
    return Work(read, 2 * (rows * weights + candidates * config.d_rank))


def weaver_proposal(
    config: WeaverConfig, vocab: int, depth: int, pool: int, width: int, rounds: int, requests: int
) -> Work:
    """Pool, prompt, the root's round and the others; every round reads the weights anew."""
    growth = weaver_round(config, requests, pool) + weaver_round(config, requests * width, pool) * (
        rounds - 1
    )
    return candidate_pool(depth * requests, vocab, pool) + weaver_prompt(config, depth, requests) + growth


def row_argmax(rows: int, vocab: int) -> Work:
    """The logits read once."""
    return Work(rows * (ACTIVATION * vocab + 8))


def greedy_walk(nodes: int, requests: int) -> Work:
    """Tokens, parents and the target's ids read; path and sampled tokens written."""
    return Work(requests * nodes * (8 + 4 + 8 + 4 + 8))


def ancestor_masks(nodes: int, requests: int) -> Work:
    """Parents read, mask words written."""
    return Work(requests * nodes * 4 * (1 + num_mask_words(nodes)))


def fill_step(nodes: int, requests: int) -> Work:
    """Trees read; trees, masks and path written; positions read and written, shift and ids written."""
    tree = 16
    return Work(requests * nodes * (2 * tree + 4 + 4 * num_mask_words(nodes) + 8 + 8 + 8 + 4))


def store_trees(nodes: int, requests: int) -> Work:
    """Trees with log-probabilities read and written, draft tokens written."""
    return Work(requests * nodes * (2 * 20 + 8))


def row_statistics(rows: int, vocab: int) -> Work:
    """The logits, in fp32, read once; three numbers a row written."""
    return Work(rows * (4 * vocab + 16))


def traversal_walk(nodes: int, requests: int) -> Work:
    """Trees, log-probabilities and the logits of their tokens read; a list of tokens written."""
    return Work(requests * nodes * (16 + 4 + 4 + 8))


def bonus_rows(requests: int, vocab: int) -> Work:
    """A row of fp32 logits a request, read and written."""
    return Work(2 * 4 * requests * vocab)


def walk_record(nodes: int, requests: int) -> Work:
    """Paths and parents read; two numbers a request and the totals written."""
    return Work(requests * (8 * nodes + 8 + 8) + 32)


def state_slots(groups: int, requests: int) -> Work:
    """Two block ids a group and request read and written; lengths, paths and columns of every request."""
    return Work(requests * (2 * 8 * groups + 40))
