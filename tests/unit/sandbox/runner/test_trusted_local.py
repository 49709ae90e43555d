"""Check the users that an agent may become, and the order of the refusals. No agent is started."""

from __future__ import annotations

import grp
import os
import pwd
from pathlib import Path

import pytest

from policy import errors
from policy.manifest import parse
from policy.manifest.agent import Manifest
from sandbox import config
from sandbox.runner import trusted_local

CONFIG = config.Config(host="here", state=Path("/var/lib/covenant"))


def manifest(rest: str = "") -> Manifest:
    head = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "rust-bin"\nentry = "bin/a"\n'
    return parse.parse((head + '[resources]\nnetwork = "off"\n' + rest).encode())


@pytest.fixture(autouse=True)
def accounts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend to be root on a machine with these users and groups, since no agent is started."""
    users = {
        "covenant-agent": (990, 990, [990]),
        "toor": (0, 100, [100]),
        "wheeled": (991, 0, [0]),
        "admin": (992, 992, [992, 27]),
        "dock": (993, 993, [993, 998]),
        "nobody": (65534, 65534, [65534]),
        "ranged": (CONFIG.uid_first + 5, 994, [994]),
        "primary": (995, 27, [27]),
    }
    groups = {0: "root", 27: "sudo", 998: "docker"}

    def getpwnam(name: str) -> pwd.struct_passwd:
        uid, gid, _ = users[name]
        return pwd.struct_passwd((name, "x", uid, gid, "", "/", "/bin/false"))

    def getgrgid(gid: int) -> grp.struct_group:
        return grp.struct_group((groups[gid], "x", gid, []))

    monkeypatch.setattr(pwd, "getpwnam", getpwnam)
    monkeypatch.setattr(grp, "getgrgid", getgrgid)
    monkeypatch.setattr(os, "getgrouplist", lambda name, gid: users[name][2])
    monkeypatch.setattr(os, "geteuid", lambda: 0)


def test_dedicated_user_is_default_and_another_may_be_named() -> None:
    plan = trusted_local.plan(manifest(), config=CONFIG, user=None, signed=True)
    assert plan.identity == trusted_local.Identity("covenant-agent", 990, 990)
    assert plan.program == "/mnt/bin/a"
    assert plan.not_enforced
    assert "uid 990" in plan.describe()


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ("toor", "is root"),
        ("wheeled", "is root"),
        ("admin", "in group `sudo`"),
        ("primary", "in group `sudo`"),
        ("dock", "in group `docker`"),
        ("nobody", "shared with other services"),
        ("ranged", "range of the sandboxed runs"),
    ],
)
def test_user_as_good_as_root_or_shared_is_refused(user: str, message: str) -> None:
    with pytest.raises(errors.BackendError, match=message):
        trusted_local.plan(manifest(), config=CONFIG, user=user, signed=True)


@pytest.mark.parametrize("user", ["missing", "0", "", "a\0b"])
def test_user_that_does_not_exist_is_named_with_mend(user: str) -> None:
    with pytest.raises(errors.HostError, match="there is no user") as caught:
        trusted_local.identify(user, CONFIG)
    assert "useradd --system" in caught.value.hint


def test_without_root_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(errors.PrivilegeError, match="trusted-local needs root"):
        trusted_local.plan(manifest(), config=CONFIG, user=None, signed=True)


def test_what_manifest_demands_is_judged_before_user() -> None:
    with pytest.raises(errors.BackendError, match="cpu_millis"):
        trusted_local.plan(manifest("cpu_millis = 5000\n"), config=CONFIG, user="toor", signed=True)
