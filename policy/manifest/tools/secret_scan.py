"""References to credentials, and literals that look like one.

A tool's secret is named, never written: ``$env:NAME`` is the credential NAME in a variable of that name,
``$credential:NAME`` is the credential NAME. A reference is the whole value or none (Matrix, Q18), and what looks like a
secret and is no reference is refused: a signed file is read by everybody who runs it.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence

from policy.manifest import text

ENV = re.compile(r"\$env:([A-Za-z][A-Za-z0-9_]{0,127})")
CREDENTIAL = re.compile(r"\$credential:([A-Za-z0-9][A-Za-z0-9_.-]{0,127})")
HINT = "write the whole value as $env:NAME or $credential:NAME and grant NAME in [permissions.credentials]"
_PARTIAL = re.compile(r"\$\{?(?:env|credential)", re.IGNORECASE)
# Names below which any literal is taken for a secret.
_NAMES = re.compile(
    r"token|secret|passw|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|credential|authorization|cookie|session"
    r"|bearer|signature|mnemonic|pgpass|(?:^|[_-])(?:auth|pat|jwt|seed[_-]?phrase)$|(?:^|[_-])pass(?:$|[_-])|[_-]pwd$"
    r"|(?<!public)(?:^|[_-])key$",
    re.IGNORECASE,
)
# Names of options whose argument is one; of a command line only the end tells, as in `--tokenizer=x`.
_OPTION = re.compile(
    r"-{0,2}[A-Za-z0-9_.-]*(?:token|secret|passw(?:or)?d|passphrase|api[_-]?key|access[_-]?key|private[_-]?key|bearer"
    r"|authorization|(?:^|[_-])(?:pass|pwd|auth))",
    re.IGNORECASE,
)
# How the tokens of known issuers begin.
_ISSUED = (
    r"(?:^|[^A-Za-z0-9])(?:gh[pousr]_|github_pat_|glpat-|sk-|sk_|rk_|pk_live_|xox[abeoprs]-|AKIA|ASIA|AIza|ya29\.|eyJ"
    r"|npm_|pypi-|hf_|dop_v1_|SG\.|shpat_|hvs\.|age-secret-key-)[A-Za-z0-9_.-]{8}"
)
# In prose a word may begin like one; without a digit it is a word.
_TOLD = re.compile(rf"{_ISSUED}[A-Za-z0-9_.-]*", re.IGNORECASE)
# Those, and the forms that carry one.
_FORMS = re.compile(
    _ISSUED + r"|-----BEGIN [A-Z ]*PRIVATE KEY|(?:^|\s)(?:bearer|basic|token)\s+[A-Za-z0-9]"
    r"|://[^/@\s]+:[^/@\s]+@"
    r"|[?&;][A-Za-z0-9_.-]*(?:token|secret|passw(?:or)?d|api[_-]?key|access[_-]?key|signature|auth|sig)=[^&;#\s]",
    re.IGNORECASE,
)
_RUN = re.compile(r"[A-Za-z0-9+=]{24,}")
_BITS = 3.5  # a character: English words lie below, base64 and random hex above
# With the signs that base64 has beside letters and digits, which paths and hyphenated words have too: longer, with
# capitals, and less like words.
_WIDE = re.compile(r"[A-Za-z0-9_+/=-]{32,}")
_WIDE_BITS = 4.4


def referenced(value: str) -> str | None:
    """The name of the credential that a value refers to, or None for a literal.

    Raises:
        PydanticCustomError: part of a value, or something misspelt, that would be passed on as it stands.
    """
    for pattern in (ENV, CREDENTIAL):
        if match := pattern.fullmatch(value):
            return match[1]
    if _PARTIAL.search(value):
        raise text.wrong(f"{_shown(value)} holds a reference that is not the whole value", HINT)
    return None


def literal(value: str, *, name: str = "") -> str:
    """A value that may stand in a signed file; ``name`` is that of its variable or header.

    Raises:
        PydanticCustomError: it looks like a secret, or its name says that it is one.
    """
    if name and value and _NAMES.search(name):
        raise text.wrong(f"the value of {text.quote(name)} is written out", HINT)
    if looks_secret(value):
        # The value itself is not repeated: errors end in logs.
        raise text.wrong(f"{_shown(value)} looks like a secret", HINT)
    return value


def prose(value: str) -> str:
    """Text that people and models read, which may speak of secrets.

    Raises:
        PydanticCustomError: it holds the token of a known issuer.
    """
    for match in _TOLD.finditer(value):
        if re.search("[0-9]", match[0]):
            raise text.wrong(f"{_shown(match[0].strip())} looks like a secret", "leave it out: everybody reads it")
    return value


def command_line(words: Sequence[str]) -> None:
    """The words of a command line together: ``--token=x`` and ``--token x``.

    Raises:
        PydanticCustomError: an option whose name says so is given a secret.
    """
    for index, word in enumerate(words):
        name, equals, content = word.partition("=")
        following = words[index + 1] if index + 1 < len(words) else ""
        if not equals and name.startswith("-") and not following.startswith("-"):
            content = following
        if content and _OPTION.fullmatch(name):
            raise text.wrong(
                f"the value of {text.quote(name)} is written out", "give it to the server in env", at=index
            )


def looks_secret(value: str) -> bool:
    """Whether a literal has the form of a known token, or is long and random."""
    return (
        bool(_FORMS.search(value))
        or any(_random(run, _BITS, "[0-9]", "[A-Za-z]") for run in _RUN.findall(value))
        or any(_random(run, _WIDE_BITS, "[0-9]", "[A-Z]", "[a-z]") for run in _WIDE.findall(value))
    )


def _random(run: str, least: float, *kinds: str) -> bool:
    """Whether a run has characters of each kind, and at least so many bits in each."""
    if not all(re.search(kind, run) for kind in kinds):
        return False
    counts = Counter(run)
    return -sum(n / len(run) * math.log2(n / len(run)) for n in counts.values()) >= least


def _shown(value: str) -> str:
    """The first characters of what may be a secret."""
    return f"the value that begins with {text.quote(value[:4])}"
