# SPDX-License-Identifier: Apache-2.0
"""`dflash_tfm` as users write it: valid forms, one clear line for a mistake, nothing changed for others."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import tiny
from tests.configs import build, chain, from_command_line, refusal
from vllm_weaver import cpu

DFLASH = "dflash"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for models, in a process that can import vLLM."""
    if not torch.cuda.is_available():
        cpu.prepare()
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="session")
def hybrid(root: Path) -> str:
    return tiny.folder(root, "hybrid")


@pytest.fixture(scope="session")
def attention(root: Path) -> str:
    return tiny.folder(root, "attention")


@pytest.fixture(scope="session")
def draft(root: Path) -> str:
    return tiny.folder(root, "draft")


@pytest.fixture(scope="session")
def weaver(root: Path) -> str:
    """A well formed Weaver checkpoint for the tiny models."""
    from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
    from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

    path = root / "weaver.safetensors"
    save_weaver(WeaverHead(WeaverConfig(**WEAVER)), path)
    return str(path)


WEAVER: dict[str, Any] = dict(
    d_model=tiny.HIDDEN,
    d_embed=tiny.HIDDEN,
    d_rank=32,
    num_layers=1,
    num_heads=2,
    mlp_dim=64,
    K=tiny.DEPTH,
    candidate_pool_size=64,
)


@pytest.mark.parametrize("form", ["dict", "hyphens", "json", "dotted", "flags"])
def test_every_form_gives_the_same_settings(form: str, hybrid: str, draft: str) -> None:
    from vllm_weaver.config import WeaverSettings, settings_of

    spec = chain(draft)
    common = ["--model", hybrid, "--max-model-len", "256"]
    if form == "dict":
        config = build(hybrid, spec)
    elif form == "hyphens":
        config = build(hybrid, {key.replace("_", "-"): value for key, value in spec.items()})
    elif form == "json":
        config = from_command_line(*common, "--speculative-config", json.dumps(spec))
    elif form == "dotted":
        dotted = [part for k, v in spec.items() for part in (f"--speculative-config.{k}", str(v))]
        config = from_command_line(*common, *dotted)
    else:
        flags = ["--spec-method", "dflash_tfm", "--spec-model", draft, "--spec-tokens", "16"]
        config = from_command_line(*common, *flags, "--speculative-config", '{"proposal": "chain"}')
    assert settings_of(config) == WeaverSettings(budget=16, depth=tiny.DEPTH, proposal="chain")
    assert config.use_v2_model_runner
    assert config.speculative_config.method == DFLASH  # what upstream's own code sees
    assert config.num_speculative_tokens == 16


@pytest.mark.parametrize("budget", [1, 7, 33, 256])
def test_depth_comes_from_the_draft_not_from_the_budget(budget: int, hybrid: str, draft: str) -> None:
    from vllm_weaver.config import settings_of

    config = build(hybrid, chain(draft, num_speculative_tokens=budget), max_num_batched_tokens=2048)
    settings = settings_of(config)
    assert settings is not None and (settings.budget, settings.depth) == (budget, tiny.DEPTH)
    # The draft writes bonus token + depth slots past the path, also where the tree is smaller than its block.
    assert config.num_lookahead_tokens == tiny.DEPTH + 1
    assert config.speculative_config.max_num_new_slots_for_drafting == tiny.DEPTH
    assert config.uniform_decode_query_len == budget + 1


def test_short_draft_positions_are_extended_to_the_target(hybrid: str, draft: str) -> None:
    config = build(hybrid, chain(draft), max_model_len=4096)
    assert config.speculative_config.draft_model_config.hf_config.max_position_embeddings == 4096


def test_weaver_is_resolved_and_is_the_default_proposal(hybrid: str, draft: str, weaver: str) -> None:
    from vllm_weaver.config import settings_of

    config = build(hybrid, chain(draft, proposal=None, weaver=weaver, candidate_pool_size=64))
    settings = settings_of(config)
    assert settings is not None
    assert (settings.proposal, settings.weaver, settings.candidate_pool_size) == ("weaver", weaver, 64)


def test_settings_survive_pickle_and_copies(hybrid: str, draft: str) -> None:
    from vllm_weaver.config import settings_of

    config = build(hybrid, chain(draft))
    settings = settings_of(config)
    assert settings is not None
    pickled = pickle.loads(pickle.dumps(config))
    assert settings_of(pickled) == settings
    assert pickled.speculative_config.compute_hash() == config.speculative_config.compute_hash()
    assert settings_of(copy.copy(config)) == settings
    assert copy.deepcopy(config.speculative_config).weaver_settings == settings
    config.__post_init__()  # the engine core runs it again after its handshake
    assert settings_of(config) == settings and config.speculative_config.method == DFLASH


def test_hash_differs_from_plain_dflash_and_is_one_for_all_budgets(hybrid: str, draft: str) -> None:
    plain = build(hybrid, {"method": DFLASH, "model": draft, "num_speculative_tokens": 7}).compute_hash()
    ours = {
        build(hybrid, chain(draft, **change)).compute_hash()
        for change in ({}, {"num_speculative_tokens": 17}, {"proposal": "ddtree"})
    }
    assert len(ours) == 1 and plain not in ours


# --- mistakes --------------------------------------------------------------------------------------------

WRONG = {
    "unknown key": ({"proposals": "chain"}, r"unknown key 'proposals' .*did you mean 'proposal'\?"),
    "unknown key, nothing near": ({"zzz": 1}, r"unknown key 'zzz' \(value 1\); keys of dflash_tfm: model, "),
    "internal key": ({"weaver_settings": 1}, "unknown key 'weaver_settings'"),
    "budget missing": ({"num_speculative_tokens": None}, "num_speculative_tokens is missing; .*1 to 256"),
    "budget 0": ({"num_speculative_tokens": 0}, "num_speculative_tokens=0 is not allowed .*from 1 to 256"),
    "budget negative": ({"num_speculative_tokens": -1}, "num_speculative_tokens=-1 "),
    "budget 257": ({"num_speculative_tokens": 257}, "num_speculative_tokens=257 "),
    "budget text": ({"num_speculative_tokens": "many"}, "num_speculative_tokens='many' .*an integer"),
    "budget numeric text": ({"num_speculative_tokens": "16"}, "num_speculative_tokens='16' .*an integer"),
    "budget bool": ({"num_speculative_tokens": True}, "num_speculative_tokens=True .*an integer"),
    "budget float": ({"num_speculative_tokens": 1.5}, "num_speculative_tokens=1.5 .*an integer"),
    "budget list": ({"num_speculative_tokens": [1]}, r"num_speculative_tokens=\[1\] .*an integer"),
    "model missing": ({"model": None}, "model is missing; .*DFlash draft"),
    "model wrong type": ({"model": 5}, "model=5 .*DFlash draft"),
    "proposal unknown": ({"proposal": "tree"}, "proposal='tree' .*'weaver', 'ddtree', 'chain'"),
    "proposal wrong type": ({"proposal": 1}, "proposal=1 .*'weaver', 'ddtree', 'chain'"),
    "verify unknown": ({"tree_verify": "block"}, "tree_verify='block' .*'target_only', 'traversal'"),
    "verify wrong type": ({"tree_verify": 1}, "tree_verify=1 .*'target_only', 'traversal'"),
    "weaver missing": ({"proposal": "weaver"}, "weaver is missing; proposal 'weaver' needs"),
    "weaver missing by default": ({"proposal": None}, "weaver is missing; proposal 'weaver' needs"),
    "weaver wrong type": ({"proposal": None, "weaver": 3}, "weaver=3 .*a file, a folder"),
    "weaver empty": ({"proposal": None, "weaver": ""}, "weaver='' .*a file, a folder"),
    "weaver with chain": ({"weaver": "w"}, "weaver='w' contradicts proposal='chain'"),
    "weaver with ddtree": ({"proposal": "ddtree", "weaver": "w"}, "weaver='w' contradicts proposal='ddtree'"),
    "revision with chain": ({"weaver_revision": "r"}, "weaver_revision='r' contradicts proposal='chain'"),
    "sha with chain": ({"weaver_sha256": "a" * 64}, "weaver_sha256='a.*' contradicts proposal='chain'"),
    "pool with chain": ({"candidate_pool_size": 8}, "candidate_pool_size=8 contradicts proposal='chain'"),
    "pool 0": ({"proposal": "ddtree", "candidate_pool_size": 0}, "candidate_pool_size=0 .*at least 1"),
    "sha not hex": ({"proposal": None, "weaver": "w", "weaver_sha256": "xy"}, "weaver_sha256='xy' .*64 hex"),
    "probabilistic": ({"draft_sample_method": "probabilistic"}, "='probabilistic' .*'greedy'"),
    "synthetic": ({"rejection_sample_method": "synthetic"}, "='synthetic' .*'standard'"),
    "block": ({"rejection_sample_method": "block"}, "rejection_sample_method='block' .*'standard'"),
    "rates": ({"synthetic_acceptance_rates": [1.0]}, "synthetic_acceptance_rates="),
    "unpadded": ({"disable_padded_drafter_batch": True}, "disable_padded_drafter_batch=True .*default False"),
    "local argmax": ({"use_local_argmax_reduction": True}, "use_local_argmax_reduction=True"),
    "two vocabularies": ({"use_heterogeneous_vocab": True}, "use_heterogeneous_vocab=True"),
    "adaptive": ({"enable_adaptive_verification": True}, "enable_adaptive_verification=True"),
    "budget schedule": ({"num_speculative_tokens_per_batch_size": [[1, 4, 7]]}, "the tree budget is fixed"),
    "ngram": ({"prompt_lookup_max": 4}, "prompt_lookup_max=4 .*ngram"),
    "suffix": ({"suffix_decoding_max_spec_factor": 2.0}, "suffix_decoding_max_spec_factor=2.0 .*suffix"),
    "draft length": ({"max_model_len": 64}, "max_model_len=64"),
    "draft tp": ({"draft_tensor_parallel_size": 2}, "draft_tensor_parallel_size=2 .*must be 1"),
    "wrong tp key": ({"tensor_parallel_size": 2}, "tensor_parallel_size.*draft_tensor_parallel_size"),
    "upstream type": ({"code_revision": 5}, "code_revision=5 is not allowed: .*string"),
    "upstream value": ({"attention_backend": "NOPE"}, "attention_backend='NOPE' is not allowed: "),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_value_is_one_line_with_key_value_and_what_is_allowed(
    case: str, hybrid: str, draft: str
) -> None:
    change, expected = WRONG[case]
    assert re.search(expected, refusal(hybrid, chain(draft, **change)))


def test_every_key_of_upstream_is_allowed_or_refused_by_name() -> None:
    from dataclasses import fields

    from vllm.config.speculative import SpeculativeConfig

    from vllm_weaver import config as ours

    allowed = {
        "method", "model", "num_speculative_tokens", "draft_tensor_parallel_size", "tensor_parallel_size",
        "enforce_eager", "quantization", "moe_backend", "attention_backend", "kv_cache_dtype", "revision",
        "code_revision", "draft_load_config", "parallel_drafting", "disable_eagle_block_drop",
    }  # fmt: skip
    upstream = {field.name for field in fields(SpeculativeConfig)}
    assert upstream == allowed | set(ours.NOT_WITH_TREES) | (ours._INTERNAL_KEYS - {"weaver_settings"})


@pytest.mark.parametrize(
    "key", ["weaver", "weaver_revision", "weaver_sha256", "proposal", "candidate_pool_size", "tree_verify"]
)
@pytest.mark.parametrize("method", [DFLASH, None])
def test_our_keys_need_our_method(key: str, method: str | None, hybrid: str, draft: str) -> None:
    value = {"proposal": "chain", "candidate_pool_size": 4, "tree_verify": "traversal"}.get(key, "a")
    spec = {"model": draft, "num_speculative_tokens": 7, key: value} | ({"method": method} if method else {})
    assert f"{key}={value!r} needs method='dflash_tfm', but method is {method!r}" in refusal(hybrid, spec)


@pytest.mark.parametrize("block_size", [None, 1, "8"])
def test_draft_without_a_block_size_is_named(block_size: Any, root: Path, hybrid: str) -> None:
    other = tiny.folder(root, "draft", block_size=block_size)
    message = refusal(hybrid, chain(other))
    assert f"model={other!r}" in message and f"block_size={block_size!r}" in message


# --- Weaver files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"d_model": 64}, "its d_model is 64, but the hidden size of the target .* is 128"),
        ({"d_embed": 64}, "its d_embed is 64, but the embedding width of the target .* is 128"),
        ({"K": 3}, "at most K=3 tokens, but model=.* drafts 7"),
    ],
    ids=["d_model", "d_embed", "K"],
)
def test_weaver_for_another_model_is_refused(
    change: dict[str, int], expected: str, tmp_path: Path, hybrid: str, draft: str
) -> None:
    from vllm_weaver.spec_decode.weaver import WeaverConfig, WeaverHead
    from vllm_weaver.spec_decode.weaver_checkpoint import save_weaver

    path = tmp_path / "other.safetensors"
    save_weaver(WeaverHead(WeaverConfig(**(WEAVER | change))), path)
    assert re.search(expected, refusal(hybrid, chain(draft, proposal=None, weaver=str(path))))


def test_pool_larger_than_the_checkpoints_is_refused(hybrid: str, draft: str, weaver: str) -> None:
    message = refusal(hybrid, chain(draft, proposal=None, weaver=weaver, candidate_pool_size=65))
    assert "candidate_pool_size=65" in message and "from 1 to 64" in message


def test_missing_weaver_file_and_wrong_hash_are_named(hybrid: str, draft: str, weaver: str) -> None:
    missing = refusal(hybrid, chain(draft, proposal=None, weaver="/no/such.pth"))
    assert missing.startswith("speculative config: ") and "/no/such.pth" in missing
    wrong = refusal(hybrid, chain(draft, proposal=None, weaver=weaver, weaver_sha256="0" * 64))
    assert weaver in wrong and "0" * 64 in wrong


@pytest.mark.parametrize("fault", ["missing", "extra"])
def test_missing_and_extra_tensors_are_named(
    fault: str, tmp_path: Path, hybrid: str, draft: str, weaver: str
) -> None:
    from safetensors.torch import load_file, save_file

    tensors = load_file(weaver)
    if fault == "missing":
        del tensors["out_norm.bias"]
    else:
        tensors["surplus.weight"] = torch.zeros(1)
    path = tmp_path / "weaver.safetensors"
    save_file(tensors, path)
    path.with_suffix(".json").write_text(Path(weaver).with_suffix(".json").read_text())
    message = refusal(hybrid, chain(draft, proposal=None, weaver=str(path)))
    assert str(path) in message
    assert ("out_norm.bias" if fault == "missing" else "surplus.weight") in message


class _Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


def test_malicious_pickle_is_refused_and_not_run(tmp_path: Path, hybrid: str, draft: str) -> None:
    path, marker = tmp_path / "weaver.pth", tmp_path / "executed"
    torch.save({"config": {}, "state_dict": {}, "extra": _Hostile(marker)}, path)
    assert str(path) in refusal(hybrid, chain(draft, proposal=None, weaver=str(path)))
    assert not marker.exists()


@pytest.mark.parametrize("kind", ["target", "missing"])
def test_a_model_that_is_no_draft_is_named(kind: str, hybrid: str, draft: str) -> None:
    """Upstream lists every architecture that it knows; one line says what was given."""
    model = hybrid if kind == "target" else "/no/such"
    message = refusal(hybrid, chain(draft, model=model))
    assert message.startswith(f"speculative config with model={model!r}: ") and len(message) < 600


# --- what it cannot run with -----------------------------------------------------------------------------


def test_v1_runner_is_refused(monkeypatch: pytest.MonkeyPatch, hybrid: str, draft: str) -> None:
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    assert "VLLM_USE_V2_MODEL_RUNNER=0" in refusal(hybrid, chain(draft))
    assert build(hybrid, {"method": DFLASH, "model": draft, "num_speculative_tokens": 7}) is not None


def test_v2_runner_is_chosen_where_the_variable_is_unset(
    monkeypatch: pytest.MonkeyPatch, hybrid: str, draft: str
) -> None:
    monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER", raising=False)
    assert build(hybrid, chain(draft)).use_v2_model_runner


def test_missing_triton_is_refused(monkeypatch: pytest.MonkeyPatch, hybrid: str, draft: str) -> None:
    import vllm.triton_utils

    monkeypatch.setattr(vllm.triton_utils, "HAS_TRITON", False)
    assert "no usable Triton" in refusal(hybrid, chain(draft))


LIMITS = {
    "tensor parallel": ({"tensor_parallel_size": 2}, "--tensor-parallel-size=2"),
    "pipeline parallel": ({"pipeline_parallel_size": 2}, "--pipeline-parallel-size=2"),
    "data parallel": ({"data_parallel_size": 2}, "--data-parallel-size=2"),
    "context parallel": ({"decode_context_parallel_size": 2}, "--decode-context-parallel-size=2"),
    "prefill context parallel": ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size=2"),
    "dual batch overlap": ({"enable_dbo": True}, "--enable-dbo=True"),
    "micro-batches": ({"ubatch_size": 2}, "--ubatch-size=2"),
    "lora": ({"enable_lora": True}, "--enable-lora=True"),
    "lora, many sequences": ({"enable_lora": True, "max_num_seqs": 256}, "--enable-lora=True"),
    "kv dtype": ({"kv_cache_dtype": "fp8"}, "--kv-cache-dtype='fp8'"),
    "KV offloading": ({"kv_offloading_size": 1.0}, "--kv-offloading-size=1.0"),
    "sleep": ({"enable_sleep_mode": True}, "--enable-sleep-mode=True"),
}


@pytest.mark.parametrize("case", LIMITS)
def test_what_trees_cannot_run_with_is_refused_by_flag(case: str, hybrid: str, draft: str) -> None:
    options, expected = LIMITS[case]
    assert expected in refusal(hybrid, chain(draft), **options)


def test_kv_transfer_is_refused(hybrid: str, draft: str) -> None:
    from vllm.config import KVTransferConfig

    transfer = KVTransferConfig(kv_connector="ExampleConnector", kv_role="kv_both")
    message = refusal(hybrid, chain(draft), kv_transfer_config=transfer)
    assert "--kv-transfer-config='ExampleConnector'" in message


def test_a_config_built_without_engine_args_is_checked_too(hybrid: str, draft: str) -> None:
    from vllm_weaver.checks import check_vllm_config
    from vllm_weaver.config import ConfigError

    config = build(hybrid, chain(draft))
    check_vllm_config(config)
    config.parallel_config.pipeline_parallel_size = 2
    with pytest.raises(ConfigError, match="--pipeline-parallel-size=2"):
        check_vllm_config(config)


def test_prefix_caching_is_as_upstream_has_it(hybrid: str, attention: str, draft: str) -> None:
    for target in (hybrid, attention):
        for speculative in (
            chain(draft),
            {"method": DFLASH, "model": draft, "num_speculative_tokens": 7},
            None,
        ):
            assert build(target, speculative).cache_config.enable_prefix_caching
            off = build(target, speculative, enable_prefix_caching=False)
            assert not off.cache_config.enable_prefix_caching
    assert build(hybrid, chain(draft)).cache_config.mamba_cache_mode == "align"


def test_no_block_of_a_prefix_hit_is_left_out(hybrid: str, draft: str) -> None:
    plain = {"method": DFLASH, "model": draft, "num_speculative_tokens": 7}
    assert build(hybrid, plain).speculative_config.use_eagle_block_drop()
    assert not build(hybrid, chain(draft)).speculative_config.use_eagle_block_drop()


def test_targets_that_trees_do_not_fit_are_refused(
    root: Path, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_weaver import checks

    sliding = tiny.folder(
        root, "attention", layer_types=["sliding_attention", "full_attention"], sliding_window=64,
        use_sliding_window=True, max_window_layers=1,
    )  # fmt: skip
    assert "window" in refusal(sliding, chain(draft))
    other = tiny.folder(root, "hybrid")
    monkeypatch.setattr(checks, "HYBRID_TARGETS", ("Qwen3_5MoeForCausalLM",))
    message = refusal(other, chain(draft))
    assert (
        "Qwen3_5ForCausalLM" in message and "hybrid models are supported as Qwen3_5MoeForCausalLM" in message
    )


@pytest.mark.parametrize(("tokens", "fits"), [(33 + tiny.DEPTH - 1, False), (33 + tiny.DEPTH, True)])
def test_a_step_must_hold_one_tree(tokens: int, fits: bool, attention: str, draft: str) -> None:
    spec, options = (
        chain(draft, num_speculative_tokens=32),
        {"max_num_batched_tokens": tokens, "max_num_seqs": 2},
    )
    if fits:
        assert build(attention, spec, **options).scheduler_config.max_num_batched_tokens == tokens
    else:
        message = refusal(attention, spec, **options)
        assert f"max_num_batched_tokens={tokens}" in message and f"at least {tokens + 1}" in message


def test_more_sequences_than_trees_fit_is_told_with_numbers(
    hybrid: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C6: 256 sequences, budget 32."""
    from vllm_weaver.hooks import base

    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    base.logger.addHandler(handler)
    try:
        build(hybrid, chain(draft, num_speculative_tokens=32), max_num_seqs=256, max_num_batched_tokens=8192)
        build(hybrid, chain(draft, num_speculative_tokens=32), max_num_seqs=204, max_num_batched_tokens=8192)
    finally:
        base.logger.removeHandler(handler)
    (warning,) = said
    assert "max_num_seqs=256" in warning and "max_num_batched_tokens=8192 holds 204" in warning


def test_other_methods_behave_as_upstream(hybrid: str, draft: str) -> None:
    from vllm.config.speculative import SpeculativeConfig

    from vllm_weaver.config import settings_of

    config = build(hybrid, {"method": DFLASH, "model": draft, "num_speculative_tokens": 7})
    ours = config.speculative_config
    upstream = SpeculativeConfig(
        method=DFLASH,
        model=draft,
        num_speculative_tokens=7,
        target_model_config=config.model_config,
        target_parallel_config=config.parallel_config,
    )
    assert settings_of(config) is None
    assert isinstance(ours, SpeculativeConfig)
    assert ours.compute_hash() == upstream.compute_hash()
    assert repr(ours) == repr(upstream)
    assert ours.max_num_new_slots_for_drafting == upstream.max_num_new_slots_for_drafting
    assert config.num_lookahead_tokens == 8
    assert ours.draft_model_config.hf_config.max_position_embeddings == 2048
    assert settings_of(build(hybrid, None)) is None


def test_unknown_keys_of_other_methods_are_upstreams_to_refuse(hybrid: str, draft: str) -> None:
    from pydantic import ValidationError

    with pytest.raises(ValidationError, match="nonsense"):
        build(hybrid, {"method": DFLASH, "model": draft, "num_speculative_tokens": 7, "nonsense": 1})


def test_target_that_dictates_its_method_is_refused(
    root: Path, hybrid: str, draft: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint in `speculators` format replaces the method: plain DFlash must not run in silence."""
    from vllm.transformers_utils.configs.speculators.base import SpeculatorsConfig

    def dictated(config_dict: dict[str, Any]) -> dict[str, Any]:
        return {"method": DFLASH, "num_speculative_tokens": 7}

    monkeypatch.setattr(SpeculatorsConfig, "extract_vllm_speculative_config", staticmethod(dictated))
    served = tiny.folder(root, "draft", speculators_config={"verifier": {"name_or_path": hybrid}})
    assert "method='dflash_tfm' is replaced by 'dflash'" in refusal(served, chain(draft))
