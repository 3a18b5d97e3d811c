# SPDX-License-Identifier: Apache-2.0
"""The `vllm.general_plugins` entry point. vLLM calls `register()` in every process, possibly more than once.

This module imports nothing of vLLM, so that loading it cannot fail; whatever goes wrong later is reported
once and stops vLLM only if `dflash_tfm` is asked for.
"""

from __future__ import annotations


def register() -> None:
    """Make `method: dflash_tfm` known to vLLM, or the reason why it cannot be had. Never raises."""
    from vllm_weaver.hooks.install import install

    install()
