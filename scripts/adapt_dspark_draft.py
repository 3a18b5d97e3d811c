#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Makes a DSpark draft as SpecForge writes it (RadixArk's, for example) one that vLLM 0.32 loads.

    python scripts/adapt_dspark_draft.py RadixArk/Qwen3.8-27B-DSpark-folder adapted-folder

Only config.json is rewritten: vLLM takes `DSparkDraftModel` for DeepSeek-V4 unless its model_type is qwen3,
and wants some keys at the top. Weights are linked (or copied with --copy), never changed. Says so and writes
nothing where nothing needs doing; ends with one line and exit code 1 where the draft cannot be adapted.
Serve the result with `--speculative-config '{"method": "dspark", "model": "adapted-folder"}'`.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ARCHITECTURE = "Qwen3DSparkModel"
# Where vLLM looks for each value, the first found counts; then where other tools put it.
WANTED = {
    "target_layer_ids": (
        ("dflash_config.target_layer_ids", "dspark_target_layer_ids", "target_layer_ids"),
        ("dspark_config.target_layer_ids",),
    ),
    "block_size": (
        ("block_size", "dspark_block_size"),
        ("dspark_config.block_size", "dflash_config.block_size", "n_predict"),
    ),
    "mask_token_id": (
        ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id"),
        ("dspark_config.mask_token_id", "dspark_config.noise_token_id"),
    ),
    "markov_rank": (("markov_rank",), ("dspark_config.markov_rank", "dflash_config.markov_rank")),
}
# Dense parts that vLLM's Qwen3 draft is built from.
NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def adapt(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The config that vLLM loads, and what was changed (nothing: an empty list).

    Raises ValueError, one sentence, for a draft that no change of its config makes loadable."""
    if "speculators_model_type" in config:
        return config, []  # vLLM translates this form itself
    architectures, kind = config.get("architectures") or [], config.get("model_type")
    if not any("DSpark" in name for name in architectures):
        raise ValueError(f"architectures is {architectures!r}: this is not a DSpark draft")
    if architectures[0] not in (ARCHITECTURE, "DSparkDraftModel"):
        return config, []  # another family, with a loader of its own
    if str(kind).startswith("deepseek"):
        return config, []
    missing = [key for key in NEEDED if key not in config]
    if missing:
        raise ValueError(
            f"it lacks {', '.join(missing)}: only dense Qwen3-shaped DSpark drafts can be adapted"
        )
    head = _find(config, "markov_head_type") or _find(config, "dspark_config.markov_head_type") or "vanilla"
    if head != "vanilla":
        raise ValueError(f"markov_head_type is {head!r}, but vLLM has the head 'vanilla' only")
    adapted, changes = dict(config), []

    def put(key: str, value: Any) -> None:
        changes.append(f"{key}: {adapted.get(key)!r} -> {value!r}")
        adapted[key] = value

    # vLLM renames this architecture itself for one model type.
    if kind != "qwen3":
        put("model_type", "qwen3")
        if architectures != [ARCHITECTURE]:
            put("architectures", [ARCHITECTURE])
    for key, (known, elsewhere) in WANTED.items():
        if any(_find(config, place) is not None for place in known):
            continue
        found = next((place for place in elsewhere if _find(config, place) is not None), None)
        if found is None:
            raise ValueError(f"it has no {key}: neither {', '.join((*known, *elsewhere))}")
        put(key, _find(config, found))
    return adapted, changes


def _find(config: dict[str, Any], place: str) -> Any:
    """The value at a dotted place, None where there is none."""
    value: Any = config
    for key in place.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value


def convert(source: Path, folder: Path, copy: bool = False) -> list[str]:
    """Writes the adapted draft of `source` to `folder`; returns the changes, none if nothing was written.

    Raises ValueError, one sentence."""
    file = source / "config.json"
    try:
        config = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{str(file)!r} cannot be read as JSON: {error}") from None
    try:
        adapted, changes = adapt(config)
    except ValueError as error:
        raise ValueError(f"{str(file)!r}: {error}") from None
    if not changes:
        return []
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{str(folder)!r} is not an empty folder; name another")
    folder.mkdir(parents=True, exist_ok=True)
    for entry in sorted(source.iterdir()):
        if entry.name == "config.json" or entry.is_dir():
            continue
        if copy:
            shutil.copy2(entry, folder / entry.name)
        else:
            (folder / entry.name).symlink_to(entry.resolve())
    (folder / "config.json").write_text(json.dumps(adapted, indent=2) + "\n")
    return changes


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; 0, or 1 after one line on stderr."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("source", type=Path, help="folder of the draft")
    parser.add_argument("folder", type=Path, help="where the adapted draft goes")
    parser.add_argument("--copy", action="store_true", help="copy the weights instead of linking them")
    args = parser.parse_args(argv)
    try:
        changes = convert(args.source, args.folder, args.copy)
    except ValueError as error:
        print(f"adapt_dspark_draft: {error}", file=sys.stderr)
        return 1
    if not changes:
        print(f"{args.source}: nothing needs doing, vLLM 0.32 loads it as it is")
    else:
        print(f"{args.folder}: adapted, weights untouched\n" + "\n".join(f"  {line}" for line in changes))
    return 0


if __name__ == "__main__":
    sys.exit(main())
