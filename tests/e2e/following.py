# SPDX-License-Identifier: Apache-2.0
"""Long runs along plain decoding: where they part, how far, and how far plain decoding is from itself.

In bfloat16 a long run comes to places where two tokens are as good as equally likely. A run that parts there
says something else from then on, so each request that parts starts again from what plain decoding said.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.e2e.harness import TOP, Reference, difference

NOISE = 0.1
"""A divergence may always be as wide as this."""
SLACK = 1.5
"""And so many times as wide as plain decoding's largest distance from itself (`own_noise`): the largest of
two samples of one noise differ."""


def own_noise(llm: Any, references: Sequence[Reference], near: float = 1.0) -> tuple[float, int]:
    """How far plain decoding is from itself when what it said is a prompt: (gap, tokens).

    gap: the largest change of a log-probability gap between its choice and another token at most `near` less
    likely; tokens: positions where another token is the most likely one."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=TOP, detokenize=False)
    gap, flips = 0.0, 0
    for reference in references:
        prompt = [*reference.prompt, *reference.tokens]
        (output,) = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        prefilled = output.prompt_logprobs[len(reference.prompt) :]
        for choice, decoded, again in zip(reference.tokens, reference.logprobs, prefilled, strict=True):
            scores = {token: entry.logprob for token, entry in again.items()}
            flips += max(scores.values()) > scores[choice]
            gap = max(gap, change_of_gaps(choice, decoded, scores, near))
    return gap, flips


def change_of_gaps(
    choice: int, before: Mapping[int, float], after: Mapping[int, float], near: float
) -> float:
    """The largest change, between log-probabilities by token, of how much less likely than `choice` another
    token is that was at most `near` less likely. Tokens that `after` gives no probability do not count."""
    found = 0.0
    for token in before.keys() & after.keys() if choice in after else ():
        gap, then = before[choice] - before[token], after[choice] - after[token]
        if gap <= near and abs(then) < float("inf"):
            found = max(found, abs(gap - then))
    return found


def follow(llm: Any, references: Sequence[Reference]) -> list[tuple[int, int, float]]:
    """Decodes all references at once, each from its start, or anew after a divergence.

    Returns the divergences: reference, position and gap."""
    from vllm import SamplingParams

    engine, ties = llm.llm_engine, []
    running: dict[str, tuple[int, int]] = {}  # by request: reference and the position it started at

    def start(index: int, position: int) -> None:
        reference = references[index]
        rest = len(reference.tokens) - position
        if rest:
            name = f"reference {index} from {position}"
            params = SamplingParams(temperature=0, max_tokens=rest, ignore_eos=True, detokenize=False)
            prompt = [*reference.prompt, *reference.tokens[:position]]
            engine.add_request(name, {"prompt_token_ids": prompt}, params)
            running[name] = index, position

    for index in range(len(references)):
        start(index, 0)
    while running:
        for output in engine.step():
            if output.request_id not in running:
                continue  # aborted: what was on its way
            index, position = running[output.request_id]
            reference = references[index]
            rest = Reference((), reference.tokens[position:], reference.logprobs[position:])
            found = difference(rest, output.outputs[0].token_ids)
            if found is None and not output.finished:
                continue
            del running[output.request_id]
            if found is not None:
                if not output.finished:
                    engine.abort_request([output.request_id])
                ties.append((index, position + found[0], found[1]))
                start(index, position + found[0] + 1)
    return ties


def assert_near_ties(ties: list[tuple[int, int, float]], noise: tuple[float, int], tokens: int) -> None:
    """Divergences are not much wider, and not many more, than plain decoding's own from itself."""
    gaps, (gap, flips) = sorted(round(gap, 4) for _, _, gap in ties), noise
    print(
        f"{len(ties)} divergences in {tokens} tokens, gaps {gaps}; of plain decoding {flips}, up to {gap:.4f}"
    )
    assert not gaps or gaps[-1] <= max(NOISE, SLACK * gap)
    assert len(ties) <= 2 * flips + 4
