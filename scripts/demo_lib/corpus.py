# SPDX-License-Identifier: Apache-2.0
"""The text of the demo models: documentation that every Python installation carries, and a tokenizer for it.

Documents are the language topics of `pydoc_data.topics` and the docstrings of the standard library (tests and
bundled third-party code left out), each as plain text and as a question and answer. The name of its file or
topic puts a document into one of three parts: `train` teaches the target, `prompts` only starts greedy texts
on which draft and Weaver learn (so that they also see the target on text it does not know), `held_out` is for
evaluation alone.
"""

import ast
import hashlib
import random
import sysconfig
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

END, CHAT_START, CHAT_END, MASK = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>"
SPECIAL_TOKENS = [END, CHAT_START, CHAT_END, MASK]  # ids 0..3
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
SKIPPED_FOLDERS = {
    "test",
    "tests",
    "idlelib",
    "lib2to3",
    "ensurepip",
    "pydoc_data",
    "site-packages",
    "dist-packages",
}
PART_OF = {0: "held_out", 1: "prompts"}  # by hash of the source's name modulo PARTS; all others: train
PARTS = 12
CUTS = 3  # prompts made of a held-out document
CANDIDATES = 72  # held-out documents that prompts are made of; a third of them are asked about, too
MIN_DOCSTRING = 150  # characters; shorter docstrings have no style to learn


@dataclass(frozen=True)
class Document:
    """One piece of text; `title` names the thing it documents."""

    title: str
    text: str
    part: str

    def as_text(self) -> str:
        return f"{self.title}\n\n{self.text.strip()}\n"

    def question(self) -> str:
        return f"What is {self.title}?"

    def as_chat(self) -> str:
        return (
            f"{CHAT_START}user\n{self.question()}{CHAT_END}\n"
            f"{CHAT_START}assistant\n{self.text.strip()}{CHAT_END}\n"
        )


def part_of(source: str) -> str:
    """`train`, `prompts` or `held_out` for a topic or file; depends on its name alone."""
    return PART_OF.get(zlib.crc32(source.encode()) % PARTS, "train")


def _docstrings(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        tree = ast.parse(path.read_text(encoding="utf-8"))
    except (
        SyntaxError,
        UnicodeDecodeError,
    ):  # the standard library holds a few samples that are wrong on purpose
        return
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            text = ast.get_docstring(node)
            if text:
                yield name, text
            inner = [n for n in node.body if isinstance(n, ast.ClassDef | ast.FunctionDef)]
            stack.extend((f"{name}.{n.name}", n) for n in reversed(inner))


def read_documents() -> list[Document]:
    """All documents of this Python installation, in a fixed order, without repetitions."""
    from pydoc_data import topics

    found = [
        Document(f"the topic {name}", text, part_of(f"topic {name}"))
        for name, text in sorted(topics.topics.items())
    ]
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        if SKIPPED_FOLDERS.isdisjoint(parts):
            module = ".".join(p for p in parts if p != "__init__")
            part = part_of(module)
            found.extend(
                Document(n, t, part) for n, t in _docstrings(path, module) if len(t) >= MIN_DOCSTRING
            )
    seen: set[str] = set()
    unique = []
    for document in found:
        if document.text not in seen:
            seen.add(document.text)
            unique.append(document)
    return unique


def fingerprint(documents: list[Document]) -> str:
    """SHA-256 of the corpus: it differs between Python versions, and so do the trained weights."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.as_text().encode())
    return digest.hexdigest()


def train_tokenizer(documents: list[Document], vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE with exactly `vocab_size` entries, the special tokens first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((d.as_text() for d in documents if d.part == "train"), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END,
        pad_token=END,
        additional_special_tokens=[CHAT_START, CHAT_END, MASK],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )


def encode_part(
    documents: list[Document], part: str, tokenizer: PreTrainedTokenizerFast, seed: int
) -> torch.Tensor:
    """One shuffled stream [tokens] of a part's documents, each plain and as a chat, `END` after each."""
    texts = [form for d in documents if d.part == part for form in (d.as_text(), d.as_chat())]
    encoded = tokenizer(texts, verbose=False)["input_ids"]
    random.Random(seed).shuffle(encoded)
    end = tokenizer.convert_tokens_to_ids(END)
    return torch.tensor([i for ids in encoded for i in [*ids, end]])


def sample_windows(stream: torch.Tensor, batch: int, length: int, generator: torch.Generator) -> torch.Tensor:
    """`batch` random windows [batch, length] of the token stream [tokens]."""
    starts = torch.randint(0, stream.numel() - length, (batch, 1), generator=generator)
    return stream[starts + torch.arange(length)]


def _cut(text: str, length: int, tokenizer: PreTrainedTokenizerFast) -> str:
    """The longest beginning of `text` that ends with a word and has at most `length` tokens."""
    words = text.split(" ")
    while len(tokenizer(" ".join(words))["input_ids"]) > length:
        words.pop()
    return " ".join(words)


@dataclass(frozen=True)
class Prompt:
    """A held-out prompt: the beginning of a document, or a question (then `text` is what a user says)."""

    title: str
    text: str

    @property
    def package(self) -> str:
        return self.title.split(".")[0]


def held_out_prompts(
    documents: list[Document], tokenizer: PreTrainedTokenizerFast, seed: int
) -> tuple[list[Prompt], list[Prompt]]:
    """Beginnings of longer held-out documents, 20 to 60 tokens each, and questions about some of them."""
    rng = random.Random(seed)
    long = [d for d in documents if d.part == "held_out" and len(d.text) > 2 * MIN_DOCSTRING]
    rng.shuffle(long)
    questions = [Prompt(d.title, d.question()) for d in long[: CANDIDATES // 3]]
    texts = []
    for document in long[:CANDIDATES]:
        cuts = {_cut(document.as_text()[:400], rng.randint(24, 56), tokenizer) for _ in range(CUTS)}
        texts.extend(
            Prompt(document.title, text)
            for text in sorted(cuts)
            if 20 <= len(tokenizer(text)["input_ids"]) <= 60
        )
    return texts, questions
