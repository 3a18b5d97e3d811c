# SPDX-License-Identifier: Apache-2.0
"""Benchmarks of tree attention beside FlashAttention-3, of KV compaction and of the re-laying of rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from bench_lib import kernels_floor as floor
from bench_lib.kernels_common import Call, Case, Setting, Trees, relative_error, require, require_equal
from vllm_weaver.kernels.gather_rows import gather_rows
from vllm_weaver.kernels.kv_compact import KvCompactPlan, kv_compact
from vllm_weaver.kernels.tree_attention import tree_attention

NAMES = ("tree_attention", "kv_compact", "gather_rows")
LIMIT = 1e-2  # probabilities and outputs are rounded to bf16


class Attention:
    """Paged caches and queries of one step at one prefix length, in several copies."""

    def __init__(self, setting: Setting, nodes: int, prefix: int, requests: int, fp8: bool) -> None:
        torch.manual_seed(nodes)
        self.setting, self.trees, self.fp8 = setting, Trees(setting, nodes, requests), fp8
        shape, page, device = setting.shape, setting.page, setting.device
        self.prefix, self.dim = prefix, shape.head_dim
        dtype = torch.float8_e4m3fn if fp8 else setting.dtype
        pages = -(-(prefix + nodes) // page)
        blocks = 1 + requests * pages
        ids = torch.randperm(blocks - 1, device=device) + 1  # block 0 is vLLM's null block
        self.table = ids.view(requests, pages).to(torch.int32)
        self.work = floor.attention(
            nodes, prefix, requests, shape.heads, shape.kv_heads, self.dim, dtype.itemsize
        )
        copies = range(setting.copies(self.work.bytes))
        sizes = (blocks, shape.kv_heads, page, 2 * self.dim)
        self.kv = [setting.randn(*sizes).to(dtype) for _ in copies]
        self.q = [setting.randn(self.trees.rows, shape.heads, self.dim).to(dtype) for _ in copies]
        self.out = torch.empty(self.trees.rows, shape.heads, self.dim, device=device, dtype=setting.dtype)
        self.seq_lens = torch.full((requests,), prefix + nodes, dtype=torch.int32, device=device)
        one = torch.ones(1, device=device)
        self.scales: dict[str, Any] = {"q_scale": one, "k_scale": one, "v_scale": one} if fp8 else {}

    def views(self, copy: int) -> tuple[Tensor, ...]:
        """Keys and values [blocks, page, heads, dim], as vLLM's backend sees them."""
        return self.kv[copy].transpose(1, 2).split(self.dim, dim=-1)

    def tree(self, copy: int, out: Tensor, reference: bool = False) -> None:
        """Runs the kernel."""
        trees = self.trees
        tree_attention(
            self.q[copy], *self.views(copy), self.table, trees.query_start_loc, self.seq_lens,
            trees.num_nodes, trees.ancestors, scale=self.dim**-0.5, out=out,
            impl="torch" if reference else self.setting.impl, **self.scales,
        )  # fmt: skip

    def check(self) -> dict[str, float]:
        """Outputs against fp32."""
        want = torch.zeros_like(self.out, dtype=torch.float32)
        got = torch.full_like(self.out, torch.nan)
        self.tree(0, want, reference=True)
        self.tree(0, got)
        return {"outputs": require("tree_attention", relative_error(got, want), LIMIT)}

    def calls(self) -> list[Call]:
        """One call a copy."""
        return [lambda copy=copy: self.tree(copy, self.out) for copy in range(len(self.kv))]

    def flash_calls(self) -> dict[str, list[Call]]:
        """FlashAttention-3, causal, at the same widths: with as many splits as in vLLM's CUDA graphs, and
        with its own choice."""
        from vllm.vllm_flash_attn import flash_attn_varlen_func

        trees, shape = self.trees, self.setting.shape
        extra = {}
        if self.fp8:
            scale = torch.ones(trees.requests, shape.kv_heads, device=self.out.device)
            extra = {"q_descale": scale, "k_descale": scale, "v_descale": scale}

        def call(copy: int, splits: int) -> None:
            k, v = self.views(copy)
            flash_attn_varlen_func(
                q=self.q[copy], k=k, v=v, out=self.out, cu_seqlens_q=trees.query_start_loc,
                max_seqlen_q=trees.nodes, seqused_k=self.seq_lens, max_seqlen_k=self.prefix + trees.nodes,
                softmax_scale=self.dim**-0.5, causal=True, block_table=self.table, fa_version=3,
                num_splits=splits, **extra,
            )  # fmt: skip

        return {
            f"splits {splits}": [lambda copy=copy, s=splits: call(copy, s) for copy in range(len(self.kv))]
            for splits in (32, 0)
        }


def attention_cases(setting: Setting) -> Iterator[Case]:
    """Tree attention at all sizes and types for one batch; the main size for the others."""
    first, *others = setting.batches
    kinds = (False, True) if setting.fp8 else (False,)
    sizes = [(n, p, first, f) for f in kinds for p in setting.prefixes for n in setting.attention_nodes]
    sizes += [(setting.main_nodes, setting.prefixes[-1], requests, False) for requests in others]
    for nodes, prefix, requests, fp8 in sizes:
        problem = Attention(setting, nodes, prefix, requests, fp8)
        size = f"{nodes} nodes, prefix {prefix}, R={requests}, {'fp8' if fp8 else 'bf16'}"
        yield Case(
            "tree_attention", size, problem.work, problem.calls(), problem.check, "FlashAttention-3",
            problem.flash_calls,
        )  # fmt: skip


def compact_cases(setting: Setting) -> Iterator[Case]:
    """KV compaction over all attention layers; the calls differ in where the trees begin."""
    shape, nodes, page = setting.shape, setting.main_nodes, setting.page
    layers, device = setting.attention_layers, setting.device
    for requests in setting.batches:
        torch.manual_seed(requests)
        trees = Trees(setting, nodes, requests)
        row_bytes = 2 * shape.kv_heads * shape.head_dim * setting.dtype.itemsize
        work = floor.move_rows(trees.moved_rows() * layers, row_bytes)
        copies = setting.copies(work.bytes)
        pages = -(-(copies + 1) * nodes // page)
        sizes = (1 + requests * pages, shape.kv_heads, page, 2 * shape.head_dim)
        caches = [setting.randn(*sizes).transpose(1, 2) for _ in range(layers)]
        table = torch.arange(1, 1 + requests * pages, dtype=torch.int32, device=device).view(requests, pages)
        bases = [torch.full((requests,), nodes * i, dtype=torch.int64, device=device) for i in range(copies)]

        def call(caches: list[Tensor], base: Tensor, impl: Any, plan: Any = None, table: Tensor = table,
                 trees: Trees = trees) -> None:  # fmt: skip
            plan = plan or KvCompactPlan.build(caches, [table] * len(caches))
            kv_compact(plan, base, trees.path, trees.num_path, num_nodes=trees.num_nodes, impl=impl)

        def check(
            caches: list[Tensor] = caches, bases: list[Tensor] = bases, call: Any = call
        ) -> dict[str, float]:
            want = [cache.clone() for cache in caches]
            call(want, bases[-1], "torch")
            call(caches, bases[-1], setting.impl)
            return require_equal("kv_compact", caches, want)

        plan = KvCompactPlan.build(caches, [table] * layers)
        yield Case(
            "kv_compact", f"{layers} layers, path {len(trees.paths[0])}, R={requests}", work,
            [lambda base=b, plan=plan, call=call: call([], base, setting.impl, plan) for b in bases],
            check,
        )  # fmt: skip


def gather_cases(setting: Setting) -> Iterator[Case]:
    """The last hidden states and those of the layers that the draft reads, in one launch."""
    shape, nodes = setting.shape, setting.main_nodes
    for requests in setting.batches:
        torch.manual_seed(requests)
        trees = Trees(setting, nodes, requests)
        tensors = 1 + shape.draft_layers
        work = floor.move_rows(trees.moved_rows() * tensors, shape.hidden * setting.dtype.itemsize)
        groups = [
            [setting.randn(trees.rows, shape.hidden) for _ in range(tensors)]
            for _ in range(setting.copies(work.bytes))
        ]

        def call(rows: list[Tensor], impl: Any = setting.impl, trees: Trees = trees) -> None:
            gather_rows(rows, trees.query_start_loc, trees.path, impl=impl)

        def check(group: list[Tensor] = groups[0], call: Any = call) -> dict[str, float]:
            want = [rows.clone() for rows in group]
            call(want, "torch")
            call(group)
            return require_equal("gather_rows", group, want)

        yield Case(
            "gather_rows", f"{tensors} tensors of {shape.hidden}, {nodes} nodes, R={requests}", work,
            [lambda group=group, call=call: call(group) for group in groups], check,
        )  # fmt: skip


def cases(setting: Setting, wanted: set[str]) -> Iterator[Case]:
    """The cases of this file's kernels."""
    makers = {"tree_attention": attention_cases, "kv_compact": compact_cases, "gather_rows": gather_cases}
    for name, make in makers.items():
        if name in wanted:
            yield from make(setting)
