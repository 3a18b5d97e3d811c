# SPDX-License-Identifier: Apache-2.0
"""Replacements of the config hooks. Each acts only where `dflash_tfm` is asked for, else as upstream."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from vllm_weaver import checks
from vllm_weaver.config import METHOD, ConfigError, WeaverSpeculativeConfig, one_line, settings_of
from vllm_weaver.hooks import install


def speculative_config(original: type) -> type:
    """Our subclass of upstream's SpeculativeConfig."""
    if not issubclass(WeaverSpeculativeConfig, original):
        raise TypeError(f"{original!r} is not the class that WeaverSpeculativeConfig extends")
    return WeaverSpeculativeConfig


def create_engine_config(original: Callable[..., Any]) -> Callable[..., Any]:
    """Check keys before, and the configuration after, upstream builds it; a mistake is one line."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not checks.asked_for(self):
            return original(self, *args, **kwargs)
        checks.check_environment()
        checks.check_arguments(self)
        install.activate_engine()
        sizes_given = _capture_sizes_given(self)
        try:
            config = original(self, *args, **kwargs)
        except ValidationError as error:
            raise _dictated_method(self) or one_line(error) from None
        settings = settings_of(config)
        assert settings is not None  # never plain DFlash in silence
        checks.check_vllm_config(config)
        setattr(config.scheduler_config, _DEPTH, min(settings.depth, settings.budget))
        if not sizes_given:
            cover_decode_batches(config)
        return config

    return wrapper


# A scheduler config does not know the speculative one. This attribute tells it, in whatever process it
# reaches, that there are trees, and how many drafts a path has at most.
_DEPTH = "dflash_tfm_depth"


def get_scheduler_cls(original: Callable[..., type]) -> Callable[..., type]:
    """The scheduler of a config with trees: it counts them, and lays a grammar's masks along their paths."""

    @functools.wraps(original)
    def wrapper(self: Any) -> type:
        scheduler, depth = original(self), getattr(self, _DEPTH, None)
        if depth is None:
            return scheduler
        from vllm_weaver.spec_decode.scheduler import tree_scheduler

        return tree_scheduler(scheduler, depth)

    return wrapper


def spec_decoding_prom(original: type) -> type:
    """vLLM's Prometheus metrics of speculative decoding, with those of trees."""
    return _extended(original, "TreeProm")


def spec_decoding_logging(original: type) -> type:
    """vLLM's log line of speculative decoding, with one about trees."""
    return _extended(original, "TreeLogging")


def _extended(original: type, name: str) -> type:
    from vllm_weaver.spec_decode import metrics

    cls: type = getattr(metrics, name)
    if not issubclass(cls, original):
        raise TypeError(f"{original!r} is not the class that {name} extends")
    return cls


def _capture_sizes_given(engine_args: Any) -> bool:
    """Whether the user chose the sizes of CUDA graphs."""
    compilation = engine_args.compilation_config
    return any(
        getattr(holder, name, None) is not None
        for holder in (engine_args, compilation)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )


def cover_decode_batches(config: Any) -> None:
    """Add capture sizes for batches of up to `max_num_seqs` whole trees.

    Upstream's default ends at 512 rows (1,024 on sm_100), which are 15 trees of 33 nodes. The sizes added are
    those of 1, 2, 4, 8, 16, 24, ... requests, as far as a step's rows reach.
    """
    compilation, scheduler, settings = config.compilation_config, config.scheduler_config, settings_of(config)
    if not compilation.cudagraph_capture_sizes or settings is None:  # eager
        return
    nodes = settings.budget + 1
    most = min(scheduler.max_num_seqs, scheduler.max_num_batched_tokens // nodes)
    counts = {most} | {n for n in (1, 2, 4, *range(8, most, 8 if most <= 128 else 16)) if n <= most}
    sizes = {count * nodes for count in counts if count > 0}
    compilation.cudagraph_capture_sizes = sorted(sizes | set(compilation.cudagraph_capture_sizes))
    compilation.max_cudagraph_capture_size = compilation.cudagraph_capture_sizes[-1]
    compilation.post_init_cudagraph_sizes()


def _dictated_method(engine_args: Any) -> ConfigError | None:
    """The mistake if the served checkpoint is in `speculators` format, which replaces the method."""
    method = engine_args.speculative_config.get("method", METHOD)
    if method == METHOD:
        return None
    return ConfigError(
        f"speculative config: method={METHOD!r} is replaced by {method!r}, which the speculators_config of "
        "the served checkpoint dictates; serve its target model itself"
    )


def num_lookahead_tokens(original: property) -> property:
    """Slots past the scheduled tokens that the draft and the tree may write."""
    getter = original.fget
    assert getter is not None

    def fget(self: Any) -> int:
        settings = settings_of(self)
        return int(getter(self)) if settings is None else settings.num_draft_slots

    return property(fget, doc=original.__doc__)


def validate_spec_decode(original: Callable[..., None]) -> Callable[..., None]:
    """No sampling parameter is refused for being beside trees."""

    @functools.wraps(original)
    def wrapper(self: Any, speculative_config: Any) -> None:
        if getattr(speculative_config, "weaver_settings", None) is None:
            original(self, speculative_config)

    return wrapper


def init_device(original: Callable[..., Any]) -> Callable[..., Any]:
    """Apply the runner hooks before the worker builds its model runner."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        if settings_of(self.vllm_config) is not None:
            checks.check_vllm_config(self.vllm_config)  # again: a VllmConfig can be built without EngineArgs
            install.activate(self.vllm_config)
        install.activate_draft(self.vllm_config)
        return original(self)

    return wrapper
