"""Take secrets out of answers as they pass, in parts of any size: each is replaced by as many bytes.

An answer keeps its length, so its Content-Length stays right, and a stream is not held up but for bytes that may begin
a secret.
"""

from __future__ import annotations

import base64
import html
import json
import re
import secrets
import string
from collections.abc import Callable, Iterable, Mapping
from typing import Final
from urllib.parse import quote, quote_plus

FILLER: Final = b"*"
PREFIX: Final = "covenant-"
# A shorter token has no room for a placeholder that cannot be guessed: it is hidden, and cannot be used.
TOKEN_BYTES: Final = 24
# The most placeholders of a run; the oldest is forgotten.
MOST: Final = 64
# A token that is longer is passed on as it is: none is.
HELD_BYTES: Final = 32 << 10
# The characters that writers of JSON escape beside those that have to be: none (most), those of markup (Go, Rails, PHP
# with JSON_HEX), and all that mean something in HTML or a URL (.NET).
_ESCAPED: Final = ("", "&<>", "&<>'\"", "&<>'\"+`")
_PERCENT = re.compile("%[0-9A-F]{2}")
_LETTERS: Final = string.ascii_letters + string.digits
_KEYS: Final = tuple(f"{name}_token".encode() for name in ("access", "refresh", "id"))
_NAMES: Final = b"|".join(_KEYS)
_JSON = re.compile(rb'("(?:' + _NAMES + rb')"\s*:\s*")((?:[^"\\]|\\.)*)(")', re.DOTALL)
_FORM = re.compile(rb"((?:^|&|\?|#)(?:" + _NAMES + rb")=)([^&\s\"<>]+)($|[&\s\"<>])")
_JSON_REST = re.compile(rb'\s*(?::\s*(?:"(?:[^"\\]|\\.)*\\?)?)?', re.DOTALL)
_FORM_REST = re.compile(rb"[^&\s\"<>]*")


def forms(secret: bytes) -> list[bytes]:
    """A secret as a host may write it into an answer: itself, for a URL, in JSON, in HTML, in Base64."""
    text = secret.decode("latin-1")
    markup = html.escape(text)
    found = {secret, markup.encode("latin-1"), markup.replace("&#x27;", "&#39;").encode("latin-1")}
    for one in (quote(text, safe=""), quote_plus(text)):
        found |= {one.encode(), _PERCENT.sub(lambda digits: digits[0].lower(), one).encode()}
    for odd in _ESCAPED:
        for digits in ("04x", "04X"):
            encoded = "".join(f"\\u{ord(ch):{digits}}" if ch in odd else json.dumps(ch)[1:-1] for ch in text).encode()
            found |= {encoded, encoded.replace(b"/", rb"\/")}
    found |= _inner_base64(secret)
    return sorted(found, key=len, reverse=True)


def _inner_base64(secret: bytes) -> set[bytes]:
    """The characters of Base64 that depend on the secret alone, at each of the three places that it can begin."""
    found = set()
    for before in range(3):
        whole = base64.b64encode(b"\0" * before + secret)
        begins, ends = -(-before * 8 // 6), (before + len(secret)) * 8 // 6
        one = whole[begins:ends]
        if len(one) >= 8:
            found |= {one, one.replace(b"+", b"-").replace(b"/", b"_")}
    return found


class Scrubber:
    """Replaces each of ``needles`` in a stream of bytes."""

    def __init__(self, needles: Iterable[bytes]) -> None:
        listed = [one for one in needles if one]
        self._needles = sorted(set(listed), key=len, reverse=True)
        self._pattern = re.compile(b"|".join(map(re.escape, self._needles))) if listed else None
        self._longest = max(map(len, listed), default=0)
        self._rest = b""

    def feed(self, chunk: bytes) -> bytes:
        """Take a part. Returns the bytes to pass on now."""
        if self._pattern is None:
            return chunk
        data = self._rest + chunk
        # A search for each is much faster than the pattern of all, and finds nothing in nearly every part.
        if any(one in data for one in self._needles):
            data = self._pattern.sub(_filled, data)
        keep = self._begun(data)
        self._rest = data[len(data) - keep :]
        return data[: len(data) - keep]

    def end(self) -> bytes:
        """Return the last bytes."""
        rest, self._rest = self._rest, b""
        return rest

    def _begun(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a needle."""
        tail = data[-(self._longest - 1) :] if self._longest > 1 else b""
        for start in range(len(tail)):
            part = tail[start:]
            if any(one.startswith(part) for one in self._needles):
                return len(part)
        return 0


def _filled(found: re.Match[bytes]) -> bytes:
    return FILLER * len(found[0])


class TokenPlaceholders:
    """Tokens that hosts gave this run, each behind a placeholder that means nothing elsewhere.

    ``group`` keeps the tokens of one secret from the hosts of another.
    """

    def __init__(self) -> None:
        self._by_placeholder: dict[str, tuple[str, str]] = {}

    def hide(self, group: str, token: str, size: int) -> str:
        """A placeholder of ``size`` characters for a token."""
        if size < TOKEN_BYTES:
            return "*" * size
        while len(self._by_placeholder) >= MOST:
            del self._by_placeholder[next(iter(self._by_placeholder))]
        made = PREFIX + "".join(secrets.choice(_LETTERS) for _ in range(size - len(PREFIX)))
        self._by_placeholder[made] = group, token
        return made

    def known(self, group: str) -> Mapping[str, str]:
        """The tokens of a group, by placeholder."""
        return {one: token for one, (owner, token) in self._by_placeholder.items() if owner == group}

    def exchange(self, group: str, text: str, written: Callable[[str], str] = lambda one: one) -> str:
        """The text with each token in place of its placeholder, as ``written`` writes it."""
        if PREFIX in text:
            for placeholder, token in self.known(group).items():
                text = text.replace(placeholder, written(token))
        return text


class TokenReader:
    """Hides the tokens of an answer, JSON or form, as it passes. Each placeholder is as long as its token."""

    def __init__(self, hide: Callable[[str, int], str], *, form: bool) -> None:
        self._hide, self._form, self._rest = hide, form, b""
        self._pattern = _FORM if form else _JSON

    def feed(self, chunk: bytes) -> bytes:
        """Take a part. Returns the bytes to pass on now."""
        data = self._pattern.sub(self._hidden, self._rest + chunk) if not self._form else self._rest + chunk
        keep = self._begun(data)
        if keep > HELD_BYTES:
            keep = 0
        passed, self._rest = data[: len(data) - keep], data[len(data) - keep :]
        return self._pattern.sub(self._hidden, passed) if self._form else passed

    def end(self) -> bytes:
        """Return the last bytes."""
        rest, self._rest = self._rest, b""
        return self._pattern.sub(self._hidden, rest)

    def _begun(self, data: bytes) -> int:
        """How many of the last bytes may be the beginning of a token."""
        if self._form:
            start = max(data.rfind(mark) for mark in (b"&", b"?", b"#")) + 1
            part = data[start:]
            whole = any(
                key.startswith(part) or (part.startswith(key) and _rest_is(_FORM_REST, part[len(key) + 1 :]))
                for key in (one + b"=" for one in _KEYS)
            )
            return len(part) + (start > 0) if whole else 0
        for start in _quotes(data):
            part = data[start + 1 :]
            for key in (one + b'"' for one in _KEYS):
                if key.startswith(part) or (part.startswith(key) and _rest_is(_JSON_REST, part[len(key) :])):
                    return len(part) + 1
        return 0

    def _hidden(self, found: re.Match[bytes]) -> bytes:
        raw = found[2]
        try:
            token = raw.decode() if self._form else json.loads(f'"{raw.decode()}"')
        except ValueError:
            return found[1] + FILLER * len(raw) + found[3]
        if not raw or raw.startswith(PREFIX.encode()):
            return found[0]
        return found[1] + self._hide(token, len(raw)).encode() + found[3]


def _quotes(data: bytes) -> Iterable[int]:
    """The places of the last quotes of a part, the first of them first: a key, its end, and a value begin at four."""
    places: list[int] = []
    at = len(data)
    while len(places) < 4 and (at := data.rfind(b'"', 0, at)) >= 0:
        places.append(at)
    return reversed(places)


def _rest_is(pattern: re.Pattern[bytes], data: bytes) -> bool:
    return pattern.fullmatch(data) is not None
