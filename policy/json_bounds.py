"""How much a JSON document may hold, counted on its bytes before anything is parsed.

A parser pays by values and not by bytes: 4 MiB can be two million values, of which each takes some hundred bytes. In a
process with a limit of memory (RLIMIT_DATA) an allocation of pydantic's fails then, and Rust ends the process by
SIGABRT, without an answer. So ``policy.signing.strict_json`` and ``policy.wire_json`` count first.
"""

from __future__ import annotations

from typing import Final

# What a document of one of our own forms may hold. The largest is a statement over 10,000 files, of four values each.
DOCUMENT_VALUES: Final = 65_536
# What a request to the supervisor may hold, parsed in 64 MiB: a closed form of some ten fields.
REQUEST_VALUES: Final = 1_024


def exceeds(raw: bytes, most: int) -> bool:
    """Whether a JSON document has more than ``most`` values, those within lists and objects counted.

    An empty list or object counts as if it held one value. Of bytes that are no JSON the answer may be either.
    """
    # A value follows a comma or an opening bracket, or is the only one.
    if _values(raw) <= most:
        return False
    # Some of these may be in texts. Backslashes come in pairs or escape what follows, and are in texts alone.
    plain = raw.replace(b"\\\\", b"").replace(b'\\"', b"")
    # A value is one text at most, with its key two: more quotes are too many, and fewer make few parts below.
    if plain.count(b'"') > 4 * most:
        return True
    return _values(b"".join(plain.split(b'"')[::2])) > most


def _values(raw: bytes) -> int:
    return raw.count(b",") + raw.count(b"[") + raw.count(b"{") + 1
