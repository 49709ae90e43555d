"""A secret of secrets.toml reaches the run that has the grant, over the socket, and reaches no other run."""

from __future__ import annotations

from pathlib import Path

import pytest

from policy import errors
from tests import daemon_kit
from tests.capability_kit import ADA

pytestmark = pytest.mark.anyio


async def test_secret_is_for_who_was_granted_it(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    (covenant_home / "secrets.toml").touch(0o600)
    (covenant_home / "secrets.toml").write_text('[secrets]\nmail = "hunter2"\nother = "swordfish"\n')
    async with (
        daemon_kit.running(covenant_home) as daemon,
        daemon_kit.peer(daemon, ADA, "secret.access.mail") as ada,
    ):
        assert await ada.ask("get_secret", name="mail") == {"kind": "secret", "name": "mail", "value": "hunter2"}
        for asks, name in ((ada.ask, "other"), (ada.ask, "absent"), (daemon.ask, "mail")):
            with pytest.raises(errors.CovenantError) as refused:
                await asks("get_secret", name=name)
            assert refused.value.code == errors.SecretDeniedError.code
    for kept in (covenant_home / "audit").iterdir():
        assert b"hunter2" not in kept.read_bytes()


async def test_changed_secret_counts_after_restart(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    file = covenant_home / "secrets.toml"
    file.touch(0o600)
    file.write_text('[secrets]\nmail = "before"\n')
    for value, later in (("before", "after"), ("after", "after")):
        async with (
            daemon_kit.running(covenant_home) as daemon,
            daemon_kit.peer(daemon, ADA, "secret.access.mail") as ada,
        ):
            file.write_text(f'[secrets]\nmail = "{later}"\n')
            assert (await ada.ask("get_secret", name="mail"))["value"] == value
