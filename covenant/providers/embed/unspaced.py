"""Pairs of characters in scripts that write words without spaces, for vectors and for the index of words."""

from __future__ import annotations

import re
from typing import Final

# Han with its extensions and compatibility forms, kana, and Hangul, whose particles are written with their noun
# (Unicode 16, Scripts.txt): a character class of regular expressions and of SQLite's GLOB.
CHARACTERS: Final = (
    "[\u3005-\u3007\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7a3\uf900-\ufaff\uff66-\uff9f"
    "\U00020000-\U0003ffff]"
)
_RUN: Final = re.compile(f"{CHARACTERS}+")


def pairs(text: str) -> list[str]:
    """Return the pairs of neighbours in the runs of a text, in their order; a run of one character as it is.

    The bigrams of Lucene's CJKAnalyzer.
    """
    return [
        run[start : start + 2] for run in _RUN.findall(text) for start in range(len(run) - 1 if len(run) > 1 else 1)
    ]
