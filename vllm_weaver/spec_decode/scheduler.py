# SPDX-License-Identifier: Apache-2.0
"""vLLM's scheduler for a config with trees: it counts them, and masks follow their paths."""

from __future__ import annotations

import functools
from typing import Any

from vllm_weaver.spec_decode.grammar import TreeGrammars
from vllm_weaver.spec_decode.metrics import CountingScheduler


class GrammarScheduler:
    """Mixin in front of a vLLM scheduler: the grammars of its requests know trees."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.structured_output_manager: Any = TreeGrammars(self.structured_output_manager)


@functools.cache
def tree_scheduler(scheduler: type, depth: int) -> type:
    """The class `scheduler` for trees; a path through one has at most `depth` drafts."""
    body = {"depth": depth, "__doc__": scheduler.__doc__, "__module__": scheduler.__module__}
    return type(scheduler.__name__, (CountingScheduler, GrammarScheduler, scheduler), body)
