"""``[services]``: what the agent may ask at its own service gate. Absent, nothing, and there is no gate.

Source: design.md ("What an agent may ask").
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import AfterValidator

from policy.manifest import fields, text

says, whole = fields.says, fields.whole

PROVIDER: Final = r"[a-z][a-z0-9_-]{0,31}"
PATTERN: Final = r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}\*?|\*"
_U31 = 2**31 - 1
# The owner of the providers' keys in the vault: no agent may have this id.
PROVIDERS_ID: Final = "covenant-providers"

ProviderName = Annotated[
    str, AfterValidator(text.Matching("provider", PROVIDER, "the name of a table of providers.toml: a-z 0-9 _ -"))
]
ModelPattern = Annotated[
    str,
    AfterValidator(text.Matching("model", PATTERN, "a model's name, or the beginning of one with one `*` at its end")),
]


class ModelsEntry(fields.Section):
    """One item of ``services.models.allow``: models of one provider."""

    provider: Annotated[ProviderName, says("name of a provider of the operator's providers.toml")]
    models: Annotated[
        tuple[ModelPattern, ...],
        fields.LIST,
        AfterValidator(fields.unique),
        says('names of models; `"claude-*"` is every model whose name begins so'),
    ]


def _unique_providers(items: tuple[ModelsEntry, ...]) -> tuple[ModelsEntry, ...]:
    fields.unique(tuple(item.provider for item in items))
    return items


class Models(fields.Section):
    """``[services.models]``: models behind ``http://models.covenant``. The provider's key stays outside the sandbox."""

    allow: Annotated[
        tuple[ModelsEntry, ...],
        fields.LIST,
        AfterValidator(_unique_providers),
        says('`{ provider = "NAME", models = ["PATTERN", ...] }`, one for each provider'),
    ] = ()
    requests_per_minute: Annotated[int | None, whole(1, _U31, "requests in any 60 seconds")] = None
    tokens_per_hour: Annotated[
        int | None, whole(1, _U31, "tokens in and out in any hour; the request that crosses it is the last")
    ] = None
    max_output_tokens: Annotated[int | None, whole(1, _U31, "tokens of one answer")] = None


class Services(fields.Section):
    """``[services]``: what the agent reaches at its own gateway."""

    models: Models = Models()
