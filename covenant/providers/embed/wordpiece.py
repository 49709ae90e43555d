"""The tokens of BERT's uncased models: its basic tokenizer, then WordPiece (Devlin et al., 2018; google-research/bert,
``tokenization.py``, Apache-2.0).

``data/bert-uncased-vocab.txt`` is that project's vocabulary, byte for byte: 30,522 lines, each a token, whose number is
that of its line from 0. A text that spells `[CLS]` gets the tokens of its characters: nothing of a text is syntax.
"""

from __future__ import annotations

import functools
import hashlib
import unicodedata
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from policy import errors

VOCABULARY: Final = Path(__file__).parents[1] / "data" / "bert-uncased-vocab.txt"
DIGEST: Final = "07eced375cec144d27c900241f3e339478dec958f92fddbc551f295c992038a3"
_LONGEST_WORD: Final = 100
_CHINESE: Final = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


@functools.cache
def vocabulary() -> Mapping[str, int]:
    """Token to number.

    Raises:
        errors.EmbedderError: the file is missing, or not the one that is pinned.
    """
    try:
        raw = VOCABULARY.read_bytes()
    except OSError as e:
        raise errors.EmbedderError(f"vocabulary cannot be read: {e.strerror}", where=str(VOCABULARY)) from e
    if hashlib.sha256(raw).hexdigest() != DIGEST:
        raise errors.EmbedderError("vocabulary is not the one that is pinned", where=str(VOCABULARY))
    return {token: number for number, token in enumerate(raw.decode().split("\n")[:-1])}


def encode(text: str, most: int) -> list[int]:
    """The numbers of a text's tokens between [CLS] and [SEP], at most ``most`` with these two."""
    known = vocabulary()
    found = [known["[CLS]"]]
    for word in _words(text):
        found += _pieces(word, known)
        if len(found) >= most:
            break
    return [*found[: most - 1], known["[SEP]"]]


def _words(text: str) -> Iterator[str]:
    clean = "".join(_cleaned(c) for c in text)
    for word in clean.split():
        plain = "".join(c for c in unicodedata.normalize("NFD", word) if unicodedata.category(c) != "Mn").lower()
        part = ""
        for c in plain:
            if _is_punctuation(c):
                if part:
                    yield part
                yield c
                part = ""
            else:
                part += c
        if part:
            yield part


def _cleaned(c: str) -> str:
    if c in "\t\n\r" or unicodedata.category(c) == "Zs":
        return " "
    if c in "\0\ufffd" or unicodedata.category(c) in ("Cc", "Cf", "Cs", "Co", "Cn"):
        return ""
    return f" {c} " if any(low <= ord(c) <= high for low, high in _CHINESE) else c


def _is_punctuation(c: str) -> bool:
    # All of ASCII that is no letter, digit or space, as BERT has it.
    return (c.isascii() and not c.isalnum()) or unicodedata.category(c).startswith("P")


def _pieces(word: str, known: Mapping[str, int]) -> list[int]:
    """The longest pieces from the left; one unknown token for a word that cannot be cut so."""
    if len(word) > _LONGEST_WORD:
        return [known["[UNK]"]]
    found, start = [], 0
    while start < len(word):
        for end in range(len(word), start, -1):
            piece = ("##" if start else "") + word[start:end]
            if piece in known:
                found.append(known[piece])
                start = end
                break
        else:
            return [known["[UNK]"]]
    return found
