"""The one table of audit events: each kind with its fields and their types.

``supervisor_kinds`` has the kinds of the supervisor's log, and the two of Covenant version 1 that both logs have
(capability_check, intent_dispatched); ``event_kinds`` has those of the daemon's. The kinds and fields of version 1 keep
their names and meaning. Every row of a run carries ``run_id`` and ``operator``. An unknown kind, or a field that is
missing, extra or of a wrong type, is a programming error and is refused before anything is written: a log whose rows
cannot be relied on is not evidence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from policy import errors
from policy.audit_log import event_kinds, event_text, supervisor_kinds

MAX_LINE_BYTES = 8 * 1024 * 1024
# Of what an error says. Its words are an agent's or a caller's own where it quotes what they asked for, and how long a
# row is is not for them to say: everybody's rows lie in one log. As much as the archive keeps.
MESSAGE_CHARACTERS = 1000

# What the id and the time of a row take at most, with a UUID for the id.
_OPENING_BYTES = 128

_json = json.JSONEncoder(ensure_ascii=True, allow_nan=False, separators=(",", ":")).encode
_DISPLAY = re.compile(r"[A-Za-z0-9_.-]{1,256}@[A-Za-z0-9_.-]{1,256}\Z")
_BASE58 = re.compile(r"[1-9A-HJ-NP-Za-km-z]{32,64}\Z")


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < event_text.U64


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _objects(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(
        isinstance(item, Mapping)
        and all(_text(k) and (_text(v) or _int(v) or v is None or isinstance(v, bool)) for k, v in item.items())
        for item in value
    )


def _counts(value: Any) -> bool:
    return isinstance(value, Mapping) and all(_text(k) and _int(v) for k, v in value.items())


# A type's name as it stands in the tables below; a `?` after it allows null (the field itself must be there).
_TYPES: dict[str, Callable[[Any], bool]] = {
    "text": _text,
    "int": _int,
    "bool": lambda value: isinstance(value, bool),
    "digest": lambda value: isinstance(value, str) and event_text.HEX64.match(value) is not None,
    "texts": _texts,
    "objects": _objects,
    "counts": _counts,
}


def _or_null(check: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or check(value)


_CHECKS = {**_TYPES, **{f"{name}?": _or_null(check) for name, check in _TYPES.items()}}

KINDS: dict[str, Mapping[str, str]] = {**supervisor_kinds.SUPERVISOR, **event_kinds.V1, **event_kinds.OURS}

# What a row that comes of no run may leave out, where its kind allows null for it.
_OF_RUNS = ("run_id", "operator")
_MAY_LACK = {kind: [name for name in _OF_RUNS if table.get(name) == "text?"] for kind, table in KINDS.items()}
_TEXTS = {kind: event_text.RowText(kind, table) for kind, table in KINDS.items()}
_TEXTS_OF_NO_RUN = {kind: event_text.RowText(kind, table, _MAY_LACK[kind]) for kind, table in KINDS.items()}


# How a line of ours begins; what the kinds of a run have first is the run.
_BEGINS = re.compile(
    rb'\{"id":"([0-9A-Za-z-]+)","timestamp_ms":\d+,"issuer":\{"display":"[^"@]*@([^"]*)","pubkey":"[^"]*"\},'
    rb'"kind":\{"type":"(\w+)"(?:,"run_id":"([^"]*)")?'
)


class Begins(NamedTuple):
    """The beginning of a line. ``host`` is the part of the issuer's display behind its ``@``.

    For a request of an agent, that is the id of its run. ``run_id`` is None where the row is of no run.
    """

    event_id: str
    host: str
    kind: str
    run_id: str | None


def begins(line: bytes) -> Begins | None:
    """The beginning of a line that ``event_line`` made, without reading the rest of it; None of any other."""
    found = _BEGINS.match(line)
    if found is None:
        return None
    event_id, host, kind, run_id = found.groups()
    return Begins(event_id.decode(), host.decode(), kind.decode(), None if run_id is None else run_id.decode())


def kind_object(kind: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The event's ``kind`` object: ``type`` first, then the fields in the order of the table.

    Strings lose lone surrogates (undecodable file names) to visible escapes, so that any JSON reader takes
    the line.

    Raises:
        errors.EventError: an unknown kind, or a field missing, extra or of a wrong type.
    """
    table = KINDS.get(kind)
    if table is None:
        raise errors.EventError(f"audit event kind `{kind}` is not in the table")
    _check(kind, table, fields)
    return {"type": kind, **{name: _clean(fields[name]) for name in table}}


def _check(kind: str, table: Mapping[str, str], fields: Mapping[str, Any]) -> None:
    problems = [f"`{name}` is missing" for name in table if name not in fields]
    problems += [f"`{name}` is not a field" for name in fields if name not in table]
    problems += [
        f"`{name}` is not {table[name]}" for name in table if name in fields and not _CHECKS[table[name]](fields[name])
    ]
    if problems:
        raise errors.EventError(f"audit event `{kind}`: {', '.join(problems)}")


def kind_text(kind: str, fields: Mapping[str, Any], *, of_no_run: bool = False) -> str:
    """``kind_object`` as it stands in a line.

    ``of_no_run``: ``run_id`` and ``operator`` may be left out where the kind allows null for them.
    """
    known = (_TEXTS_OF_NO_RUN if of_no_run else _TEXTS).get(kind)
    text = known.text(fields) if known is not None else None
    if text is not None:
        return text
    if of_no_run and known is not None:
        fields = {**dict.fromkeys(_MAY_LACK[kind]), **fields}
    return _json(kind_object(kind, fields))


def issuer_text(issuer: Mapping[str, str]) -> str:
    """The issuer as it stands in a line.

    Raises:
        errors.EventError: it is not ``{display, pubkey}``.
    """
    display, pubkey = issuer.get("display", ""), issuer.get("pubkey", "")
    if set(issuer) != {"display", "pubkey"} or not _DISPLAY.match(display) or not _BASE58.match(pubkey):
        raise errors.EventError("audit event issuer is not {display: `local@host`, pubkey: base58}")
    return _json({"display": display, "pubkey": pubkey})


def body_text(issuer: str, kind: str) -> str:
    """Return the part of a line behind its id and its time, from an issuer and a kind that are text already.

    Raises:
        errors.EventError: more than 8 MiB.
    """
    if len(issuer) + len(kind) > MAX_LINE_BYTES - _OPENING_BYTES:
        raise errors.EventError(f"an audit event has {len(issuer) + len(kind)} bytes, more than {MAX_LINE_BYTES}")
    return f'{issuer},"kind":{kind}}}'


def lines(event_ids: Sequence[str], now_ms: int, bodies: Sequence[str]) -> list[bytes]:
    """Events of one moment as their exact JSON lines, without the newlines; the ids are UUIDs.

    Raises:
        errors.EventError: a malformed time.
    """
    if not _int(now_ms):
        raise errors.EventError(f"audit event time `{now_ms}` is not a number of milliseconds")
    between = f'","timestamp_ms":{now_ms},"issuer":'
    return [
        f'{{"id":"{event_id}{between}{body}'.encode("ascii") for event_id, body in zip(event_ids, bodies, strict=True)
    ]


def assembled(event_id: str, now_ms: int, issuer: str, kind: str) -> bytes:
    """One event as its exact JSON line, without the newline, of an issuer and a kind that were made text before.

    Raises:
        errors.EventError: a malformed time, or more than 8 MiB.
    """
    return lines([event_text.quoted(event_id)[1:-1]], now_ms, [body_text(issuer, kind)])[0]


def event_line(kind: str, fields: Mapping[str, Any], *, event_id: str, issuer: Mapping[str, str], now_ms: int) -> bytes:
    """One event as its exact JSON line, without the newline: these are the bytes that are hashed.

    ASCII only, so that no control or bidi character of an agent reaches a reader of the file itself.

    Raises:
        errors.EventError: as ``kind_object``, a malformed issuer or time, or more than 8 MiB.
    """
    return assembled(event_id, now_ms, issuer_text(issuer), kind_text(kind, fields))


def rejection(
    error: errors.CovenantError,
    *,
    agent_id: str | None = None,
    operator: str | None = None,
    run_id: str | None = None,
    package_digest: str | None = None,
) -> dict[str, Any]:
    """The fields of ``manifest_rejected`` for a refusal: rule, grant, place, code and message.

    Rule 2 is a signature error and rule 1 any error of the manifest's own text; what is neither has no rule. What is
    said has at most ``MESSAGE_CHARACTERS`` each: the caller is told the rest.
    """
    rule: int | None = None
    if isinstance(error, errors.RuleViolation):
        rule = error.rule
    elif isinstance(error, errors.SignatureError):
        rule = 2
    elif isinstance(error, errors.ManifestError):
        rule = 1
    return {
        "run_id": run_id,
        "agent_id": agent_id,
        "operator": operator,
        "rule": rule,
        "grant": _clipped(getattr(error, "grant", "") or error.details.get("grant")),
        "where": _clipped(error.where),
        "code": error.code,
        "message": error.message[:MESSAGE_CHARACTERS],
        "package_digest": package_digest,
    }


def _clipped(text: str | None) -> str | None:
    return text[:MESSAGE_CHARACTERS] if text else None


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")
    if isinstance(value, Mapping):
        return {_clean(k): _clean(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(item) for item in value]
    return value
