"""Turn HTML into text, in a process without rights, network, files and keys: pages are hostile, the parser is in C.

Each message is a frame: a page one way, its text the other.
"""

from __future__ import annotations

from typing import Final, NoReturn

from selectolax.lexbor import LexborHTMLParser

from sandbox.network.gate.main import GateInput

PAGE_BYTES: Final = 2 << 20
TEXT_BYTES: Final = 1 << 20
# Elements whose content no reader of a page sees as its text.
_UNREAD: Final = ["script", "style", "noscript", "template", "svg", "iframe", "object", "nav", "form", "button"]
# Elements that are part of a line.
_INLINE: Final = [
    "a", "abbr", "b", "bdi", "bdo", "cite", "code", "data", "dfn", "em", "font", "i", "kbd", "label", "mark", "q", "s",
    "samp", "small", "span", "strong", "sub", "sup", "time", "tt", "u", "var", "wbr",
]  # fmt: skip


def serve(gate: GateInput) -> NoReturn:
    """The reader's life."""
    text(b"<title>a</title><p>b</p>")
    gate.answer(text, max_bytes=PAGE_BYTES)


def text(page: bytes) -> bytes:
    """Return the text of a page: its title as a heading, and a line for each block."""
    parsed = LexborHTMLParser(page)
    title = "" if (found := parsed.css_first("title")) is None else " ".join(found.text().split())
    parsed.strip_tags(_UNREAD)
    parsed.unwrap_tags(_INLINE)
    parsed.merge_text_nodes()
    body = parsed.body
    lines = [] if body is None else [" ".join(line.split()) for line in body.text(separator="\n").splitlines()]
    whole = "\n".join([*([f"# {title}", ""] if title else []), *(line for line in lines if line)])
    return whole.encode("utf-8", "replace")[:TEXT_BYTES].decode("utf-8", "ignore").encode()
