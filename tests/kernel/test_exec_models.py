"""`covenant exec --model`: a session asks models with the variables that it is given, and without a network."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kernel.conftest import leftovers
from tests.kernel.session_kit import Home

ASK = """
exec 3<>/dev/tcp/models.covenant/80 || exit 9
body='{"model": "test-1", "messages": [{"role": "user", "content": "from a shell"}]}'
printf 'POST /v1/chat/completions HTTP/1.1\\r\\nHost: models.covenant\\r\\nConnection: close\\r\\n' >&3
printf 'Authorization: Bearer %s\\r\\nContent-Length: %d\\r\\n\\r\\n%s' "$OPENAI_API_KEY" ${#body} "$body" >&3
cat <&3
echo
echo "$OPENAI_BASE_URL $ANTHROPIC_BASE_URL"
exec 4<>/dev/tcp/1.1.1.1/80 || echo refused
"""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    made = Home(tmp_path_factory.mktemp("models"), "debian-minimal")
    (made.world.state / "providers.toml").write_text('[providers.local]\nkind = "mock"\n')
    yield made
    assert leftovers(made.world) == []


def test_session_asks_models(home: Home, tmp_path: Path) -> None:
    done = home.exec("--model", "local:test-*", "--", "bash", "-c", ASK)
    out, err = done.stdout.decode(), done.stderr.decode()
    assert done.returncode == 0, (out, err)
    assert "200 OK" in out
    assert "mock: from a shell" in out
    assert "http://models.covenant/v1 http://models.covenant\n" in out
    assert out.endswith("refused\n")
    assert "  model local/test-*\n" in err
    assert "  OPENAI_BASE_URL=http://models.covenant/v1: the key stays outside\n" in err
    saved = home.exec("--quiet", "--model", "local", "--model", "local:x", "--save", str(tmp_path / "made"), "--", "sh")
    assert saved.returncode == 0, saved.stderr
    manifest = (tmp_path / "made" / "agent.toml").read_text()
    assert 'allow = [{ provider = "local", models = ["*", "x"] }]' in manifest


def test_provider_that_is_unknown_is_refused(home: Home) -> None:
    message, hint = home.refused("--model", "nowhere", "--", "sh")
    assert "no provider of this host" in message
    assert "known: local" in hint
