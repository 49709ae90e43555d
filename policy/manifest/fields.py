"""The building blocks of the manifest's sections: closed models, ranges, lists, names.

The models are the one table of sections and keys: the parser, the suggestions for misspelt keys and the
reference page are derived from them.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from pydantic.fields import FieldInfo

from policy.manifest import text

LIST_ITEMS = 256
T = TypeVar("T", bound=Hashable)


class Section(BaseModel):
    """A table of the manifest: frozen, and closed, so that an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)


def keys(model: type[BaseModel]) -> dict[str, FieldInfo]:
    """Return the keys of a table as the file writes them, in the order of the schema."""
    return {info.alias or name: info for name, info in model.model_fields.items()}


def says(what: str) -> Any:
    """The meaning of a key, for ``Annotated``: the reference page prints it."""
    return Field(description=what)


def whole(low: int, high: int, what: str) -> Any:
    """An integer key from ``low`` to ``high``, both accepted."""
    return Field(ge=low, le=high, description=what)


def unique(items: tuple[T, ...]) -> tuple[T, ...]:
    """No item twice: a list of a manifest is a set, and a repeated item is a slip.

    Raises:
        PydanticCustomError: one is listed twice; ``at`` is its index.
    """
    if len(set(items)) != len(items):
        seen: set[T] = set()
        for index, item in enumerate(items):
            if item in seen:
                raise text.wrong(f"{text.quote(item)} is listed twice", "keep one", at=index)
            seen.add(item)
    return items


Text = Annotated[str, AfterValidator(text.plain)]
"""A non-empty string that can be shown as it is."""

# TOML arrays come as lists, which strict mode does not take for tuples; the items stay strict.
LIST = Field(strict=False, max_length=LIST_ITEMS)
LONG_LIST = Field(strict=False, max_length=2 * LIST_ITEMS)
