"""JSON read once, strictly: the one parser for documents that decide what may run.

Python's own reader is tolerant in ways that two readers of one document can disagree on (RFC 8259, section 4):
it keeps the last of two equal keys, and takes NaN and lone surrogates. pydantic's JSON mode keeps the last of
two equal keys as well, so our models are given the objects that this module made, never the bytes.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn, TypeVar

import pydantic

from policy import json_bounds

Model = TypeVar("Model", bound=pydantic.BaseModel)


class MalformedJsonError(ValueError):
    """The bytes are not one acceptable JSON document; the text says why, in one lower-case line."""


def loads(raw: bytes, *, max_bytes: int, max_values: int = json_bounds.DOCUMENT_VALUES) -> Any:
    """The value of one UTF-8 JSON document, without duplicate keys, floats, NaN or a byte order mark.

    ``max_values`` is counted before anything is parsed (``policy.json_bounds``).

    Raises:
        MalformedError: anything else.
    """
    if len(raw) > max_bytes:
        raise MalformedJsonError(f"larger than {max_bytes} bytes")
    if json_bounds.exceeds(raw, max_values):
        raise MalformedJsonError(f"made of more than {max_values} values")
    try:
        return _DECODER.decode(raw.decode("utf-8"))
    except MalformedJsonError:
        raise
    except UnicodeDecodeError:
        raise MalformedJsonError("not UTF-8") from None
    except RecursionError:
        raise MalformedJsonError("nested too deeply") from None
    except json.JSONDecodeError as e:
        raise MalformedJsonError(f"not JSON at line {e.lineno} column {e.colno}") from None
    except ValueError:  # an integer of thousands of digits
        raise MalformedJsonError("a number that is too long") from None


def validate(model: type[Model], value: Any) -> Model:
    """The closed model made from a decoded value.

    Raises:
        MalformedError: with the place and the reason of the first fault, in a stable order.
    """
    try:
        return model.model_validate(value)
    except pydantic.ValidationError as e:
        first = e.errors(include_url=False, include_context=False, include_input=False)[0]
        place = shown(".".join(str(part) for part in first["loc"])) or "document"
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise MalformedJsonError(f"`{place}`: {reason}") from None


def dumps(value: Any) -> bytes:
    """Compact ASCII JSON with sorted keys: the same value gives the same bytes on any machine."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.encode("ascii")


def shown(text: str) -> str:
    """A key from outside for a message: its start, with everything that is not printable ASCII escaped."""
    return text[:64].encode("unicode_escape", "backslashreplace").decode("ascii")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise MalformedJsonError(f"the key `{shown(key)}` stands twice in one object")
            seen.add(key)
    return value


def _no_float(text: str) -> NoReturn:
    raise MalformedJsonError(f"the number `{text[:32]}` is not an integer")


_DECODER = json.JSONDecoder(object_pairs_hook=_object, parse_float=_no_float, parse_constant=_no_float, strict=True)
