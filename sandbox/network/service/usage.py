"""Count the tokens of an answer from the provider's own numbers, whole or in a stream, and pass the stream on."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from sandbox.network.service.shapes import Shape

# A line of a stream that is longer is passed on and not read.
LINE_BYTES: Final = 4 << 20
_MOST_TOKENS: Final = 1 << 40
# Where a provider gives no numbers: so many bytes of text are a token.
BYTES_PER_TOKEN: Final = 4
_FIELDS: Final = {
    "openai": (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens")),
    "anthropic": (
        ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens"),
        ("output_tokens",),
    ),
    "gemini": (
        ("promptTokenCount", "toolUsePromptTokenCount"),
        ("candidatesTokenCount", "thoughtsTokenCount"),
    ),
    "ollama": (("prompt_eval_count",), ("eval_count",)),
}

# A line of a stream that may have numbers. Many providers write `"usage": null` into each event.
_BEARS: Final = {
    "openai": re.compile(rb'"usage"\s*:\s*\{'),
    "anthropic": re.compile(rb'"usage"\s*:\s*\{'),
    "gemini": re.compile(rb'"usageMetadata"\s*:\s*\{'),
    "ollama": re.compile(rb'"(?:prompt_)?eval_count"'),
}


class TokenCount:
    """The tokens of one answer; ``known`` once the provider has given a number."""

    def __init__(self, shape: Shape) -> None:
        self.shape: Final = shape
        self.input, self.output, self.known = 0, 0, False

    def take(self, document: Any) -> None:
        """Take the numbers of one document of the answer. The last numbers of a stream hold: they only grow."""
        for found in self._places(document):
            if not isinstance(found, dict):
                continue
            inward, outward = (_sum(found, names) for names in _FIELDS[self.shape])
            self.known = self.known or inward is not None or outward is not None
            self.input, self.output = max(self.input, inward or 0), max(self.output, outward or 0)

    def _places(self, document: Any) -> tuple[Any, ...]:
        if not isinstance(document, dict):
            return tuple(place for one in document for place in self._places(one)) if isinstance(document, list) else ()
        if self.shape == "gemini":
            return (document.get("usageMetadata"),)
        if self.shape == "ollama":
            return (document,)
        inner = [document.get(name) for name in ("message", "response")]
        return (document.get("usage"), *(one.get("usage") for one in inner if isinstance(one, dict)))


def _sum(found: dict[str, Any], names: tuple[str, ...]) -> int | None:
    values = [found[name] for name in names if type(found.get(name)) is int and 0 <= found[name] < _MOST_TOKENS]
    return sum(values) if values else None


class StreamReader:
    """Reads a stream of events, or of lines of JSON, as it is passed on.

    With ``strip`` the event that has only the counts is left out: the agent did not ask for it.
    """

    def __init__(self, count: TokenCount, *, strip: bool) -> None:
        self._count, self._strip, self._rest = count, strip, b""
        self._bears = _BEARS[count.shape]
        self._skips = False

    def feed(self, chunk: bytes) -> bytes:
        """Read a chunk. Returns the bytes to pass on now."""
        data = self._rest + chunk
        *lines, self._rest = data.split(b"\n")
        kept = bytearray()
        for line in lines:
            if self._skips and not line.strip():
                self._skips = False  # the blank line that ends the event
                continue
            if self._is_only_counts(line):
                self._skips = True
                continue
            kept += line + b"\n"
        if not self._strip:
            if len(self._rest) > LINE_BYTES:
                self._rest = b""
            return chunk
        if len(self._rest) > LINE_BYTES:
            kept += self._rest
            self._rest = b""
        return bytes(kept)

    def end(self) -> bytes:
        """Return the last bytes to pass on."""
        self._is_only_counts(self._rest)
        return self._rest if self._strip else b""

    def _is_only_counts(self, line: bytes) -> bool:
        """Take the counts of a line. Returns whether it has nothing else and is to be left out."""
        if not self._bears.search(line):
            return False  # most events are words alone: to parse each took most of the gate's time
        text = line.strip()
        text = text.removeprefix(b"data:").strip() if text.startswith(b"data:") else text
        if not text.startswith((b"{", b"[")):
            return False
        try:
            document = json.loads(text.decode())
        except (ValueError, RecursionError):
            return False
        self._count.take(document)
        return bool(
            self._strip and isinstance(document, dict) and document.get("choices") == [] and document.get("usage")
        )
