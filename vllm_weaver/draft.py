# SPDX-License-Identifier: Apache-2.0
"""The draft of a finished VllmConfig: where its files are, what they say, and whether they fit the target.

`check_draft_files` runs before weights are loaded and raises a `ConfigError` of one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm_weaver.config import ConfigError
from vllm_weaver.hooks.base import logger

if TYPE_CHECKING:
    from vllm.config import VllmConfig

    from vllm_weaver.spec_decode.draft_checkpoint import DraftFacts

# Load formats that read the draft's .safetensors files; only those can be looked into beforehand.
_SAFETENSORS_FORMATS = ("auto", "hf", "safetensors", "fastsafetensors", "instanttensor")
_CHECKED = "dflash_tfm_checked"  # attribute of the draft's ModelConfig: what was checked, and the facts
_NEEDED = ["*.safetensors", "*.json", "*.pt", "*.sha256", "SHA256SUMS*", "sha256sums*"]


def check_draft_files(vllm_config: VllmConfig) -> DraftFacts | None:
    """Check the draft's files against its own config and the target; None where the load format has no files
    to look into (dummy weights, or other kinds than .safetensors).

    The result travels with the configuration, into other processes too; where it is there and the files are
    as they were, none is read again."""
    from vllm.model_executor.model_loader.utils import get_draft_load_config

    from vllm_weaver.spec_decode.draft_checkpoint import TargetShape, check_draft

    load = get_draft_load_config(vllm_config)
    if load.load_format not in _SAFETENSORS_FORMATS:
        if load.load_format != "dummy":
            logger.info("The draft's files are not checked: load format %s.", load.load_format)
        return None
    draft = vllm_config.speculative_config.draft_model_config
    folder = _folder(draft.model, draft.revision, load.download_dir)
    target = vllm_config.model_config
    shape = TargetShape(
        target.get_hidden_size(), target.get_total_num_hidden_layers(), target.get_vocab_size()
    )
    checked = (str(folder), _stamp(folder), shape)
    known = getattr(draft, _CHECKED, None)
    if known is not None and known[0] == checked:
        return known[1]
    try:
        facts = check_draft(folder, draft.hf_config, own_quantization(draft.hf_config, folder), shape)
    except ValueError as error:
        raise ConfigError(f"speculative config: {error}") from None
    setattr(draft, _CHECKED, (checked, facts))
    return facts


def _stamp(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file in the folder."""
    found = ((file.name, file.stat()) for file in folder.iterdir() if file.is_file())
    return tuple(sorted((name, stat.st_size, stat.st_mtime_ns) for name, stat in found))


def keep_own_head(hf_config: Any, facts: DraftFacts, target_lm_head: Any) -> None:
    """Tell vLLM, before it builds the draft, to keep an lm_head that it could not compare with the target's.

    Otherwise it asks whether the two weights are equal, which has no answer where one of them is packed."""
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    plain = isinstance(target_lm_head.quant_method, UnquantizedEmbeddingMethod | UnquantizedLinearMethod)
    if facts.own_head and (facts.d2t or facts.packed_head or not plain):
        hf_config.has_own_lm_head = True


def fit_loaded_draft(model: Any, facts: DraftFacts | None, block: int) -> None:
    """What a loaded draft gets wrong under a tree: its vocabulary's map, and the block of its convolutions.

    block: the rows that it drafts a request, bonus token included; vLLM takes the tree budget for it."""
    if facts is not None and not facts.d2t:
        # vLLM makes a map of zeros where vocabularies are padded differently; without one ids are the same.
        model.draft_id_to_target_id = None
    if hasattr(model, "candidate_logits_processor"):  # DFlash2: the logits that its selector would start from
        from vllm.model_executor.models.qwen3_dflash2 import DFlashGroupedConv

        model.logits_processor = model.candidate_logits_processor
        for module in model.modules():
            if isinstance(module, DFlashGroupedConv):
                module.block_size = block


def own_quantization(hf_config: Any, folder: Path) -> Mapping[str, Any] | None:
    """The quantization config of a draft's own files, None for a plain draft.

    Raises ValueError where config.json and hf_quant_config.json contradict each other."""
    found = getattr(hf_config, "quantization_config", None) or getattr(hf_config, "compression_config", None)
    beside = folder / "hf_quant_config.json"
    if not beside.is_file():
        return found
    try:
        other = json.loads(beside.read_text())["quantization"]
        algorithm = str(other["quant_algo"])
    except (ValueError, KeyError, TypeError):
        raise ValueError(f"draft file {str(beside)!r} has no readable quantization.quant_algo") from None
    if found is None:
        return {"quantization": other}
    inner = found.get("quantization") if isinstance(found.get("quantization"), Mapping) else found
    said = str(inner.get("quant_algo", ""))
    if said.upper() != algorithm.upper():
        raise ValueError(
            f"draft file {str(beside)!r} has quant_algo={algorithm!r}, but config.json beside it has {said!r}"
        )
    if algorithm.upper() == "MIXED_PRECISION" and "quantized_layers" not in inner:
        return {"quantization": other}  # as vLLM does
    return found


def _folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The local folder of a draft; one on the hub is fetched, as loading it would do a little later."""
    if Path(model).is_dir():
        return Path(model)
    from huggingface_hub import snapshot_download

    try:
        return Path(
            snapshot_download(model, revision=revision, cache_dir=download_dir, allow_patterns=_NEEDED)
        )
    except Exception as error:  # the hub client raises many unrelated types; all mean that there are no files
        command = f"hf download {model}" + (f" --revision {revision}" if revision else "")
        reason = " ".join(str(error).split())[:160]
        raise ConfigError(
            f"speculative config: model={model!r} could not be fetched and is not in the local cache "
            f"({reason}); fetch it with: {command}"
        ) from None
