"""Check the paths that are never granted: paths in them, paths that contain them, and similar allowed names."""

from __future__ import annotations

import pytest

from policy import data, errors
from policy.rules import never

TABLE = data.never_grantable()
REFUSED = [
    ("/", "`/` is never granted: it is the whole machine", "take it out"),
    ("/proc", "`/proc` is never granted", "take it out"),
    ("/proc/1/root", "lies in `/proc`", "take it out"),
    ("/sys/fs/cgroup", "lies in `/sys`", "take it out"),
    ("/dev/null", "lies in `/dev`", "take it out"),
    ("/run/docker.sock", "`/run/docker.sock` is never granted", "take it out"),
    ("/var/run", "`/var/run` is never granted", "take it out"),
    ("/var", "contains `/var/", "name what is needed in it"),
    ("/var/lib", "contains `/var/lib/", "name what is needed in it"),
    ("/etc", "contains `/etc/", "name what is needed in it"),
    ("/run/containerd/containerd.sock", "lies in `/run", "take it out"),
]
GRANTED = [
    "/srv",
    "/usr/share/doc",
    "/home/me",
    "/procs",
    "/devel",
    "/runner",
    "/var/lib/dockerish",
    "/var/log",
    "/tmp",
]


@pytest.mark.parametrize(("path", "message", "hint"), REFUSED, ids=[r[0] for r in REFUSED])
def test_refused(path: str, message: str, hint: str) -> None:
    with pytest.raises(errors.NeverGrantableError) as caught:
        never.check(path, TABLE, grant="permissions.filesystem.read[0]", where="agent.toml:7")
    assert message in caught.value.message
    assert caught.value.hint.startswith(hint)
    assert (caught.value.rule, caught.value.grant) == (1, "permissions.filesystem.read[0]")
    assert caught.value.where == "agent.toml:7"


@pytest.mark.parametrize("path", GRANTED)
def test_granted(path: str) -> None:
    never.check(path, TABLE)


@pytest.mark.parametrize("path", ["/usr", "/usr/bin", "/etc/cron.d", "/lib64", "/var/lib/dpkg/info", "/bin"])
def test_read_is_one_thing_and_write_another(path: str) -> None:
    never.check(path, TABLE)
    with pytest.raises(errors.NeverGrantableError):
        never.check(path, TABLE, write=True)


@pytest.mark.parametrize(("path", "refused"), [
    ("/srv/state", True), ("/srv/state/audit", True), ("/srv", True), ("/srv/state2", False), ("/srv/stat", False),
    ("/srv/other", False),
])  # fmt: skip
def test_trees_of_this_host_count_as_well(path: str, refused: bool) -> None:
    error = never.refusal(path, TABLE, {"/srv/state": "it decides what may start"})
    assert (error is not None) == refused
    if error is not None:
        assert "it decides what may start" in error.message


def test_hostile_path_is_shown_made_visible() -> None:
    error = never.refusal("/proc/\x1b[31m`", TABLE)
    assert error is not None
    assert "\x1b" not in error.message
    assert error.message.count("`") == 4
