# SPDX-License-Identifier: Apache-2.0
"""Compiles every kernel for a GPU that is not there, at the shape of Qwen3.6-27B.

    python -m tests.kernels.compiling 120      # sm_120; prints JSON: shared memory in bytes, by kernel

The wrappers run on fake tensors that pass for a GPU's, so that tilings, warps and dtypes are those of that
GPU; their launches end where Triton's `warmup` does, with machine code from its assembler. Not for a process
with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.runtime import jit

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "scripts"))

from bench_lib import kernels_attention, kernels_gdn, kernels_step, kernels_weaver
from bench_lib.kernels_common import Setting
from bench_lib.shapes import SHAPES

from tests.kernels import SHARED_MEMORY
from vllm_weaver.kernels import (
    state_slots,
    traversal_rows,
    traversal_walk,
    tree_attention,
    tree_conv,
    walk_record,
)
from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
from vllm_weaver.spec_decode.weaver_growth import WeaverGrowth

MULTIPROCESSORS = {90: 132, 100: 148, 120: 188}  # H200, B200, RTX PRO 6000
CPU = torch.device("cpu")  # of the fake tensors: fakes of a GPU's cannot be written to without one
SHAPE = SHAPES["27b"]


class Driver:
    """As much of a Triton driver as compiling needs."""

    def __init__(self, capability: int) -> None:
        self.target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> GPUTarget:
        return self.target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def ints(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


def benchmarked() -> Iterator[Callable[[], Any]]:
    """What bench_kernels.py times, but for Weaver, whose heads it copies, which fakes do not allow."""
    setting = Setting.quick(CPU, SHAPE, 50 << 20)
    for family in (kernels_gdn, kernels_attention, kernels_step):
        for case in family.cases(setting, set(family.NAMES)):
            yield case.calls[0]
    for case in kernels_weaver.cases(setting, {"candidate_pool"}):
        yield case.calls[0]
    yield kernels_attention.Attention(setting, 33, 512, 1, fp8=True).calls()[0]


def weaver(depth: int = 15) -> Iterator[Callable[[], Any]]:
    """Growth of a few and of many rows."""
    torch.set_default_dtype(torch.bfloat16)
    config = WeaverConfig(
        SHAPE.hidden, SHAPE.hidden, SHAPE.rank, SHAPE.weaver_layers, SHAPE.weaver_heads, SHAPE.weaver_mlp,
        K=depth, candidate_pool_size=SHAPE.pool,
    )  # fmt: skip
    tables = [torch.zeros(SHAPE.vocab, SHAPE.rank) for _ in range(2)]
    growth = WeaverGrowth(WeaverHead(config), *tables)
    for requests, budget in ((1, 32), (8, 32), (16, 32)):
        pool = (requests, depth, SHAPE.pool)
        values, ids = torch.zeros(pool, dtype=torch.float32), ints(*pool, dtype=torch.int64)
        hidden = [torch.zeros(requests, *shape, SHAPE.hidden) for shape in ((), (depth,))]
        roots = ints(requests, dtype=torch.int64)
        yield lambda given=(*hidden, roots, values, ids), budget=budget: growth.grow(
            *given, SHAPE.vocab, budget, width=budget // 16, rounds=2, max_depth=None, max_nodes=None
        )


def others(requests: int = 4, nodes: int = 33) -> Iterator[Callable[[], Any]]:
    """Sampling under Traversal Verification, the record of walks, state slots, convolution by itself."""
    rows, shape = requests * nodes, (requests, nodes)
    logits = torch.zeros(rows, SHAPE.vocab, dtype=torch.float32)
    found = traversal_rows.RowStatistics(ints(rows, dtype=torch.int64), torch.zeros(rows), ints(rows))
    long, per_request = ints(requests, dtype=torch.int64), ints(requests)
    tokens, parents = ints(*shape, dtype=torch.int64), ints(*shape)
    starts, scores = ints(requests + 1), torch.zeros(shape, dtype=torch.float32)
    found = found._replace(logsumexp=torch.zeros(rows, dtype=torch.float32))
    temperatures = torch.zeros(requests, dtype=torch.float32)
    yield lambda: traversal_rows.row_statistics(logits)
    yield lambda: traversal_rows.bonus_rows(logits, long, tokens, per_request)
    yield lambda: traversal_rows.place_bonus(ints(rows, dtype=torch.int64), long, long)
    yield lambda: traversal_walk.traversal_walk(
        logits, found, starts, tokens, parents, per_request, scores, per_request, temperatures, long, long
    )
    yield lambda: walk_record.record_walks(
        parents, per_request, parents, per_request, ints(4, dtype=torch.int64)
    )
    column, table = ints(requests, 1), ints(requests, 20)
    buffers = state_slots.SlotBuffers(
        (table,), (column,), (column,), per_request, per_request, per_request, per_request,
        ints(1, 4, dtype=torch.int64), 784,
    )  # fmt: skip
    yield lambda: state_slots.locate_states(buffers, per_request)
    yield lambda: state_slots.find_boundaries(buffers, long, per_request, per_request)
    channels, taps = 10240, 4
    x = torch.zeros(rows, channels, dtype=torch.bfloat16)
    weight = torch.zeros(channels, taps, dtype=torch.bfloat16)
    state = torch.zeros(9, channels, taps - 1, dtype=torch.bfloat16)
    yield lambda: tree_conv.tree_conv(
        x, weight, None, state, per_request, starts, per_request, parents, activation="silu", out=x
    )


def compile_all(capability: int) -> dict[str, int]:
    """The most shared memory that a variant of each kernel asks for."""
    triton.runtime.driver.set_active(Driver(capability))
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    limits = MULTIPROCESSORS[capability], SHARED_MEMORY[capability]
    tree_attention.device_limits = lambda device: limits
    FakeTensor.is_cuda = property(lambda tensor: True)
    shared: defaultdict[str, int] = defaultdict(int)
    run = jit.JITFunction.run

    def compile_only(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> Any:
        def stand_in(value: Any) -> Any:
            return jit.MockTensor(value.dtype) if isinstance(value, torch.Tensor) else value

        options = {name: stand_in(value) for name, value in options.items()}
        compiled = run(kernel, *map(stand_in, args), grid=grid, warmup=True, **options)
        assert compiled.asm["cubin"], kernel
        name = kernel.fn.__name__
        shared[name] = max(shared[name], compiled.metadata.shared)
        return compiled

    jit.JITFunction.run = compile_only
    with FakeTensorMode(), torch.no_grad():
        for calls in (benchmarked(), others(), weaver()):  # the last one changes the default dtype
            for call in calls:
                call()
    return dict(shared)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(compile_all(int(sys.argv[1]))))
