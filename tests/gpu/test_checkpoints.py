# SPDX-License-Identifier: Apache-2.0
"""Real checkpoint files on a GPU: targets with quantized heads, the memory of Weaver's tables, a quantized
draft. Its tests need nothing of each other and may run side by side in processes of their own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.gpu.test_engine import engine, use_oracle  # prepares the environment, so it comes first

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

from bench_lib.shapes import SHAPES, Shape, draft_config, target_config, write_models  # noqa: E402

from tests import checkpoints, quantized, tiny  # noqa: E402
from tests.e2e import following, harness, models  # noqa: E402

DEVICE = torch.device("cuda")
ROOT = Path(__file__).resolve().parents[2]
OPTIONS = {"skip_tokenizer_init": True, "max_model_len": 1024, "max_num_seqs": 4}
SHAPE = SHAPES["2b"]
PARAMETERS = 1_000_000_000
TOKENS = 200
# The kernel that vLLM must have taken on sm_90.
HEADS = {"W4A16_NVFP4": "MarlinNvFp4LinearKernel", "FP8": "CutlassFP8ScaledMMLinearKernel"}
TABLES_EXTRA = 512 << 20


def kernel_of(layer: Any) -> str:
    """Class name of the kernel behind a layer of a ModelOpt format, else of its unquantized method."""
    return type(getattr(layer.quant_method, "kernel", layer.quant_method)).__name__


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The models of two billion parameters with weights, the target's lm_head left out."""
    paths = write_models(tmp_path_factory.mktemp("2b"), SHAPE)
    checkpoints.random_target(paths["target"], DEVICE, with_head=False)
    checkpoints.random_draft(paths["draft"], DEVICE)
    return paths


@pytest.mark.parametrize("algo", HEADS)
def test_quantized_head(pair: dict[str, Path], tmp_path: Path, algo: str) -> None:
    """Greedy decoding is plain decoding's, with Weaver's trees and with trees that are mostly accepted."""
    target = checkpoints.with_random_head(pair["target"], tmp_path / "target", algo, DEVICE)
    generator = torch.Generator().manual_seed(5)
    prompts = [torch.randint(0, SHAPE.vocab, (90 + 37 * i,), generator=generator).tolist() for i in range(4)]
    with engine("graphs", target, **OPTIONS) as llm:
        plain = harness.references(llm, prompts, TOKENS)
        # An FP8 head rounds its inputs to 3 bits of mantissa, which widens near-ties.
        noise = following.own_noise(llm, plain)
    config = {"method": "dflash_tfm", "model": str(pair["draft"]), "num_speculative_tokens": 32}
    config["weaver"] = str(pair["weaver"])
    with engine("graphs", target, speculative_config=config, **OPTIONS) as llm:
        runner = harness.runner(llm)
        assert kernel_of(runner.model.lm_head) == HEADS[algo]
        assert sum(parameter.numel() for parameter in runner.model.parameters()) >= PARAMETERS
        ties = {"weaver": following.follow(llm, plain)}
        steps = runner.model_state.step.stats.read()["verifies"] / len(plain)
        assert min(runner.replays.values()) > 0.2 * steps, "decode steps did not replay their graphs"
        use_oracle(runner, plain, "graphs")
        ties["oracle"] = following.follow(llm, plain)
        stats = runner.model_state.step.stats.read()
    for proposer, found in ties.items():
        print(f"{algo}, {proposer}:")
        following.assert_near_ties(found, noise, TOKENS * len(plain))
    print(f"{algo}: {stats}")
    assert stats["branching_paths"] > 20, stats


def random_head(vocab: int, hidden: int, algo: str | None) -> quantized.Packed:
    """A random lm_head on the GPU, plain for None; `meaning` has its first 256 rows only."""
    if algo is None:
        weight = torch.randn(vocab, hidden, dtype=torch.bfloat16, device=DEVICE)
        return quantized.Packed({}, {"weight": weight}, weight[:256].double(), method="")
    codes = torch.randint(0, 256, (vocab, hidden // 2), dtype=torch.uint8, device=DEVICE)
    scales = torch.empty(vocab, hidden // quantized.GROUP, dtype=torch.bfloat16, device=DEVICE)
    tensors = {
        "weight": codes,
        "weight_scale": scales.uniform_(32, 448).to(torch.float8_e4m3fn),
        "weight_scale_2": torch.tensor(1e-3, device="cpu"),
    }
    first = (codes[:256].cpu(), tensors["weight_scale"][:256].cpu(), tensors["weight_scale_2"])
    meaning = quantized.nvfp4_meaning(*first)
    return quantized.Packed(quantized.head_only(algo), tensors, meaning, method="modelopt_mixed")


@pytest.mark.parametrize("algo", [None, "W4A16_NVFP4"])
def test_memory_of_tables(tmp_path: Path, algo: str | None) -> None:
    """At the size of Qwen3.6-27B, tables take little more than themselves while they are built."""
    from vllm.distributed import cleanup_dist_env_and_memory

    from vllm_weaver.spec_decode.tables import TargetEnds, build_tables
    from vllm_weaver.spec_decode.weaver_checkpoint import load_weaver

    shape = SHAPES["27b"]
    path = write_models(tmp_path, shape)["weaver"] / "weaver.safetensors"
    head = load_weaver(path, dtype=torch.bfloat16, device=DEVICE)
    with tiny.current_config(tmp_path), torch.device(DEVICE), torch.inference_mode():
        packed = random_head(shape.vocab, shape.hidden, algo)
        lm_head = quantized.layer_of(packed, vocab=shape.vocab)
        if algo is not None:
            assert kernel_of(lm_head) == HEADS[algo]
        embedding = quantized.layer_of(
            random_head(shape.vocab, shape.hidden, None), "embed_tokens", shape.vocab
        )
        before = torch.cuda.memory_allocated()
        tables = build_tables(head, TargetEnds(embedding, lm_head))
        peak = torch.cuda.max_memory_allocated() - before
    size = sum(table.nbytes for table in tables)
    print(
        f"{algo or 'bf16'}: tables {size / 2**20:.0f} MiB, {(peak - size) / 2**20:.1f} MiB more at the peak"
    )
    assert size == 2 * 2 * shape.vocab * shape.rank
    assert peak < size + TABLES_EXTRA
    expected = packed.meaning.to(DEVICE) @ head.lm_head_query_in.weight.double()
    off = (tables[1][:256].double() - expected).norm() / expected.norm()
    assert off < 0.01, f"relative error {float(off):.4f}"
    cleanup_dist_env_and_memory()


# The draft of Qwen3.6-27B in all its sizes, its target cut short: 8 layers, with a narrow MLP.
DRAFT_SHAPE = replace(SHAPES["27b"], layers=8)
NARROW = 2048


def draft_and_target(root: Path, shape: Shape, narrow: int) -> tuple[Path, Path]:
    """Both with random weights; the target with a tokenizer that knows a part of its ids."""
    draft, target = root / "draft", root / "target"
    for folder, config in (
        (draft, draft_config(shape)),
        (target, target_config(replace(shape, intermediate=narrow))),
    ):
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
    return checkpoints.random_draft(draft, DEVICE), checkpoints.random_target(
        models.with_tokenizer(target), DEVICE
    )


def test_quantize_draft(tmp_path: Path) -> None:
    """The script calibrates and packs the draft, vLLM loads the result, and trees are drafted with it."""
    draft, target = draft_and_target(tmp_path, DRAFT_SHAPE, NARROW)
    generator = torch.Generator().manual_seed(6)
    prompts = torch.randint(0, 1000, (8, 64), generator=generator).tolist()
    (tmp_path / "prompts.json").write_text(json.dumps(prompts))
    gc.collect()
    torch.cuda.empty_cache()  # the script's engine needs it
    out = tmp_path / "quantized"
    common: dict[str, Any] = {
        "attention_backend": "FLASH_ATTN",
        "additional_config": {"gdn_prefill_backend": "triton"},
        "gpu_memory_utilization": 0.3,
        "kv_cache_memory_bytes": 2 << 30,
    }
    argv = {
        "--target": target,
        "--draft": draft,
        "--prompts": tmp_path / "prompts.json",
        "--out": out,
        "--tokens": 48,
        "--max-model-len": 256,
        "--batch": 8,
        "--engine": json.dumps(common),
    }
    command = [sys.executable, str(ROOT / "scripts" / "quantize_draft.py")]
    command += [str(part) for option in argv.items() for part in option]
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": path}, timeout=400)
    report = json.loads((out / "report.json").read_text())
    assert report["calibrated"] and report["prompts"] == len(prompts)
    assert len(report["modules"]) == 4 * DRAFT_SHAPE.draft_layers
    assert all(module["input_peak"] > 0 and module["error"] < 0.13 for module in report["modules"])
    assert report["layers_ratio"] <= 0.45
    sizes = [sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in (draft, out)]
    saved = report["layers_before"] - report["layers_after"]
    assert sizes[0] - sizes[1] == pytest.approx(saved, rel=1e-3)

    config = {"method": "dflash_tfm", "model": str(out), "num_speculative_tokens": 32, "proposal": "ddtree"}
    with engine("graphs", target, speculative_config=config, **OPTIONS) as llm:
        runner = harness.runner(llm)
        # sm_90 has no FP4 arithmetic: inputs stay as they are.
        assert kernel_of(runner.speculator.model.model.layers[0].mlp.down_proj) == HEADS["W4A16_NVFP4"]
        outputs = harness.greedy(llm, prompts[:2], 32)
        stats = runner.model_state.step.stats.read()
    assert [len(output.token_ids) for output in outputs] == [32, 32]
    assert stats["verifies"] > 0
