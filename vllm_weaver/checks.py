# SPDX-License-Identifier: Apache-2.0
"""What `dflash_tfm` cannot run with: checks of the environment, the user's keys and the finished VllmConfig.

Each raises a `ConfigError` of one sentence before any weight is loaded. None of them changes a configuration.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm_weaver.config import METHOD, ConfigError, check_keys, refuse_stray_keys, settings_of
from vllm_weaver.draft import check_draft_files
from vllm_weaver.hooks.base import logger

if TYPE_CHECKING:
    from vllm.config import ModelConfig, ParallelConfig, VllmConfig
    from vllm.engine.arg_utils import EngineArgs

# Hybrids whose recurrent layers are Gated DeltaNet; a tree through another kind of state would be a wrong
# chain.
HYBRID_TARGETS = (
    "Qwen3_5ForCausalLM",
    "Qwen3_5MoeForCausalLM",
    "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration",
)
_Row = tuple[str, Any, Any, str]  # flag, value, the only allowed value, reason
_UNTESTED = "it has not been tested"
PLAIN_KV_DTYPES = ("auto", "float16", "bfloat16")
FP8_KV_DTYPES = ("fp8", "fp8_e4m3")


def asked_for(engine_args: EngineArgs, check: bool = True) -> bool:
    """Whether EngineArgs ask for `dflash_tfm`, by dict, JSON or `--spec-method`.

    With `check`, raises ConfigError for wrong keys (and for keys of ours with another method).
    """
    wanted = engine_args.speculative_config
    if wanted is not None and not isinstance(wanted, dict):
        return False  # upstream's to refuse
    given = {str(key).replace("-", "_"): value for key, value in (wanted or {}).items()}
    for key, value in (
        ("method", engine_args.spec_method),
        ("model", engine_args.spec_model),
        ("num_speculative_tokens", engine_args.spec_tokens),
    ):
        if value is not None:
            given.setdefault(key, value)
    asked = given.get("method") == METHOD
    if check and asked:
        check_keys(given)
    elif check:
        refuse_stray_keys(given)
    return asked


def check_environment() -> None:
    """Refuse to start without the V2 model runner: it is the only one that `dflash_tfm` has."""
    from vllm import envs
    from vllm.triton_utils import HAS_TRITON

    only = f"method {METHOD!r} runs on the V2 model runner only"
    if envs.VLLM_USE_V2_MODEL_RUNNER is False:
        raise ConfigError(f"{only}, but VLLM_USE_V2_MODEL_RUNNER=0 switches it off; unset it or set it to 1")
    if not HAS_TRITON:
        raise ConfigError(
            f"{only}, which needs Triton, and vLLM has found no usable Triton here; "
            "on a machine without a GPU start it by `python -m vllm_weaver.cpu`"
        )


def check_vllm_config(config: VllmConfig) -> None:
    """Refuse what a finished VllmConfig with our settings cannot work with; a config without them passes."""
    if settings_of(config) is None:
        return
    from vllm.platforms import current_platform

    check_environment()
    _check_target(config.model_config)
    _check_parallel(config.parallel_config)
    _refuse(_limits(config))
    if not config.use_v2_model_runner:
        missing = ", ".join(config._get_v2_model_runner_unsupported_features()) or "this configuration"
        raise ConfigError(
            f"method {METHOD!r} runs on the V2 model runner only, which does not support {missing}"
        )
    cache = config.cache_config
    allowed = PLAIN_KV_DTYPES if current_platform.is_cpu() else PLAIN_KV_DTYPES + FP8_KV_DTYPES
    if cache.cache_dtype not in allowed:
        raise ConfigError(
            f"method {METHOD!r} does not work with --kv-cache-dtype={cache.cache_dtype!r}, since "
            f"tree attention does not read such keys and values here; "
            f"it must be one of {', '.join(map(repr, allowed))}"
        )
    _check_buffers(config)
    check_draft_files(config)


def _check_target(model_config: ModelConfig) -> None:
    what = None
    if model_config.is_hybrid and model_config.architecture not in HYBRID_TARGETS:
        what = f"hybrid models are supported as {', '.join(HYBRID_TARGETS)}"
    elif model_config.is_attention_free or model_config.is_encoder_decoder:
        what = "it must be a decoder with attention"
    elif model_config.use_mla:
        what = "latent attention (MLA) is not supported"
    else:
        layers = set(getattr(model_config.hf_text_config, "layer_types", None) or ())
        local = sorted(layers & {"sliding_attention", "chunked_attention"})
        if local or model_config.get_sliding_window() is not None:
            what = f"attention with a window is not supported ({', '.join(local) or 'sliding_window'})"
    if what is not None:
        raise ConfigError(
            f"method {METHOD!r} does not work with the target {model_config.model!r} "
            f"({model_config.architecture}): {what}"
        )


def check_arguments(engine_args: EngineArgs) -> None:
    """Refuse what upstream refuses while it builds the configuration without saying which flag it means."""
    _check_parallel(engine_args)
    _refuse([_lora(bool(engine_args.enable_lora)), _sleep(bool(engine_args.enable_sleep_mode))])


def _check_parallel(parallel: ParallelConfig | EngineArgs) -> None:
    """Refuse more than one device and micro-batches."""
    one_place = "the keys and states of a tree must be in one place"
    one_batch = "a tree must not be split over micro-batches"
    _refuse(
        [
            ("--pipeline-parallel-size", parallel.pipeline_parallel_size, 1, one_place),
            ("--tensor-parallel-size", parallel.tensor_parallel_size, 1, _UNTESTED),
            ("--data-parallel-size", parallel.data_parallel_size, 1, _UNTESTED),
            ("--prefill-context-parallel-size", parallel.prefill_context_parallel_size, 1, one_place),
            ("--decode-context-parallel-size", parallel.decode_context_parallel_size or 1, 1, one_place),
            ("--enable-dbo", parallel.enable_dbo, False, one_batch),
            ("--ubatch-size", parallel.ubatch_size, 0, one_batch),
        ]
    )


def _lora(enabled: bool) -> _Row:
    return "--enable-lora", enabled, False, _UNTESTED


def _sleep(enabled: bool) -> _Row:
    # vLLM keeps no copy of what it drops at level 2 but the buffers of target and draft, and reloads no more.
    reason = "sleep level 2 would drop the Weaver head, its tables and the trees' buffers for good"
    return "--enable-sleep-mode", enabled, False, reason


def _limits(config: VllmConfig) -> list[_Row]:
    transfer = "rejected branches would be transferred as if they were committed"
    return [
        ("--runner", config.model_config.runner_type, "generate", "only generation has drafts"),
        ("--kv-offloading-size", config.cache_config.kv_offloading_size, None, transfer),
        ("--kv-transfer-config", getattr(config.kv_transfer_config, "kv_connector", None), None, transfer),
        ("--ec-transfer-config", getattr(config.ec_transfer_config, "ec_connector", None), None, _UNTESTED),
        _lora(config.lora_config is not None),
        _sleep(bool(config.model_config.enable_sleep_mode)),
    ]


def _refuse(rows: list[_Row]) -> None:
    for flag, value, wanted, reason in rows:
        if value != wanted:
            raise ConfigError(
                f"method {METHOD!r} does not work with {flag}={value!r}, since {reason}; "
                f"it must be {wanted!r}"
            )


def _check_buffers(config: VllmConfig) -> None:
    """A step must hold one whole tree and draft block; warn where it cannot hold one for every sequence."""
    settings = settings_of(config)
    assert settings is not None
    scheduler = config.scheduler_config
    tokens, seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
    limit = min(tokens, scheduler.max_num_scheduled_tokens or tokens)
    nodes = settings.budget + 1
    # The scheduler charges a request its scheduled tokens and the mask positions of its draft block.
    width = nodes + settings.depth
    if nodes > limit or width > tokens:
        raise ConfigError(
            f"max_num_batched_tokens={limit} is too small for num_speculative_tokens={settings.budget}: "
            f"one tree needs {nodes} tokens and its draft {settings.depth} more; "
            f"set --max-num-batched-tokens to at least {width}"
        )
    fit = min(limit // nodes, tokens // width)
    if seqs > fit:
        logger.warning(
            "max_num_seqs=%d sequences with trees of %d nodes need %d tokens a step; "
            "max_num_batched_tokens=%d holds %d of them, "
            "so with more requests running some get a smaller tree or wait a step",
            seqs,
            nodes,
            seqs * width,
            tokens,
            fit,
        )
