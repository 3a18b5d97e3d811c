# SPDX-License-Identifier: Apache-2.0
"""Configurations with `dflash_tfm` as tests build them, and the message where building must be refused."""

from __future__ import annotations

from typing import Any

import pytest

from tests import tiny


def build(target: str, spec: Any, **options: Any) -> Any:
    """The VllmConfig that `LLM(target, speculative_config=spec)` would build."""
    return tiny.engine_args(target, speculative_config=spec, **options).create_engine_config()


def refusal(target: str, spec: Any, **options: Any) -> str:
    """The message of the ConfigError that building raises, checked to be one line."""
    from vllm_weaver.config import ConfigError

    with pytest.raises(ConfigError) as caught:
        build(target, spec, **options)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 1000
    return message


def chain(draft: str, **changes: Any) -> dict[str, Any]:
    """A speculative config for chains of this draft; a change to None leaves its key out."""
    keys = {
        "method": "dflash_tfm",
        "model": draft,
        "num_speculative_tokens": 16,
        "proposal": "chain",
    } | changes
    return {key: value for key, value in keys.items() if value is not None}


def from_command_line(*arguments: str) -> Any:
    """The VllmConfig that `vllm serve` would build from these words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = make_arg_parser(FlexibleArgumentParser())
    common = ["--load-format", "dummy", "--skip-tokenizer-init", "--enforce-eager", "--max-num-seqs", "4"]
    return AsyncEngineArgs.from_cli_args(parser.parse_args([*common, *arguments])).create_engine_config()
