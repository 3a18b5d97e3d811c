# SPDX-License-Identifier: Apache-2.0
"""Replacements of the runner hooks. Each acts only where `dflash_tfm` is asked for and else calls the
original."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from vllm_weaver.config import settings_of


def init_speculator(original: Callable[..., Any]) -> Callable[..., Any]:
    """Our speculator in place of plain DFlash."""

    @functools.wraps(original)
    def wrapper(vllm_config: Any, device: Any, req_states: Any) -> Any:
        if settings_of(vllm_config) is None:
            return original(vllm_config, device, req_states)
        from vllm_weaver.spec_decode.speculator import DFlashTfmSpeculator

        return DFlashTfmSpeculator(vllm_config, device)

    return wrapper


def init_model_state(original: Callable[..., Any]) -> Callable[..., Any]:
    """The tree form of the model state that upstream chooses."""

    @functools.wraps(original)
    def wrapper(vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> Any:
        if settings_of(vllm_config) is None:
            return original(vllm_config, model, encoder_cache, device)
        from vllm.v1.worker.gpu.model_states import resolve_model_state_cls

        from vllm_weaver.spec_decode.model_state import tree_state_class

        return tree_state_class(resolve_model_state_cls(vllm_config, model))(
            vllm_config, model, encoder_cache, device
        )

    return wrapper


def mamba_kv_cache_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """One recurrent state slot a request."""

    @functools.wraps(original)
    def wrapper(self: Any, vllm_config: Any) -> Any:
        spec = original(self, vllm_config)
        if spec is None or settings_of(vllm_config) is None:
            return spec
        return dataclasses.replace(spec, num_speculative_blocks=0)

    return wrapper


def mamba_state_shape(original: classmethod) -> classmethod:
    """State shapes of the plain width, from which upstream computes the page size."""
    function = original.__func__

    @functools.wraps(function)
    def wrapper(cls: Any, vllm_config: Any) -> Any:
        if settings_of(vllm_config) is not None:
            vllm_config = copy.copy(vllm_config)
            vllm_config.speculative_config = None
        return function(cls, vllm_config)

    return classmethod(wrapper)


def gdn_core_cpu(original: Callable[..., None]) -> Callable[..., None]:
    """Tree rows of the CPU op by our verify; everything else by upstream."""

    @functools.wraps(original)
    def wrapper(layer: Any, metadata: Any, *args: Any) -> None:
        if not hasattr(layer, "tree_stash"):
            original(layer, metadata, *args)
            return
        from vllm_weaver.spec_decode.gdn import forward_core_cpu

        forward_core_cpu(original, layer, metadata, *args)

    return wrapper


def gdn_core_cuda(original: Callable[..., None]) -> Callable[..., None]:
    """Tree rows of the CUDA op by our verify; everything else by upstream."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if not hasattr(self, "tree_stash"):
            original(self, *args, **kwargs)
            return
        from vllm_weaver.spec_decode.gdn import forward_core_cuda

        forward_core_cuda(original, self, *args, **kwargs)

    return wrapper


def get_output(original: Callable[..., Any]) -> Callable[..., Any]:
    """Put the record of a step's walks on the output that goes to the scheduler."""

    @functools.wraps(original)
    def wrapper(self: Any) -> Any:
        output = original(self)  # waits for the copies to the host, the record's among them
        if hasattr(self.sampler_output, "chain_reasons"):
            output.tree_record = self.sampler_output.rows()
        return output

    return wrapper
