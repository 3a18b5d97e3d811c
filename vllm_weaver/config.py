# SPDX-License-Identifier: Apache-2.0
"""The speculative config of `method: dflash_tfm`: its keys, their checks, and one frozen settings object
for the rest.

Upstream sees the method `dflash` with `num_speculative_tokens` = the tree budget;
`settings_of(vllm_config)` says whether trees were asked for. Every mistake is a `ConfigError`: one sentence
naming key, value and what is allowed.
"""

import difflib
import json
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from pydantic import SkipValidation, ValidationError
from vllm.config.speculative import SpeculativeConfig, SpeculativeMethod
from vllm.config.utils import config
from vllm.utils.hashing import safe_hash

from vllm_weaver import __version__

if TYPE_CHECKING:
    from vllm.config import VllmConfig

METHOD = "dflash_tfm"
MAX_BUDGET = 256
Proposal = Literal["weaver", "ddtree", "chain"]
PROPOSALS: tuple[Proposal, ...] = get_args(Proposal)
TreeVerify = Literal["target_only", "traversal"]
TREE_VERIFY: tuple[TreeVerify, ...] = get_args(TreeVerify)

OUR_KEYS = (
    "weaver",
    "weaver_revision",
    "weaver_sha256",
    "proposal",
    "candidate_pool_size",
    "tree_verify",
)

# Upstream keys that a tree cannot honour, with the reason; upstream's default is the only allowed value.
NOT_WITH_TREES = {
    "draft_sample_method": "the tree is grown from the most likely continuations",
    "rejection_sample_method": "trees are verified by our own walk",
    "synthetic_acceptance_rates": "trees are verified by our own walk",
    "synthetic_acceptance_length": "trees are verified by our own walk",
    "num_speculative_tokens_per_batch_size": "the tree budget is fixed",
    "enable_adaptive_verification": "the tree budget is fixed",
    "disable_padded_drafter_batch": "every request drafts one full block",
    "use_local_argmax_reduction": "the candidate pool needs full draft logits",
    "use_heterogeneous_vocab": "draft and target share token ids",
    "prompt_lookup_max": "it belongs to the ngram methods",
    "prompt_lookup_min": "it belongs to the ngram methods",
    "suffix_decoding_max_tree_depth": "it belongs to the suffix method",
    "suffix_decoding_max_cached_requests": "it belongs to the suffix method",
    "suffix_decoding_max_spec_factor": "it belongs to the suffix method",
    "suffix_decoding_min_token_prob": "it belongs to the suffix method",
    "dspark_draft_topk": "it belongs to the dspark method",
    "index_share_for_mtp_iteration": "it belongs to the mtp method",
    "max_model_len": "the draft follows the target's max_model_len",
}
# Set by the engine, not by users.
_INTERNAL_KEYS = frozenset(
    {
        "target_model_config",
        "target_parallel_config",
        "draft_model_config",
        "draft_parallel_config",
        "weaver_settings",
    }
)
_ENGINE_KEYS = frozenset({"target_model_config", "target_parallel_config"})


class ConfigError(ValueError):
    """A mistake in the user's configuration, as one sentence."""


@dataclass(frozen=True)
class WeaverSettings:
    """What `dflash_tfm` was asked to do. Resolved: the Weaver file exists and fits target and draft.

    budget: nodes of a tree besides the root, 1-256. depth: draft tokens of one DFlash block (block size - 1).
    weaver: local path of the checkpoint, None for `ddtree` and `chain`. candidate_pool_size: candidates a
    draft position, None for the proposal's own default. tree_verify: how sampled requests are verified,
    `target_only` (the text of plain decoding with the same seed) or `traversal` (a text of the same
    distribution); greedy requests give the same text under both.
    """

    budget: int
    depth: int
    proposal: Proposal
    weaver: str | None = None
    weaver_revision: str | None = None
    weaver_sha256: str | None = None
    candidate_pool_size: int | None = None
    tree_verify: TreeVerify = "target_only"

    @property
    def num_draft_slots(self) -> int:
        """KV slots past the accepted path that drafting writes: bonus token and mask positions of a block."""
        return self.depth + 1


def settings_of(vllm_config: "VllmConfig | None") -> WeaverSettings | None:
    """The settings of a VllmConfig that asks for `dflash_tfm`, or None."""
    speculative = getattr(vllm_config, "speculative_config", None)
    return getattr(speculative, "weaver_settings", None)


@config
class WeaverSpeculativeConfig(SpeculativeConfig):
    """Speculative decoding; method dflash_tfm verifies a tree of draft tokens instead of a chain."""

    # One flat Literal: the command line offers the choices of the first that it finds.
    method: Literal[SpeculativeMethod, "dflash_tfm"] | None = None  # type: ignore[valid-type]
    """The name of the speculative method, detected from the draft model where possible. dflash_tfm verifies
    trees grown over a DFlash draft; num_speculative_tokens is then the tree budget."""
    weaver: str | None = None
    """Weaver checkpoint of proposal 'weaver': a file, a folder, or repo[:file] on the hub."""
    weaver_revision: str | None = None
    """Revision of the hub repository that `weaver` names."""
    weaver_sha256: str | None = None
    """SHA-256 that the Weaver file must have, 64 hex digits."""
    proposal: Proposal | None = None
    """How the tree is grown: 'weaver' (default), 'ddtree' or 'chain'."""
    candidate_pool_size: int | None = None
    """Candidates a draft position; the proposal's own default where unset."""
    tree_verify: TreeVerify | None = None
    """How requests with a temperature are verified: 'target_only' (default) gives the text of plain decoding
    with the same seed; 'traversal' (Traversal Verification) a text of the same distribution. As the trees are
    chosen and not drawn, both accept equally many tokens. Greedy requests are not affected."""
    weaver_settings: SkipValidation[WeaverSettings | None] = None
    """Set while the config is built; see vllm_weaver.config.settings_of."""

    def __post_init__(self) -> Self:  # upstream's returns self too
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        if self.method != METHOD:
            refuse_stray_keys(given)
            super().__post_init__()
            return self
        check_keys({key: value for key, value in given.items() if value != default_of(key)})
        self.method = "dflash"
        try:
            super().__post_init__()
        except ConfigError:
            raise
        except ValueError as error:  # about the draft, as our keys are checked
            raise ConfigError(f"speculative config with model={_show(self.model)}: {_brief(error)}") from None
        self.weaver_settings = self._settle()
        # The draft is asked about every position that the target can reach (vllm-project/vllm#48894).
        self._maybe_override_draft_max_position_embeddings(
            self.draft_model_config.hf_config, self.target_model_config.max_model_len
        )
        return self

    def _settle(self) -> WeaverSettings:
        depth = draft_depth(self.draft_model_config.hf_config, self.model)
        proposal: Proposal = self.proposal or "weaver"
        return WeaverSettings(
            budget=self.num_speculative_tokens,
            depth=depth,
            proposal=proposal,
            weaver=resolve_weaver(self, depth) if proposal == "weaver" else None,
            weaver_revision=self.weaver_revision,
            weaver_sha256=self.weaver_sha256,
            candidate_pool_size=self.candidate_pool_size,
            tree_verify=self.tree_verify or "target_only",
        )

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        """Draft input rows a request besides those scheduled: the mask positions of one DFlash block."""
        if self.weaver_settings is None:
            return super().max_num_new_slots_for_drafting
        return self.weaver_settings.depth

    def use_eagle_block_drop(self) -> bool:
        """Whether a prefix hit leaves out its last block. Upstream's drafts may need the hidden state before
        the first new token; what DFlash keeps of a position depends on that position alone."""
        return self.weaver_settings is None and bool(super().use_eagle_block_drop())

    def compute_hash(self) -> str:
        """Upstream's hash, and for trees the method and our version. Compiled graphs end where attention and
        GDN begin, so that none depends on a budget or a proposal: a sweep over budgets compiles once."""
        inherited = super().compute_hash()
        if self.weaver_settings is None:
            return inherited
        factors = json.dumps([inherited, __version__, METHOD])
        return safe_hash(factors.encode(), usedforsecurity=False).hexdigest()

    def __repr__(self) -> str:
        if self.weaver_settings is None:
            return super().__repr__()
        return f"SpeculativeConfig(method={METHOD!r}, model={self.model!r}, {self.weaver_settings!r})"


# --- keys ------------------------------------------------------------------------------------------------


def default_of(key: str) -> Any:
    """Default of a field of the config; None where it has none or makes a new object."""
    for field in fields(WeaverSpeculativeConfig):
        if field.name == key:
            default = getattr(
                field.default, "default", field.default
            )  # a pydantic Field carries its own default
            return None if default is MISSING else default
    return None


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and value.strip() != ""


def _is_sha256(value: Any) -> bool:
    return isinstance(value, str) and len(value) == 64 and all(c in "0123456789abcdefABCDEF" for c in value)


# key -> (test, what is allowed)
_FORMS = {
    "model": (_is_text, "a folder or hub repository of a DFlash draft"),
    "num_speculative_tokens": (
        lambda v: _is_int(v) and 1 <= v <= MAX_BUDGET,
        f"the tree budget, an integer from 1 to {MAX_BUDGET}",
    ),
    "weaver": (_is_text, "a file, a folder, or repo[:file] on the hub"),
    "weaver_revision": (_is_text, "a branch, tag or commit of the hub repository"),
    "weaver_sha256": (_is_sha256, "64 hex digits"),
    "proposal": (
        lambda v: isinstance(v, str) and v in PROPOSALS,
        "one of " + ", ".join(map(repr, PROPOSALS)),
    ),
    "candidate_pool_size": (lambda v: _is_int(v) and v >= 1, "an integer of at least 1"),
    "tree_verify": (
        lambda v: isinstance(v, str) and v in TREE_VERIFY,
        "one of " + ", ".join(map(repr, TREE_VERIFY)),
    ),
    "draft_tensor_parallel_size": (lambda v: _is_int(v) and v == 1, "1"),
}


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def refuse_stray_keys(given: Mapping[str, Any]) -> None:
    """Raise ConfigError if a key of ours is set though `method` is not dflash_tfm."""
    for key in (*OUR_KEYS, "weaver_settings"):
        if given.get(key) is not None:
            raise ConfigError(
                f"speculative config: {key}={_show(given[key])} needs method={METHOD!r}, "
                f"but method is {given.get('method')!r}"
            )


def check_keys(given: Mapping[str, Any]) -> None:
    """Check the keys a user gave with method dflash_tfm, as far as they can be checked without any file.

    Raises ConfigError on unknown keys, wrong types and values, contradictions, and keys that trees cannot
    honour.
    """
    known = [field.name for field in fields(WeaverSpeculativeConfig) if field.name not in _INTERNAL_KEYS]
    for key, value in given.items():
        if key not in known and key not in _ENGINE_KEYS:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = (
                f"; did you mean {near[0]!r}?"
                if near
                else f"; keys of {METHOD}: " + ", ".join(("model", "num_speculative_tokens", *OUR_KEYS))
            )
            raise ConfigError(f"speculative config: unknown key {key!r} (value {_show(value)}){hint}")
        if value is not None and key in _FORMS:
            test, allowed = _FORMS[key]
            if not test(value):
                raise ConfigError(
                    f"speculative config: {key}={_show(value)} is not allowed with method {METHOD!r}; "
                    f"it must be {allowed}"
                )
        if key in NOT_WITH_TREES and value != default_of(key):
            raise ConfigError(
                f"speculative config: {key}={_show(value)} is not allowed with method {METHOD!r}, since "
                f"{NOT_WITH_TREES[key]}; leave it out (default {default_of(key)!r})"
            )
    _check_together(given)


def _check_together(given: Mapping[str, Any]) -> None:
    for key in ("model", "num_speculative_tokens"):
        if given.get(key) is None:
            raise ConfigError(
                f"speculative config: {key} is missing; method {METHOD!r} needs {_FORMS[key][1]}"
            )
    proposal = given.get("proposal") or "weaver"
    if proposal == "weaver":
        if given.get("weaver") is None:
            raise ConfigError(
                "speculative config: weaver is missing; proposal 'weaver' needs "
                f"{_FORMS['weaver'][1]} (proposals 'ddtree' and 'chain' need none)"
            )
        return
    contradicting = [key for key in OUR_KEYS if key.startswith("weaver")]
    if proposal == "chain":
        contradicting.append("candidate_pool_size")
    for key in contradicting:
        if given.get(key) is not None:
            raise ConfigError(
                f"speculative config: {key}={_show(given[key])} contradicts proposal={proposal!r}, "
                "which does not use it; leave one of them out"
            )


# --- draft and Weaver ------------------------------------------------------------------------------------


def draft_depth(hf_config: Any, model: str | None) -> int:
    """Draft tokens of one block (`block_size - 1`, at least 1) of a DFlash draft's configuration."""
    nested = getattr(hf_config, "dflash_config", None) or {}
    block_size = getattr(hf_config, "block_size", None) or nested.get("block_size")
    if not isinstance(block_size, int) or block_size < 2:
        raise ConfigError(
            f"speculative config: model={model!r} is not a DFlash draft: its config.json has "
            f"block_size={_show(block_size)}, which must be an integer of at least 2"
        )
    return block_size - 1


def resolve_weaver(speculative: "WeaverSpeculativeConfig", depth: int) -> str:
    """Local path of the Weaver checkpoint, which is well formed and fits target, draft and settings."""
    # Only here, since it imports torch models: a config without a Weaver file does not need it.
    from vllm_weaver.spec_decode import weaver_checkpoint

    assert speculative.weaver is not None
    try:
        path = weaver_checkpoint.resolve_weaver(
            speculative.weaver, speculative.weaver_revision, speculative.weaver_sha256
        )
        head = weaver_checkpoint.inspect_weaver(path)
    except ValueError as error:
        raise ConfigError(f"speculative config: {error}") from None
    target = speculative.target_model_config
    fits = [
        (
            "d_model",
            head.d_model,
            target.get_hidden_size(),
            f"the hidden size of the target {target.model!r}",
        ),
        (
            "d_embed",
            head.d_embed,
            target.get_hidden_size(),
            f"the embedding width of the target {target.model!r}",
        ),
        (
            "d_model",
            head.d_model,
            speculative.draft_model_config.get_hidden_size(),
            f"the hidden size of the draft {speculative.model!r}",
        ),
    ]
    for name, found, wanted, what in fits:
        if found != wanted:
            raise ConfigError(
                f"speculative config: weaver={speculative.weaver!r} was made for another model: its {name} "
                f"is {found}, but {what} is {wanted}"
            )
    if depth > head.K:
        raise ConfigError(
            f"speculative config: weaver={speculative.weaver!r} was trained for drafts of at most K={head.K} "
            f"tokens, but model={speculative.model!r} drafts {depth} (block_size - 1)"
        )
    pool = speculative.candidate_pool_size
    if pool is not None and pool > head.candidate_pool_size:
        raise ConfigError(
            f"speculative config: candidate_pool_size={pool} is more than the "
            f"{head.candidate_pool_size} that weaver={speculative.weaver!r} was trained with; "
            f"it must be an integer from 1 to {head.candidate_pool_size}"
        )
    return str(path)


# --- errors ----------------------------------------------------------------------------------------------


def _brief(error: ValueError, limit: int = 400) -> str:
    """What an error of upstream says, as one line that ends within `limit` characters."""
    text = error.errors(include_url=False)[0]["msg"] if isinstance(error, ValidationError) else str(error)
    return textwrap.shorten(text.removeprefix("Value error, "), limit, placeholder=" ...")


def one_line(error: ValidationError) -> ConfigError:
    """The first mistake of a pydantic error as one sentence; a ConfigError inside it is returned as it is."""
    for item in error.errors(include_url=False):
        inner = item.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):
            return inner
    first = error.errors(include_url=False)[0]
    where = ".".join(
        str(part) for part in first["loc"] if isinstance(part, str) and not part.startswith("function-")
    )
    message = _brief(error)
    part = "speculative config" if error.title == WeaverSpeculativeConfig.__name__ else error.title
    if where:
        message = f"{where}={_show(first.get('input'))} is not allowed: {message}"
    return ConfigError(f"{part}: {message}")
