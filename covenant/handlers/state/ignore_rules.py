"""The rules of .covenantignore: parse them and match paths."""

from __future__ import annotations

import bisect
import errno
import itertools
import logging
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import anyio
import anyio.to_thread
import re2

from covenant.handlers.state import glob as state_glob
from covenant.handlers.state.glob import Glob, Span
from policy import errors
from sandbox.storage import atomic_file

_LOG = logging.getLogger(__name__)
FILE: Final = ".covenantignore"
MAX_BYTES: Final = 1024 * 1024
SEEDED: Final = (
    "**/.env",
    "**/.env.*",
    "**/secrets.toml",
    "**/secrets.json",
    "**/*.pem",
    "**/*.key",
    "**/id_rsa*",
    "**/id_ed25519*",
    "**/.ssh/**",
    "**/credentials",
    "**/credentials.json",
    "**/.aws/credentials",
)
_HEADER: Final = """\
# Texts that name one of these are neither acted on nor kept. Syntax as .gitignore, held against the text:
# docs/memory.md. A change counts from the next intent on.
"""
# PATH_MAX of Linux: no path is longer.
_PATH: Final = 4096
_SHOWN: Final = 80
# Longer texts would block the loop too long, so they go to a thread; this many are searched at once.
AT_ONCE: Final = 16 * 1024
_MOST_LONG: Final = 2
# A text with this many matches of a rule is ignored, even if a later `!` would remove them.
MOST_PLACES: Final = 250_000
# As `\s` of Python: RE2 matches only ASCII spaces.
_SPACES: Final = r"\t-\r\x1c-\x20\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"
_WORD: Final = re2.compile(rf"""[^{_SPACES}"'`<>(){{}}\[\]|;,=:]+""")
_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_LITERAL: Final = re.compile(r"[^*?\[\]\\!/]+")


@dataclass(frozen=True, slots=True)
class Rule:
    """One line: ``pattern`` is its unchanged text. Texts are UTF-8 bytes, and a place is a span of bytes."""

    pattern: str
    negated: bool
    # None if the rule matches any non-empty text.
    glob: Glob | None
    path: Any
    # A word must contain it to be matched as a path; None if the rule is no path.
    literal: bytes | None

    def spans(self, text: bytes) -> list[Span]:
        """Return the places that the rule finds, sorted by their ends."""
        if self.glob is None:
            return [(0, len(text))] if text else []
        found = set(self.glob.spans(text, MOST_PLACES))
        found.update(itertools.islice(self._paths(text), MOST_PLACES))
        return sorted(found, key=lambda span: (span[1], span[0]))

    def finds(self, text: bytes) -> bool:
        """Whether the rule finds any place: the search stops at the first."""
        if self.glob is None:
            return bool(text)
        return self.glob.finds(text) or any(True for _ in self._paths(text))

    def _paths(self, text: bytes) -> Iterator[Span]:
        if self.path is None or self.literal is None or self.literal not in text:
            return
        for word in _WORD.finditer(text):
            token = word.group()
            if self.literal not in token or not (b"/" in token or b"." in token or b"_" in token):
                continue
            if len(token) > _PATH and len(token.decode()) > _PATH:
                continue
            plain = token.replace(b"\\", b"/").lstrip(b"/")
            if self.path.match(plain) or self.path.match(plain.rstrip(b".!?")):
                yield word.span()


def parse(text: str) -> tuple[Rule, ...]:
    """Return the rules of a file, without blank lines and comments."""
    return tuple(rule for line in text.splitlines() if (rule := _rule(line)) is not None)


def _rule(line: str) -> Rule | None:
    pattern = line.strip()
    if not pattern or pattern.startswith("#"):
        return None
    body = pattern.removeprefix("!")
    negated = pattern.startswith("!")
    if body.startswith(("\\!", "\\#")):
        body = body[1:]
    anchored = body.startswith("/")
    said = body[1:] if anchored else body
    if not said:
        return None
    # A match may begin at any offset, with anything after it, so stars at the ends have no effect.
    trimmed = said.rstrip("*") if anchored else said.strip("*")
    path, literal = (None, None) if anchored or re.search(r"\s", said) else _as_path(said)
    return Rule(pattern, negated, _glob(pattern, trimmed, anchored=anchored), path, literal)


def _glob(pattern: str, trimmed: str, *, anchored: bool) -> Glob | None:
    try:
        return Glob(re.split(r"\*\*+", trimmed), anchored=anchored) if trimmed else None
    except ValueError as e:
        shown = f"{pattern[:_SHOWN]}..."
        raise errors.IgnoreFileError(f"rule `{shown}` has too many stars", hint="split it into shorter rules") from e


def _as_path(body: str) -> tuple[Any, bytes | None]:
    literals = _LITERAL.findall(body)
    if not literals:
        return None, None
    try:
        return state_glob.path_regex(body), max(literals, key=len).encode()
    except ValueError:
        return None, None


def matched(rules: Sequence[Rule], text: str) -> str | None:
    """Return the pattern of the last rule that has a place left in the text; None if the text may pass."""
    # RE2 reads UTF-8, which has no lone surrogates.
    raw = _SURROGATE.sub("\ufffd", text).encode()
    # No rule after the last `!` can lose a place, so any match decides there. This also avoids counting all matches of
    # a long text.
    last = next((number for number in range(len(rules), 0, -1) if rules[number - 1].negated), 0)
    for rule in reversed(rules[last:]):
        if rule.finds(raw):
            return rule.pattern
    places: list[tuple[Span, str]] = []
    for rule in rules[:last]:
        if rule.negated and not places:
            continue
        spans = rule.spans(raw)
        if rule.negated:
            taken = _joined(spans)
            places = [(place, pattern) for place, pattern in places if not _meets(place, taken)]
        elif len(spans) >= MOST_PLACES:
            return rule.pattern
        else:
            places += [(span, rule.pattern) for span in spans]
    return places[-1][1] if places else None


def _joined(spans: Sequence[Span]) -> list[Span]:
    """Return the same characters in spans that do not touch."""
    joined: list[Span] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def _meets(place: Span, spans: Sequence[Span]) -> bool:
    """Whether a place overlaps one of the spans, which do not touch each other."""
    at = bisect.bisect_right(spans, place[0], key=lambda span: span[1])
    return at < len(spans) and spans[at][0] < place[1]


class IgnoreSet:
    """The rules of one file, read again when it changes. If it becomes unreadable, the last rules stay in force."""

    def __init__(self, path: Path, *, rules: Sequence[Rule] = (), seen: object = None) -> None:
        self._path = path
        self._rules = tuple(rules)
        self._seen = seen
        self._long = anyio.CapacityLimiter(_MOST_LONG)
        # A separate limiter: searches of answers must not wait behind searches that clients request.
        self._done = anyio.CapacityLimiter(_MOST_LONG)

    @classmethod
    def open(cls, home: Path) -> IgnoreSet:
        """Read the rules of a home; creates a default file if there is none.

        Raises:
            errors.IgnoreFileError: the file cannot be read, or made.
        """
        path = home / FILE
        if not os.path.lexists(path):
            _seed(home)
        seen = _signature(path)
        return cls(path, rules=_read(path), seen=seen)

    @classmethod
    def of(cls, *patterns: str) -> IgnoreSet:
        """Return a set without a file."""
        return cls(Path("/nonexistent") / FILE, rules=parse("\n".join(patterns)))

    @property
    def rules(self) -> tuple[str, ...]:
        """The patterns in their order."""
        self._refresh()
        return tuple(rule.pattern for rule in self._rules)

    def match(self, text: str) -> str | None:
        """Return the pattern for which the text is ignored; None if it is not."""
        self._refresh()
        return matched(self._rules, text)

    async def find(self, text: str, *, of_answer: bool = False) -> str | None:
        """As ``match``; a long text is searched in a thread, so that the loop stays free.

        ``of_answer``: the text is a run's answer, which must be written in time. Those have their own limiter, because
        any peer may ask about any number of texts.
        """
        if len(text) <= AT_ONCE:
            return self.match(text)
        return await anyio.to_thread.run_sync(self.match, text, limiter=self._done if of_answer else self._long)

    def _refresh(self) -> None:
        seen = _signature(self._path)
        if seen is None or seen == self._seen:
            return
        self._seen = seen
        try:
            self._rules = _read(self._path)
        except errors.IgnoreFileError as e:
            _LOG.warning("%s; the rules that were read before hold", e)


def _signature(path: Path) -> object:
    try:
        info = os.lstat(path)
    except OSError:
        return None
    return (info.st_dev, info.st_ino, info.st_size, info.st_mtime_ns, info.st_ctime_ns)


def _seed(home: Path) -> None:
    directory = atomic_file.open_directory(home, error=errors.IgnoreFileError)
    try:
        atomic_file.create(directory, FILE, (_HEADER + "\n".join(SEEDED) + "\n").encode())
    except OSError as e:
        raise errors.IgnoreFileError(f"`{home / FILE}` cannot be made: {e.strerror}", where=str(home)) from e
    finally:
        os.close(directory)


def _read(path: Path) -> tuple[Rule, ...]:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as stream:
            raw = stream.read(MAX_BYTES + 1)
    except OSError as e:
        reason = "it is a symlink" if e.errno == errno.ELOOP else e.strerror
        raise errors.IgnoreFileError(f"`{path}` cannot be read: {reason}", where=str(path)) from e
    if len(raw) > MAX_BYTES:
        raise errors.IgnoreFileError(f"`{path}` is larger than {MAX_BYTES} bytes", where=str(path))
    try:
        return parse(raw.decode())
    except UnicodeDecodeError:
        raise errors.IgnoreFileError(f"`{path}` is no UTF-8", where=str(path)) from None
