"""Text from outside with control, bidi and escape characters made visible, for every verb and screen."""

from __future__ import annotations

import unicodedata

# Cc controls, Cf format (bidi, zero width), Cs surrogates, Co private use, Zl and Zp separators: each could manipulate
# a terminal or a log reader.
_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}


def visible(text: str, *, newlines: bool = False) -> str:
    """Return the text with each hidden character written out as ``\\x1b`` or ``\\u202e``."""
    if text.isprintable():  # no character of these categories is printable
        return text
    out = []
    for ch in text:
        if (ch == "\n" and newlines) or unicodedata.category(ch) not in _HIDDEN:
            out.append(ch)
        else:
            out.append(ch.encode("unicode_escape", "backslashreplace").decode("ascii"))
    return "".join(out)
