#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Quantizes a DFlash or DFlash2 draft to NVFP4 (W4A4), calibrated on what really reaches its layers.

    python scripts/quantize_draft.py --target TARGET --draft DRAFT --prompts prompts.jsonl --out FOLDER

vLLM serves the prompts with the draft active, so the text is the target's own; hooks take the largest input
of every linear layer of the draft (prefill and decode). Weights are rounded to nearest; q/k/v and gate/up
share their scales, as they share their input. Everything else stays as it is: fc, convolutions, selector,
norms. The result has ModelOpt's layout and loads in vLLM as it is.

--rtn leaves calibration out (input scales of 1), for comparison. An interrupted run goes on from
FOLDER/calibration.json. --evaluate measures accepted lengths of finished drafts instead; where a machine has
no FP4 arithmetic, vLLM's emulation of it is used. Ends with a report (FOLDER/report.json), or with one line
that says what is wrong (exit code 1).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # `scripts`, when run as a file

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # hooks reach the draft in one process only
os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "1")

import torch

from vllm_weaver import cpu

if not torch.cuda.is_available():
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    cpu.prepare()

from scripts.quantize_lib import capture, nvfp4  # noqa: E402  (vLLM's environment comes first)


def read_prompts(path: Path, skip: int, count: int | None) -> list[Any]:
    """Prompts of a file: .txt (one a line), .jsonl (`{"prompt": text}` or `{"messages": [...]}`), or .json (a
    list, or a mapping whose `text` is one). ValueError, one sentence, where it holds none."""
    try:
        content = path.read_text()
        if path.suffix == ".txt":
            found: list[Any] = [line for line in content.splitlines() if line.strip()]
        elif path.suffix == ".jsonl":
            rows = [json.loads(line) for line in content.splitlines() if line.strip()]
            found = [row.get("messages") or row["prompt"] for row in rows]
        else:
            loaded = json.loads(content)
            found = loaded["text"] if isinstance(loaded, dict) else list(loaded)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"prompts file {str(path)!r} cannot be read: {type(error).__name__}: {error}"
        ) from None
    chosen = found[skip:][:count]
    if not chosen:
        raise ValueError(f"prompts file {str(path)!r} has {len(found)} prompts, none after the first {skip}")
    return chosen


def read_draft(folder: Path) -> dict[str, Any]:
    """The config.json of a plain DFlash-family draft; ValueError, one sentence, for anything else."""
    from vllm_weaver.spec_decode.draft_checkpoint import ARCHITECTURES

    try:
        config = json.loads((folder / "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"draft {str(folder)!r} has no readable config.json: {error}") from None
    if not set(config.get("architectures") or ()) & set(ARCHITECTURES):
        raise ValueError(
            f"draft {str(folder)!r} is {config.get('architectures')!r}, but must be one of {ARCHITECTURES}"
        )
    if config.get("quantization_config") or (folder / "hf_quant_config.json").is_file():
        raise ValueError(f"draft {str(folder)!r} is quantized already; give the plain one")
    return config


def check(folder: Path, config: dict[str, Any], target: Path) -> None:
    """The draft's files must be whole and fit the target (see `check_draft`)."""
    from vllm_weaver.draft import own_quantization
    from vllm_weaver.spec_decode.draft_checkpoint import TargetShape, check_draft

    try:
        raw = json.loads((target / "config.json").read_text())
        text = raw.get("text_config") or raw
        shape = TargetShape(text["hidden_size"], text["num_hidden_layers"], text["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"target {str(target)!r} has no readable config.json: {error}") from None
    settings = SimpleNamespace(**config)
    check_draft(folder, settings, own_quantization(settings, folder), shape)


def block_depth(config: dict[str, Any]) -> int:
    """Tokens that the draft drafts at a time."""
    size = config.get("block_size") or (config.get("dflash_config") or {}).get("block_size")
    if not isinstance(size, int) or size < 2:
        raise ValueError(f"the draft's block_size is {size!r}, but must be an integer of at least 2")
    return size - 1


def emulate_where_needed() -> None:
    """Give vLLM an NVFP4 kernel on the CPU, where it has none: its own emulation, inputs rounded as well."""
    from vllm.platforms import current_platform
    from vllm.platforms.interface import PlatformEnum

    if not current_platform.is_cpu():
        return
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.nvfp4.emulation import EmulationNvFp4LinearKernel

    if EmulationNvFp4LinearKernel not in linear._POSSIBLE_NVFP4_KERNELS.get(PlatformEnum.CPU, []):
        linear.register_linear_kernel(EmulationNvFp4LinearKernel, PlatformEnum.CPU, "nvfp4")


def run_of(args: argparse.Namespace, draft: str, config: dict[str, Any]) -> capture.Run:
    """How the command line wants prompts to be run."""
    return capture.Run(
        str(args.target),
        draft,
        block_depth(config),
        args.tokens,
        args.temperature,
        args.batch,
        args.max_model_len,
        args.engine,
    )


def quantize(args: argparse.Namespace) -> dict[str, Any]:
    """Calibrates (without --rtn) and writes the quantized draft; returns the report."""
    config = read_draft(args.draft)
    check(args.draft, config, args.target)
    if (args.out / "model.safetensors").exists():
        raise ValueError(f"{str(args.out)!r} holds a finished draft already; name another folder")
    args.out.mkdir(parents=True, exist_ok=True)
    state = None
    if not args.rtn:
        prompts = read_prompts(args.prompts, args.skip, args.count)
        run = run_of(args, str(args.draft), config)
        path = args.out / "calibration.json"
        state = capture.load_calibration(path, capture.key_of(run, prompts, args.draft))
        capture.calibrate(run, prompts, state, path)
    weights = nvfp4.read_weights(args.draft)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    packed, modules = nvfp4.quantize(
        weights, config["num_hidden_layers"], None if state is None else state.peaks, device
    )
    nvfp4.write(args.out, args.draft, packed)
    check(args.out, json.loads((args.out / "config.json").read_text()), args.target)
    sizes = [sum(tensor.nbytes for tensor in tensors.values()) for tensors in (weights, packed)]
    layers = [sum(getattr(m, key) for m in modules) for key in ("bytes_before", "bytes_after")]
    report = {
        "draft": str(args.draft),
        "calibrated": state is not None,
        "prompts": 0 if state is None else state.prompts,
        "rows": 0 if state is None else min(state.rows.values()),
        "bytes_before": sizes[0],
        "bytes_after": sizes[1],
        "layers_before": layers[0],
        "layers_after": layers[1],
        "layers_ratio": layers[1] / layers[0],
        "modules": [asdict(module) for module in modules],
    }
    (args.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


def print_report(report: dict[str, Any]) -> None:
    """The report as a table."""
    print(f"{'module':<32}{'weight error':>14}{'input peak':>14}{'input scale':>14}{'ratio':>8}")
    for module in report["modules"]:
        peak = "-" if module["input_peak"] is None else f"{module['input_peak']:.4g}"
        ratio = module["bytes_after"] / module["bytes_before"]
        print(
            f"{module['module']:<32}{module['error']:>13.2%} {peak:>13} {module['input_scale']:>13.4g} "
            f"{ratio:>7.3f}"
        )
    print(
        f"quantized layers: {report['layers_before'] / 1e6:.2f} MB -> {report['layers_after'] / 1e6:.2f} MB "
        f"(ratio {report['layers_ratio']:.3f}); whole draft: {report['bytes_before'] / 1e6:.2f} MB -> "
        f"{report['bytes_after'] / 1e6:.2f} MB (ratio {report['bytes_after'] / report['bytes_before']:.3f})"
    )
    how = (
        f"{report['prompts']} prompts, {report['rows']} rows a layer"
        if report["calibrated"]
        else "none (--rtn)"
    )
    print(f"calibration: {how}")


def evaluate(args: argparse.Namespace) -> None:
    """Prints the accepted length of each draft on the prompts."""
    emulate_where_needed()
    prompts = read_prompts(args.prompts, args.skip, args.count)
    for folder in args.evaluate:
        config = json.loads((folder / "config.json").read_text())
        check(folder, config, args.target)
        length, steps = capture.accepted_length(run_of(args, str(folder), config), prompts)
        print(f"{folder}: accepted length {length:.3f} over {steps} steps", flush=True)


def engine_options(text: str) -> dict[str, Any]:
    """The value of --engine: a JSON object."""
    try:
        options = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is no JSON ({error})") from None
    if not isinstance(options, dict):
        raise argparse.ArgumentTypeError(f'{text!r} is no JSON object; give {{"option": value}}')
    return options


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--target", type=Path, required=True, help="folder of the target")
    parser.add_argument("--draft", type=Path, help="folder of the plain draft")
    parser.add_argument("--out", type=Path, help="folder of the result")
    parser.add_argument("--prompts", type=Path, help=".txt, .jsonl or .json file")
    parser.add_argument("--rtn", action="store_true", help="without calibration")
    parser.add_argument("--evaluate", type=Path, nargs="+", metavar="DRAFT", help="measure accepted lengths")
    parser.add_argument("--skip", type=int, default=0, help="prompts to leave out at the start")
    parser.add_argument("--count", type=int, help="prompts to use (all)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens to generate a prompt (512)")
    parser.add_argument("--temperature", type=float, default=0.7, help="0.7")
    parser.add_argument("--batch", type=int, default=4, help="prompts at a time (4)")
    parser.add_argument("--max-model-len", type=int, default=8192, help="8192")
    parser.add_argument(
        "--engine",
        type=engine_options,
        default={},
        metavar="JSON",
        help="more options of vLLM's LLM: '{\"gpu_memory_utilization\": 0.8}'",
    )
    args = parser.parse_args(argv)
    if args.evaluate is None and (args.draft is None or args.out is None):
        parser.error("--draft and --out are needed, unless --evaluate is given")
    if args.prompts is None and (args.evaluate or not args.rtn):
        parser.error("--prompts is needed: the draft is calibrated, or measured, on them")
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 1 after one line on stderr."""
    args = parse(argv)
    try:
        if args.evaluate:
            evaluate(args)
        else:
            print_report(quantize(args))
    except ValueError as error:
        print(f"quantize_draft: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
