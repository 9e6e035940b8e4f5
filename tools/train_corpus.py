"""Texts for ``train_tiny``: files into documents, a byte-level BPE tokenizer trained on them, documents into token arrays."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from afore.core.errors import ConfigError

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
CHUNK_CHARACTERS = 3000
"""A plain text file is cut into documents of about this length, at line ends."""
HELD_OUT = 0.03
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}Assistant: {{ m['content'] }}\n"
    "{% else %}User: {{ m['content'] }}\n{% endif %}{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)
_SHAPES: tuple[tuple[tuple[str, ...], str], ...] = (
    (("text",), "{text}"),
    (("prompt", "response"), "User: {prompt}\nAssistant: {response}"),
    (("question", "answer"), "Question: {question}\nAnswer: {answer}"),
)
"""Keys that a line of a .jsonl file may have, and the document that is made of them."""

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Domain:
    """One domain's tokens: documents in random order, each between its begin and end tokens."""

    name: str
    train_n: I64
    held_out_n: I64


def read_domains(arguments: Sequence[str]) -> dict[str, list[str]]:
    """Documents by domain from ``NAME=FILE`` or ``FILE`` (then the file's name is the domain's).

    Raises ``ConfigError`` naming the argument that cannot be read.
    """
    domains: dict[str, list[str]] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        file = Path(path if separator else argument)
        documents = [d for d in _read_documents(file, argument) if d.strip()]
        if not documents:
            raise ConfigError("TEXT", f"{argument} holds no text", "give a text file or a .jsonl file")
        domains.setdefault(name if separator else file.stem, []).extend(documents)
    return domains


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE of at most ``vocab_size`` tokens (a short text has fewer pairs to merge)."""
    tokenizer = Tokenizer(models.BPE(unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, BOS, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, max_positions: int) -> None:
    """Writes tokenizer and chat template as ``transformers`` reads them."""
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        clean_up_tokenization_spaces=False,
        model_max_length=max_positions,
        chat_template=CHAT_TEMPLATE,
    )
    fast.save_pretrained(str(directory))


def tokenize(
    domains: Mapping[str, Sequence[str]], tokenizer: Tokenizer, *, window: int, seed: int
) -> tuple[Domain, ...]:
    """Token arrays of every domain, the last ``HELD_OUT`` of each kept apart.

    Raises ``ConfigError`` for a domain too short to draw windows of ``window`` + 1 tokens from both parts.
    """
    shuffle = random.Random(seed)
    result = []
    for name, documents in domains.items():
        order = list(documents)
        shuffle.shuffle(order)
        tokens: list[int] = []
        for encoding in tokenizer.encode_batch(order):
            tokens += [BOS_ID, *encoding.ids, EOS_ID]
        held_out = max(int(len(tokens) * HELD_OUT), window + 2)
        if len(tokens) < 2 * held_out:
            raise ConfigError(
                "TEXT",
                f"domain {name} has {len(tokens)} tokens",
                f"give at least {2 * (window + 2)}, or a shorter --window",
            )
        array_n = np.array(tokens, dtype=np.int64)
        result.append(Domain(name, array_n[:-held_out], array_n[-held_out:]))
    return tuple(result)


def _read_documents(file: Path, argument: str) -> list[str]:
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError("TEXT", f"{argument} cannot be read ({reason})", "give FILE or NAME=FILE") from error
    if file.suffix == ".jsonl":
        return [_document(line, f"{argument}, line {n}") for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    return _chunks(text)


def _chunks(text: str) -> list[str]:
    chunks: list[str] = []
    current: list[str] = []
    length = 0
    for line in text.splitlines(keepends=True):
        current.append(line)
        length += len(line)
        if length >= CHUNK_CHARACTERS:
            chunks.append("".join(current))
            current, length = [], 0
    return [*chunks, "".join(current)]


def _document(line: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError("TEXT", f"{where} is not JSON", "give one JSON object a line") from error
    for keys, form in _SHAPES:
        if isinstance(record, dict) and all(isinstance(record.get(key), str) for key in keys):
            return form.format(**{key: record[key].strip() for key in keys})
    accepted = " or ".join("/".join(keys) for keys, _ in _SHAPES)
    raise ConfigError("TEXT", f"{where} has no text that is known", f"each line needs {accepted}")
