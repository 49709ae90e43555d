"""The request for a child (``spawn``), as an agent writes it: read strictly, and bounded."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, cast

from msgspec import Struct, structs

from policy.grants.effective import Effective
from policy.grants.paths import PathSet
from policy.rules.parent import Drawn, OnExcess
from policy.signing import strict_json

# A path is as long as the kernel takes one (PATH_MAX): its refusal quotes it.
TEXT_BYTES, MOST_PATHS, PATH_BYTES = 512 * 1024, 256, 4096


class FieldError(ValueError):
    """Raised when a field of a request is malformed."""


class SpawnRequest(Struct, frozen=True):
    agent_id: str
    text: str
    on_excess: OnExcess
    timeout_ms: int | None
    only: Effective | None


def parse_request(fields: Mapping[str, Any]) -> SpawnRequest:
    """Return the child that the fields of a request ask for."""
    _closed("spawn", fields, ("agent", "text", "on_excess", "timeout_ms", "only"))
    agent_id, text = fields.get("agent"), fields.get("text")
    if not isinstance(agent_id, str) or not isinstance(text, str) or len(agent_id) > 128:
        raise FieldError("`spawn` takes `agent` and `text`, both texts")
    if len(text.encode("utf-8", "surrogatepass")) > TEXT_BYTES:
        raise FieldError(f"`text` is over {TEXT_BYTES} bytes")
    on_excess, timeout_ms = fields.get("on_excess", "reject"), fields.get("timeout_ms")
    if on_excess not in ("reject", "narrow"):
        raise FieldError("`on_excess` is `reject` or `narrow`")
    if timeout_ms is not None and not _whole(timeout_ms):
        raise FieldError("`timeout_ms` is a number of milliseconds")
    return SpawnRequest(agent_id, text, cast("OnExcess", on_excess), timeout_ms, _only(fields.get("only")))


def _only(value: Any) -> Effective | None:
    """Return the limits of the request, beside those of the child's manifest and of its parent."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise FieldError("`only` is an object")
    _closed("only", value, ("read", *Drawn.__struct_fields__))
    limits = {name: value[name] for name in Drawn.__struct_fields__ if name in value}
    if not all(_whole(one) for one in limits.values()):
        raise FieldError("a limit of `only` is a number above 0")
    top = Effective.top()
    resources = structs.replace(top.resources, **limits)
    filesystem = top.filesystem
    if "read" in value:
        paths = value["read"]
        if not isinstance(paths, list) or len(paths) > MOST_PATHS or not all(isinstance(one, str) for one in paths):
            raise FieldError(f"`read` of `only` is a list of at most {MOST_PATHS} paths")
        if not all(map(_nameable, paths)):
            raise FieldError(f"a path of `read` is UTF-8 and at most {PATH_BYTES} bytes")
        # A path that may be written may be read as well: a bound that keeps its writes would take nothing.
        below = PathSet.of(paths)
        filesystem = dataclasses.replace(filesystem, read=below, write=below)
    return dataclasses.replace(top, resources=resources, filesystem=filesystem)


def _nameable(path: str) -> bool:
    """Whether the kernel can be asked about the path. JSON can hold half of a surrogate pair, which no path has."""
    try:
        return len(path.encode()) <= PATH_BYTES
    except UnicodeEncodeError:
        return False


def _closed(what: str, fields: Mapping[str, Any], known: Collection[str]) -> None:
    odd = sorted(set(fields) - set(known))
    if odd:
        raise FieldError(f"`{what}` takes no `{strict_json.shown(odd[0])}`")


def _whole(value: object) -> bool:
    return type(value) is int and 0 < value < 2**53
