# SPDX-License-Identifier: Apache-2.0
"""When hooks are applied: config hooks by the plugin in every process, the others for a config of ours.

Where they cannot be applied nothing is, apart from a guard that refuses `dflash_tfm` with the reason.
"""

from __future__ import annotations

import functools
import multiprocessing
from typing import TYPE_CHECKING, Any

from vllm_weaver.hooks import HOOKS, base

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_refusal: str | None = None  # why dflash_tfm is refused in this process; None while it is available


def install() -> None:
    """Apply the config hooks, or warn once and put the guard in place. Idempotent; never raises."""
    if _refusal is not None:
        return
    try:
        found = base.problem(HOOKS)
        if found is None:
            base.apply(hook for hook in HOOKS if hook.phase == "config")
    except base.HookError as error:
        found = str(error)
    except Exception as error:  # vLLM would die of it, for users who never asked for us
        base.logger.debug("vllm_weaver could not be installed", exc_info=True)
        found = f"method 'dflash_tfm' cannot work: {type(error).__name__}: {error}"
    if found is not None:
        _refuse(found)


def activate(vllm_config: VllmConfig) -> None:
    """Apply all hooks in this worker process if `vllm_config` has our settings; otherwise do nothing.

    Raises HookError (one sentence) where a target is missing, changed or patched by someone else.
    """
    from vllm_weaver.config import settings_of

    if settings_of(vllm_config) is not None:
        base.apply(HOOKS)


def activate_engine() -> None:
    """Apply the engine hooks in a process that is about to build a config with our settings."""
    base.apply(hook for hook in HOOKS if hook.phase == "engine")


def activate_draft(vllm_config: Any) -> None:
    """Apply the draft hooks in a worker whose draft upstream walks by candidates, whatever its method."""
    from vllm_weaver.hooks.draft_side import WALKED

    speculative = getattr(vllm_config, "speculative_config", None)
    draft = getattr(speculative, "draft_model_config", None)
    if draft is not None and set(WALKED) & set(getattr(draft, "architectures", None) or ()):
        base.apply(hook for hook in HOOKS if hook.phase == "draft")


def _refuse(reason: str) -> None:
    """Leave vLLM as it is, but let `dflash_tfm` stop start-up with `reason`; warns in the main process."""
    global _refusal
    _refusal = reason
    if multiprocessing.parent_process() is None:  # the processes that vLLM starts would only repeat it
        base.logger.warning("vllm_weaver is inactive; %s", reason)
    try:
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs.create_engine_config = _guard(EngineArgs.create_engine_config, reason)
    except (ImportError, AttributeError):
        base.logger.debug("no EngineArgs.create_engine_config to guard in this vLLM", exc_info=True)


def _guard(original: Any, reason: str) -> Any:
    @functools.wraps(original)
    def create_engine_config(self: Any, *args: Any, **kwargs: Any) -> Any:
        wanted = getattr(self, "speculative_config", None)
        method = wanted.get("method") if isinstance(wanted, dict) else None
        if "dflash_tfm" in (method, getattr(self, "spec_method", None)):
            raise base.HookError(reason)
        return original(self, *args, **kwargs)

    return create_engine_config
