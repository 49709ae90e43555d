"""``[[permissions.skills.rule]]``: which values an argument of a granted tool may have.

Rules of one tool and one argument are alternatives; every argument that has a rule must fit one of them. A pattern is
RE2's, so that its time is linear in the value, which an agent chooses.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Final

from pydantic import AfterValidator, BeforeValidator, ValidationInfo

from policy.manifest import fields, text
from policy.manifest.tools import tool_uri

PATTERN_CHARACTERS: Final = 512
RULES: Final = fields.LIST_ITEMS
ARGUMENT: Final = r"[A-Za-z0-9_$][A-Za-z0-9_.$-]{0,127}"
# The memory of one compiled pattern: repetitions such as `(x{1000}){1000}` are refused.
_PATTERN_BYTES: Final = 1024 * 1024
FORMS: Final = ("equals", "matches", "one_of")
_U63: Final = 2**63 - 1
Scalar = str | int | bool


@functools.lru_cache(maxsize=512)
def fullmatch(pattern: str) -> Callable[[str], bool]:
    """Return whether a whole text fits a pattern that ``pattern_of`` has accepted. The time is linear in the text."""
    compiled = _compiled(pattern)

    def fits(value: str) -> bool:
        try:
            return compiled.fullmatch(value) is not None
        except UnicodeEncodeError:  # a lone surrogate
            return False

    return fits


def _compiled(pattern: str) -> Any:
    import re2

    options = re2.Options()
    options.max_mem = _PATTERN_BYTES
    options.log_errors = False
    options.never_capture = True
    return re2.compile(pattern, options)


def pattern_of(value: str) -> str:
    """A validator: a pattern that RE2 has.

    Raises:
        PydanticCustomError: it is not that.
    """
    import re2

    if not value or len(value) > PATTERN_CHARACTERS:
        raise text.wrong(
            f"the pattern has {len(value)} characters", f"1 to {PATTERN_CHARACTERS} are accepted; `.*` is any text"
        )
    text.unhidden(value)
    try:
        _compiled(value)
    except (re2.error, UnicodeEncodeError) as e:
        raise text.wrong(
            f"pattern {text.quote(value)} is not accepted: {text.visible(str(e))}",
            "write it in the syntax of RE2: no look-around, no back reference, no huge repetition",
        ) from None
    return value


def scalar(value: Any) -> Scalar:
    """A validator: a string, a whole number of 64 bits, or a boolean.

    Raises:
        PydanticCustomError: it is not that.
    """
    if isinstance(value, bool) or (isinstance(value, int) and abs(value) <= _U63):
        return value
    if not isinstance(value, str):
        raise text.wrong(f"{text.quote(value)} is no string, whole number or boolean", "use `matches` for other text")
    if len(value) > text.STRING_CHARACTERS:
        raise text.wrong(f"the value has {len(value)} characters", f"at most {text.STRING_CHARACTERS} are accepted")
    return text.unhidden(value)


def scalars(value: Any) -> tuple[Scalar, ...]:
    """A validator: at least one value, none twice.

    Raises:
        PydanticCustomError: it is not that.
    """
    if not isinstance(value, list | tuple) or not 0 < len(value) <= fields.LIST_ITEMS:
        raise text.wrong("one_of is no list of values", f"write 1 to {fields.LIST_ITEMS} values, or `equals`")
    seen: list[tuple[type, Scalar]] = []
    for index, one in enumerate(value):
        # To Python, true is 1.
        if (type(one), one) in seen:
            raise text.wrong(f"{text.quote(one)} is listed twice", "keep one", at=index)
        seen.append((type(one), scalar(one)))
    return tuple(one for _, one in seen)


class SkillRule(fields.Section):
    """``[[permissions.skills.rule]]``: values that an argument of a granted tool may have."""

    tool: Annotated[
        str,
        AfterValidator(tool_uri.check),
        fields.says("a tool of `allow`; its rules of one argument are alternatives"),
    ]
    argument: Annotated[
        str,
        AfterValidator(text.Matching("argument", ARGUMENT, "1 to 128 of A-Z a-z 0-9 _ . $ -")),
        fields.says("an argument of it, which every call must then have; of a list, each item must fit"),
    ]
    equals: Annotated[
        Scalar | None, BeforeValidator(scalar), fields.says("its value: a string, a whole number or a boolean")
    ] = None
    matches: Annotated[
        Annotated[str, AfterValidator(pattern_of)] | None,
        fields.says("a pattern (RE2) that the whole of the string fits"),
    ] = None
    one_of: Annotated[tuple[Scalar, ...], BeforeValidator(scalars), fields.says("its values, one of these")] = ()


def one_form(index: int, rule: Any) -> None:
    """Refuse a rule of an argument that has no condition, or several. ``index`` is its place in its list.

    Raises:
        PydanticCustomError: it has not one.
    """
    written = [form for form in FORMS if getattr(rule, form) not in (None, ())]
    if len(written) != 1:
        raise text.wrong(
            f"the rule of argument {text.quote(rule.argument)} has {' and '.join(written) or 'no condition'}",
            "write one of equals, matches and one_of; two rules of one argument are alternatives",
            at=index,
        )


def asked(items: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
    """A validator: each tool is one of ``allow``, and no tool is written twice.

    Raises:
        PydanticCustomError: it is not that.
    """
    granted = info.data.get("allow")
    for index, uri in enumerate(fields.unique(items)):
        if granted is not None and uri not in granted:
            message = f"{text.quote(uri)} is asked about and not granted"
            raise text.wrong(message, "write the same URI in allow, or take it out of ask", at=index)
    return items


AskedTools = Annotated[
    tuple[Annotated[str, AfterValidator(tool_uri.check)], ...],
    fields.LIST,
    AfterValidator(asked),
    fields.says("tools of `allow` of which each call is held for an operator (docs/approvals.md)"),
]


def checked(items: tuple[SkillRule, ...], info: ValidationInfo) -> tuple[SkillRule, ...]:
    """A validator: each rule has one form, and is about a tool that is granted.

    Raises:
        PydanticCustomError: it is not that.
    """
    # An `allow` that is itself wrong is reported alone.
    granted = info.data.get("allow")
    seen: set[str] = set()
    for index, rule in enumerate(items):
        one_form(index, rule)
        if granted is not None and rule.tool not in granted:
            raise text.wrong(
                f"a rule is about {text.quote(rule.tool)}, which is not granted",
                "add it to allow, or drop it",
                at=index,
            )
        if repr(rule) in seen:  # to Python, false is 0
            raise text.wrong("the rule is written twice", "keep one", at=index)
        seen.add(repr(rule))
    return items
