# SPDX-License-Identifier: Apache-2.0
"""A long text with one fact hidden in it, of a length in tokens that the server itself has counted."""

from __future__ import annotations

import random

from .client import Server, ServerError

# Plain sentences without numbers: a number in an answer can only be the needle's.
_SUBJECTS = (
    "The baker",
    "A gardener",
    "The captain",
    "An old teacher",
    "The mechanic",
    "A painter",
    "The judge",
)
_ACTIONS = (
    "walked past",
    "thought about",
    "described",
    "photographed",
    "repaired",
    "wrote about",
    "asked for",
)
_OBJECTS = (
    "the wooden bridge",
    "a green lantern",
    "the quiet harbour",
    "an empty station",
    "the long letter",
)
_TIMES = ("in the morning", "before the rain", "on a cold day", "after the meeting", "late in autumn")
QUESTION = "\n\nWhat is the secret number that the text mentions? Answer with the number alone."
NEEDLE = " The secret number of the lighthouse is {number}."


def sentences(count: int, seed: int) -> list[str]:
    """`count` sentences, the same ones for a seed."""
    rng = random.Random(seed)
    parts = (_SUBJECTS, _ACTIONS, _OBJECTS, _TIMES)
    return [" ".join(rng.choice(part) for part in parts) + "." for _ in range(count)]


def needle(seed: int) -> str:
    """The number to be found: seven digits."""
    return str(random.Random(seed).randrange(1_000_000, 10_000_000))


def build(text: list[str], depth: float, number: str) -> str:
    """The sentences with the needle behind the share `depth` (0 to 1) of them, and the question."""
    at = round(depth * len(text))
    hidden = [*text[:at], NEEDLE.format(number=number).strip(), *text[at:]]
    return " ".join(hidden) + QUESTION


def count_tokens(server: Server, prompt: str, chat: bool = True) -> int:
    """Tokens of a prompt by the server's tokenizer, its chat template included."""
    body = {"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt}
    return int(server.ask("/tokenize", body)["count"])


def of_length(
    server: Server, tokens: int, depth: float, seed: int, chat: bool = True
) -> tuple[str, str, int]:
    """A prompt of at most `tokens` tokens, nearly as many, with its needle and its exact length.

    Raises ServerError if `tokens` is too few for the question itself.
    """
    number = needle(seed)
    empty = count_tokens(server, build([], 0, number), chat)
    if empty > tokens:
        raise ServerError(f"{tokens} tokens are too few: the question alone has {empty}")
    sample = sentences(200, seed)
    each = max(1.0, (count_tokens(server, build(sample, 0, number), chat) - empty) / len(sample))
    count = int((tokens - empty) / each)
    while True:
        prompt = build(sentences(count, seed), depth, number)
        length = count_tokens(server, prompt, chat)
        if length <= tokens:
            return prompt, number, length
        count -= max(1, int((length - tokens) / each))
