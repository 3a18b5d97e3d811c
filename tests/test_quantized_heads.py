# SPDX-License-Identifier: Apache-2.0
"""Weaver tables from targets in every format: the values of a float64 dequantization, whatever packs them,
and padded ids never among candidates."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import quantized, tiny
from tests.quantized import layer_of
from tests.test_weaver import random_head
from vllm_weaver import cpu
from vllm_weaver.spec_decode.weaver import WeaverConfig
from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="for machines without a GPU")
VOCAB, HIDDEN, RANK = 480, 64, 32  # padded to 512
CONFIG = WeaverConfig(
    d_model=HIDDEN, d_embed=HIDDEN, d_rank=RANK, num_layers=1, num_heads=2, mlp_dim=16, K=7,
    candidate_pool_size=64,
)  # fmt: skip


@pytest.fixture(scope="module")
def vllm_config(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A VllmConfig that is current, and a process group of one."""
    cpu.prepare()
    with tiny.current_config(tmp_path_factory.mktemp("models")) as config:
        yield config


@pytest.fixture
def emulated(vllm_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Products with 4-bit weights on any CPU, slow and simple: vLLM has such kernels for GPUs, and for some
    CPUs. For NVFP4 with quantized inputs that is vLLM's own emulation, otherwise a dequantization by vLLM's
    own tools."""
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.mixed_precision.cpu import CPUWNA16LinearKernel
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel
    from vllm.model_executor.layers.quantization.utils.nvfp4_emulation_utils import dequantize_to_dtype
    from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
    from vllm.platforms.interface import PlatformEnum

    class Fp4Weights(EmulationNvFp4LinearKernel):
        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            weight = dequantize_to_dtype(
                layer.weight, layer.weight_scale, layer.weight_global_scale, x.dtype, 16, swizzle=False
            )
            return nn.functional.linear(x, weight, bias)

    class Int4Weights(CPUWNA16LinearKernel):
        def _process_gptq_weights_w4a16(self, layer: Any) -> None:
            pass

        _process_gptq_weights_w4a8 = _process_gptq_weights_w4a16  # where the CPU has AMX

        def apply_weights(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
            packed, scale, zero = self._get_weight_params(layer)
            codes = unpack_quantized_values_into_int32(packed, self.config.weight_type, 0)
            if zero is None:
                codes = codes - 8
            else:
                zero = unpack_quantized_values_into_int32(zero, self.config.weight_type, 1)
                codes = codes - zero.repeat_interleave(self.config.group_size, dim=0)
            weight = codes * scale.float().repeat_interleave(self.config.group_size, dim=0)
            return nn.functional.linear(x, weight.to(x.dtype).T, bias)

    monkeypatch.setitem(linear._POSSIBLE_NVFP4_KERNELS, PlatformEnum.CPU, [EmulationNvFp4LinearKernel])
    monkeypatch.setitem(linear._POSSIBLE_KERNELS, PlatformEnum.CPU, [Int4Weights])
    monkeypatch.setattr(linear, "MarlinNvFp4LinearKernel", Fp4Weights)


def target(embedding: nn.Module, lm_head: nn.Module) -> Any:
    """A target with these two layers."""
    return SimpleNamespace(model=SimpleNamespace(embed_tokens=embedding), lm_head=lm_head)


def weight(seed: int = 0, rows: int = VOCAB) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, HIDDEN, generator=generator) * torch.rand(rows, 1, generator=generator)


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("name", quantized.FORMATS)
def test_residual_table(name: str) -> None:
    from vllm_weaver.spec_decode.tables import build_tables, target_ends

    vocab = 512 if name in ("gptq", "awq") else VOCAB  # vLLM loads these with rows of whole tiles only
    packed = quantized.FORMATS[name](weight(rows=vocab))
    lm_head = layer_of(packed)
    head = random_head(CONFIG, dtype=torch.bfloat16)
    with torch.no_grad():
        head.lm_head_query_in.weight.mul_(0.01)  # far smaller than the inputs that static scales expect
    ends = target_ends(target(layer_of(quantized.plain(weight(1)), "embed_tokens"), lm_head))
    with torch.inference_mode():
        _, residual = build_tables(head, ends)
    assert residual.shape == (512, RANK) and residual.dtype == torch.bfloat16
    expected = packed.meaning @ head.lm_head_query_in.weight.double()
    off = (residual[:vocab].double() - expected).norm() / expected.norm()
    assert off < packed.error + 0.006, f"{name}: relative error {off:.4f}"


@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize("make", [quantized.plain, quantized.embedding_int4])
def test_token_table(make: Any) -> None:
    from vllm_weaver.spec_decode.tables import build_tables, target_ends

    packed = make(weight())
    embedding = layer_of(packed, "embed_tokens")
    head = random_head(CONFIG, dtype=torch.bfloat16)
    ends = target_ends(target(embedding, layer_of(quantized.plain(weight(1)))))
    with torch.inference_mode():
        table, _ = build_tables(head, ends)
    assert table.shape == (VOCAB, RANK) and table.dtype == torch.bfloat16
    expected = head.double().token_table(packed.meaning)
    off = (table.double() - expected).norm() / expected.norm()
    assert off < 0.006, f"relative error {off:.4f}"


@pytest.mark.parametrize("how", ["the same layer", "a head of its own"])
def test_tied_embeddings(vllm_config: Any, how: str) -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    from vllm_weaver.spec_decode.tables import build_tables, target_ends

    packed = quantized.plain(weight())
    embedding = layer_of(packed, "embed_tokens")
    lm_head = embedding
    if how != "the same layer":
        lm_head = ParallelLMHead(VOCAB, HIDDEN, params_dtype=torch.bfloat16).tie_weights(embedding)
        lm_head.quant_method.process_weights_after_loading(lm_head)
    head = random_head(CONFIG, dtype=torch.bfloat16)
    with torch.inference_mode():
        token, residual = build_tables(head, target_ends(target(embedding, lm_head)))
    wide = head.double()
    for table, expected in (
        (token, wide.token_table(packed.meaning)),
        (residual[:VOCAB], wide.residual_table(packed.meaning)),
    ):
        assert (table.double() - expected).norm() / expected.norm() < 0.006


def test_a_table_that_is_not_finite_is_refused(vllm_config: Any) -> None:
    from vllm_weaver.spec_decode.tables import build_tables, target_ends

    packed = quantized.modelopt_fp8(weight())
    packed.tensors["weight_scale"] = torch.tensor(float("nan"))
    ends = target_ends(target(layer_of(quantized.plain(weight(1)), "embed_tokens"), layer_of(packed)))
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match="table of the target's lm_head has numbers that are not finite"),
    ):
        build_tables(random_head(CONFIG, dtype=torch.bfloat16), ends)


@pytest.mark.parametrize("proposal", ["weaver", "ddtree", "chain"])
@pytest.mark.parametrize("draft, head, embed", [(512, 480, 480), (480, 512, 512), (460, 480, 512)])
def test_padded_ids_are_never_candidates(
    vllm_config: Any, tmp_path: Path, proposal: Any, draft: int, head: int, embed: int
) -> None:
    """Case C9: every id past the smallest vocabulary has the largest logit, other rows are NaN."""
    from vllm_weaver.config import WeaverSettings
    from vllm_weaver.spec_decode.speculator import build_proposer

    save_weaver(random_head(CONFIG, dtype=torch.float32), tmp_path / "weaver.safetensors")
    path = str(tmp_path / "weaver.safetensors") if proposal == "weaver" else None
    ends = target(
        layer_of(quantized.plain(weight(1, embed)), "embed_tokens"),
        layer_of(quantized.plain(weight(2, head))),
    )
    settings = WeaverSettings(budget=24, depth=4, proposal=proposal, weaver=path)
    proposer = build_proposer(settings, ends, draft, torch.bfloat16, torch.device("cpu"))
    smallest = min(draft, head, embed)
    assert proposer.vocab_size == smallest
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(3, 4, max(draft, 512), generator=generator)
    logits[..., smallest:] = 50.0
    logits[1, 2] = float("nan")
    logits[2] = float("nan")
    hidden = torch.randn(3, 5, HIDDEN, generator=generator).bfloat16()
    with torch.inference_mode():
        tree = proposer.propose(hidden[:, 0], hidden[:, 1:], logits, torch.tensor([5, smallest - 1, 7]), 24)
    tokens = tree.tokens[:, 1:]
    assert int(tokens.max()) < smallest and int(tokens.min()) >= -1
    assert tree.num_nodes[0] > 4 and tree.num_nodes[2] == 1
