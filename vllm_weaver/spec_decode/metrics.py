# SPDX-License-Identifier: Apache-2.0
"""What a server says about its trees: how the counts of a step come from the worker to `/metrics` and log.

    worker     `TreeSamplerOutput.record`: nodes and branching of every request, copied to the host beside the
               sampled tokens; put on vLLM's step output by the hook `step-record`
    scheduler  `CountingScheduler`: which verifies count, and what they committed up to a stop
    frontend   `TreeProm` and `TreeLogging`, in place of vLLM's spec-decode metrics for trees

vLLM's own counts are made right on the way: drafts are nodes (vLLM counts the budget, placeholders included)
and a token past a stop was not accepted.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import prometheus_client
from vllm.logger import init_logger
from vllm.v1.metrics.utils import create_metric_per_engine
from vllm.v1.spec_decode.metrics import SpecDecodingLogging, SpecDecodingProm, SpecDecodingStats

logger = init_logger(__name__)

CHAIN_REASONS = ("penalty", "bad_words", "thinking_budget", "custom_processor")
"""Why the trees of a request are chains; labels of a metric, and bit numbers of a mask."""


def reason_masks(reasons: Mapping[str, np.ndarray]) -> np.ndarray:
    """uint8 [R]: bit i set where `reasons[CHAIN_REASONS[i]]`, bool [R], is true. At least one reason."""
    flags = [flag.astype(np.uint8) << CHAIN_REASONS.index(name) for name, flag in reasons.items()]
    return np.bitwise_or.reduce(flags)


@dataclasses.dataclass
class TreeCounts:
    """Counts over the verifies of some steps. depth: the drafts that a path has at most. `lengths[k]`:
    verifies that committed k tokens, the bonus token included, up to a stop. (Accepted drafts by depth are
    vLLM's own, `num_accepted_tokens_per_pos`.)"""

    depth: int = 0
    nodes: int = 0
    accepted_paths: int = 0
    branching_paths: int = 0
    chains: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(CHAIN_REASONS, 0))
    lengths: list[int] = dataclasses.field(default_factory=list)

    def add(self, other: TreeCounts) -> None:
        """Sum up, in place; depth is the other's."""
        self.depth = other.depth
        self.nodes += other.nodes
        self.accepted_paths += other.accepted_paths
        self.branching_paths += other.branching_paths
        for reason, count in other.chains.items():
            self.chains[reason] += count
        self.lengths += [0] * (len(other.lengths) - len(self.lengths))
        for length, count in enumerate(other.lengths):
            self.lengths[length] += count

    def attach(self, stats: SpecDecodingStats) -> None:
        """Let the counts travel with `stats` to the frontend.

        The wire knows the fields of vLLM's class only. Its list of drafts by position, which nothing in vLLM
        0.32 reads, carries them past its own end.
        """
        head = (self.depth, self.nodes, self.accepted_paths, self.branching_paths, *self.chains.values())
        stats.num_draft_tokens_per_pos += [*head, *self.lengths]

    @classmethod
    def detach(cls, stats: SpecDecodingStats) -> TreeCounts | None:
        """The counts that travelled with `stats`, or None; what is left in `stats` is vLLM's own."""
        own = stats.num_spec_tokens
        tail = stats.num_draft_tokens_per_pos[own:]
        if not tail:
            return None
        stats.num_draft_tokens_per_pos = stats.num_draft_tokens_per_pos[:own]
        first = 4 + len(CHAIN_REASONS)
        chains = dict(zip(CHAIN_REASONS, tail[4:first], strict=True))
        depth, nodes, accepted, branching = tail[:4]
        return cls(depth, nodes, accepted, branching, chains, tail[first:])


# --- scheduler -------------------------------------------------------------------------------------------


class CountingScheduler:
    """Mixin in front of a vLLM scheduler: counts what its verifies of trees proposed and committed."""

    depth: int
    _verified: list[tuple[str, int]]

    def make_spec_decoding_stats(self, stats: Any, **verify: Any) -> Any:
        """vLLM calls this for each verify that counts; what was committed is known only after the step."""
        made = super().make_spec_decoding_stats(stats, **verify)  # type: ignore[misc]
        if made is not None:
            self._verified.append((verify["request_id"], verify["num_accepted_tokens"]))
        return made

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """vLLM's update, then the counts of the step beside its statistics."""
        self._verified = []
        outputs = super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]
        record = getattr(model_runner_output, "tree_record", None)
        stats = next((o.scheduler_stats for o in outputs.values() if o.scheduler_stats is not None), None)
        if record is None or stats is None or stats.spec_decoding_stats is None:
            return outputs
        committed = {o.request_id: len(o.new_token_ids) for each in outputs.values() for o in each.outputs}
        rows = model_runner_output.req_id_to_index
        verifies = [
            (accepted, committed[req], *record[rows[req]])
            for req, accepted in self._verified
            if req in committed
        ]
        count_verifies(stats.spec_decoding_stats, verifies, self.depth).attach(stats.spec_decoding_stats)
        return outputs


def count_verifies(
    stats: SpecDecodingStats, verifies: list[tuple[int, int, int, int, int]], depth: int
) -> TreeCounts:
    """Counts of one step; corrects vLLM's own counts of it in `stats`.

    A verify is (accepted drafts, committed tokens, nodes proposed, depth where the path first branched or 0,
    mask of `CHAIN_REASONS`). At a stop fewer tokens are committed than were accepted.
    """
    counts = TreeCounts(
        depth, lengths=[0] * (1 + max((committed for _, committed, *_ in verifies), default=0))
    )
    for accepted, committed, nodes, branched, reasons in verifies:
        kept = min(accepted, committed)
        stats.num_accepted_tokens -= accepted - kept
        for position in range(kept, accepted):
            stats.num_accepted_tokens_per_pos[position] -= 1
        counts.nodes += nodes
        counts.accepted_paths += kept > 0
        counts.branching_paths += 0 < branched <= kept
        counts.lengths[committed] += 1
        for bit, reason in enumerate(CHAIN_REASONS):
            counts.chains[reason] += reasons >> bit & 1
    stats.num_draft_tokens = counts.nodes
    return counts


# --- frontend --------------------------------------------------------------------------------------------


class TreeProm(SpecDecodingProm):
    """vLLM's Prometheus metrics of speculative decoding, and those of trees for a config that has them."""

    def __init__(
        self,
        speculative_config: Any,
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
        **kwargs: Any,
    ) -> None:
        settings = getattr(speculative_config, "weaver_settings", None)
        if settings is not None:
            # No accepted token stands deeper than the draft looks: these are the positions there are.
            speculative_config = copy.copy(speculative_config)
            speculative_config.num_speculative_tokens = min(settings.budget, settings.depth)
        super().__init__(speculative_config, labelnames, per_engine_labelvalues, **kwargs)
        self._trees: dict[int, _EngineMetrics] = {}
        if settings is not None:
            self._trees = _tree_metrics(settings.budget, settings.depth, labelnames, per_engine_labelvalues)

    def observe(self, spec_decoding_stats: SpecDecodingStats, engine_idx: int = 0) -> None:
        """Add the counts of one step."""
        counts = TreeCounts.detach(spec_decoding_stats) if self._trees else None
        super().observe(spec_decoding_stats, engine_idx)
        if counts is not None:
            self._trees[engine_idx].add(counts, spec_decoding_stats)


@dataclasses.dataclass(frozen=True)
class _EngineMetrics:
    """The metrics of one engine, by the part of the name after `vllm:dflash_tfm_`."""

    by_name: dict[str, Any]
    chains: dict[str, Any]

    def add(self, counts: TreeCounts, stats: SpecDecodingStats) -> None:
        for name in ("tree_nodes", "accepted_paths", "branching_paths"):
            self.by_name[name].inc(getattr(counts, name.removeprefix("tree_")))
        for reason, count in counts.chains.items():
            self.chains[reason].inc(count)
        for name, values in (("accepted_length", counts.lengths), ("accepted_depth", depths_of(stats))):
            for value, count in enumerate(values):
                for _ in range(count):  # as many as a step has requests
                    self.by_name[name].observe(value)


def depths_of(stats: SpecDecodingStats) -> list[int]:
    """Verifies by the number of drafts they accepted, 0 first."""
    at_least = [stats.num_drafts, *stats.num_accepted_tokens_per_pos, 0]
    return [here - deeper for here, deeper in zip(at_least, at_least[1:], strict=False)]


def _tree_metrics(
    budget: int, depth: int, labelnames: list[str], per_engine: dict[int, list[object]]
) -> dict[int, _EngineMetrics]:
    counter, histogram = prometheus_client.Counter, prometheus_client.Histogram

    def make(kind: Callable[..., Any], name: str, text: str, **more: Any) -> dict[int, Any]:
        metric = kind(name=f"vllm:dflash_tfm_{name}", documentation=text, labelnames=labelnames, **more)
        return dict(create_metric_per_engine(metric, per_engine))

    gauge, latest = prometheus_client.Gauge, {"multiprocess_mode": "mostrecent"}
    for engine in make(gauge, "tree_budget", "Nodes a tree may have besides the root.", **latest).values():
        engine.set(budget)
    metrics = {
        "tree_nodes": make(counter, "tree_nodes", "Tree nodes proposed and verified, roots not counted."),
        "accepted_paths": make(counter, "accepted_paths", "Verifies that accepted at least one draft."),
        "branching_paths": make(
            counter,
            "branching_paths",
            "Verifies whose path left the first children: a chain had ended there.",
        ),
        "accepted_length": make(
            histogram,
            "accepted_length",
            "Tokens that a verify committed, the bonus token included, up to a stop.",
            buckets=range(1, depth + 2),
        ),
        "accepted_depth": make(
            histogram,
            "accepted_depth",
            "Drafts that a verify accepted, up to a stop.",
            buckets=range(depth + 1),
        ),
    }
    chains = prometheus_client.Counter(
        name="vllm:dflash_tfm_chain_fallbacks",
        documentation="Verifies of a chain in place of a tree, by what the request asked for.",
        labelnames=[*labelnames, "reason"],
    )
    return {
        index: _EngineMetrics(
            {name: engines[index] for name, engines in metrics.items()},
            {reason: chains.labels(*values, reason) for reason in CHAIN_REASONS},
        )
        for index, values in per_engine.items()
    }


class TreeLogging(SpecDecodingLogging):
    """vLLM's log line of speculative decoding, and one about trees where there were any."""

    def reset(self) -> None:
        """Begin a new interval."""
        super().reset()
        self.trees = TreeCounts()
        self.depths: list[int] = []

    def observe(self, spec_decoding_stats: SpecDecodingStats) -> None:
        """Add the counts of one step."""
        # Not the object itself: the next logger takes the counts off too.
        stats = dataclasses.replace(spec_decoding_stats)
        counts = TreeCounts.detach(stats)
        if counts is not None:
            self.trees.add(counts)
            found = depths_of(stats)[: counts.depth + 1]
            self.depths = [a + b for a, b in zip(self.depths or [0] * len(found), found, strict=True)]
            stats.num_accepted_tokens_per_pos = stats.num_accepted_tokens_per_pos[: counts.depth]
        super().observe(stats)

    def log(self, log_fn: Callable[..., None] = logger.info) -> None:
        """Log the interval and begin a new one."""
        trees, verifies = self.trees, sum(self.depths)
        if verifies:
            tokens = sum(length * count for length, count in enumerate(trees.lengths))
            chains = ", ".join(f"{name} {count}" for name, count in trees.chains.items() if count) or "none"
            log_fn(
                "Tree metrics: Tokens a verify: %.2f, Nodes a verify: %.1f, Depths accepted (from 0): %s, "
                "Branching share: %.1f%%, Chains in place of trees: %s",
                tokens / verifies,
                trees.nodes / verifies,
                ", ".join(f"{count / verifies:.3f}" for count in self.depths),
                100 * trees.branching_paths / max(1, trees.accepted_paths),
                chains,
            )
        super().log(log_fn=log_fn)
