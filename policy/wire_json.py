"""JSON of the wire, read so that two readers of one document cannot disagree (RFC 8259, section 4).

policy.signing.strict_json is for what is signed and takes no fraction; the wire has fractions (relevance, embeddings).
"""

from __future__ import annotations

import json
import math
from typing import Any, Final, NoReturn

from policy import errors, json_bounds
from policy.signing import strict_json

# Far below what Python's reader and pydantic's refuse by themselves (some 1,000 and 200 levels).
MAX_DEPTH: Final = 64
_TOO_DEEP: Final = f"nested deeper than {MAX_DEPTH} levels"
# The most values in one document, including those of nested lists and objects. Parsing blocks the whole process, even
# in a thread, for a time that depends on the number of values, not of bytes: 4 MiB of `[]` blocked the daemon for a
# second.
MAX_VALUES: Final = 32_768
# A stored row has the values of one request and some of its own.
MAX_STORED: Final = 2 * MAX_VALUES


def read(raw: bytes, most: int = MAX_VALUES) -> Any:
    """The value of one JSON document: two equal keys, NaN, infinite numbers, too much depth and more than ``most``
    values are refused.

    Raises:
        errors.MalformedRequestError: it is not that.
    """
    if json_bounds.exceeds(raw, most):
        raise errors.MalformedRequestError(
            f"more than {most} values in one document", hint="send it in parts, or as one text"
        )
    try:
        value = DECODER.decode(raw.decode("utf-8"))
    except UnicodeDecodeError:
        raise errors.MalformedRequestError("not UTF-8") from None
    except RecursionError:
        raise errors.MalformedRequestError(_TOO_DEEP) from None
    except json.JSONDecodeError as e:
        raise errors.MalformedRequestError(f"not JSON at line {e.lineno} column {e.colno}") from None
    except strict_json.MalformedJsonError as e:
        raise errors.MalformedRequestError(str(e)) from None
    except ValueError:  # an integer of thousands of digits
        raise errors.MalformedRequestError("a number that is too long") from None
    # Nearly every request opens fewer brackets than it may nest.
    if raw.count(b"{") + raw.count(b"[") > MAX_DEPTH and isinstance(value, dict | list):
        check_depth(value)
    return value


def check_depth(value: Any) -> None:
    """Refuse a value of lists and objects that nests deeper than ``MAX_DEPTH``.

    Raises:
        errors.MalformedRequestError: the value nests deeper.
    """
    level = [value]
    for _ in range(MAX_DEPTH):
        inside = (v for each in level for v in (each.values() if isinstance(each, dict) else each))
        level = [v for v in inside if isinstance(v, dict | list)]
        if not level:
            return
    raise errors.MalformedRequestError(_TOO_DEEP)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise strict_json.MalformedJsonError(f"the key `{strict_json.shown(_twice(pairs))}` stands twice in one object")
    return value


def _twice(pairs: list[tuple[str, Any]]) -> str:
    """In one pass: to count each of the keys took a second for what a stranger may send, minutes for a peer's frame."""
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            return key
        seen.add(key)
    raise AssertionError("no key stands twice")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise strict_json.MalformedJsonError(f"the number `{text[:32]}` is too large")
    return value


def _no_constant(text: str) -> NoReturn:
    raise strict_json.MalformedJsonError(f"`{text}` is no number of JSON")


DECODER: Final = json.JSONDecoder(object_pairs_hook=_object, parse_float=_finite, parse_constant=_no_constant)
