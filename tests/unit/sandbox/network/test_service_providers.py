"""A mistake in providers.toml is named with its key, and the fix ends it."""

from __future__ import annotations

import pytest

from policy import errors
from sandbox.network.service import providers


@pytest.mark.parametrize(
    ("wrong", "message", "hint", "right"),
    [
        (
            '[providers.x]\nkind = "mock"\nendpont = "http://h/v1"\n',
            "`providers.x.endpont`: no key of [providers.NAME]",
            "did you mean `endpoint`? known here: ",
            '[providers.x]\nkind = "mock"\nendpoint = "http://h/v1"\n',
        ),
        (
            '[fetch."a.example"]\nmok = true\n',
            "`fetch.a.example.mok`: no key of",
            "did you mean `mock`?",
            '[fetch."a.example"]\nmock = true\n',
        ),
        (
            '[providers.x]\nkind = "searxgn"\nendpoint = "http://h"\n',
            "`providers.x.kind`: no kind of provider",
            "did you mean `searxng`? kinds are a2a, anthropic",
            '[providers.x]\nkind = "searxng"\nendpoint = "http://h"\n',
        ),
        (
            '[providers.x]\nkind = "openai-compatible"\n',
            "`providers.x`: needs an endpoint",
            'write endpoint = "http://HOST:PORT/v1"',
            '[providers.x]\nkind = "openai-compatible"\nendpoint = "http://HOST:80/v1"\n',
        ),
        ('[provider.x]\nkind = "mock"\n', "only [providers.NAME]", "write [providers.NAME]", "[providers]\n"),
    ],
)
def test_fix_of_each_mistake_works(wrong: str, message: str, hint: str, right: str) -> None:
    with pytest.raises(errors.ConfigError) as refused:
        providers.parse_all(wrong.encode(), file="providers.toml")
    assert refused.value.message.startswith(message)
    assert refused.value.hint.startswith(hint)
    providers.parse_all(right.encode(), file="providers.toml")
