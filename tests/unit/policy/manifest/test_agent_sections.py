"""Sections of a manifest that do not go together, each with its place and a fix that is accepted."""

from __future__ import annotations

import pytest

from policy import errors
from policy.manifest import parse
from policy.manifest.agent import Manifest

HEX = "0123456789abcdef" * 4
AGENT = '[agent]\nid = "a"\nname = "a"\nversion = "1"\nruntime = "{0}"\nentry = "{1}"\n'
GVISOR = '[sandbox]\nbackend = "linux-gvisor"\nfilesystem = "ephemeral"\n'
LOCAL = '[sandbox]\nrequired = false\nbackend = "trusted-local"\n'
DISK = "[resources]\ndisk_mb = 64\n"
WORKSPACE = '[workspace]\nmode = "overlay"\nfrom = ["/home"]\nmax_mb = 32\n'
ALLOW = "[permissions.executables]\nallow = [{0}]\n"


def agent(runtime: str = "python3", entry: str = "main.py") -> str:
    return AGENT.format(runtime, entry)


def parsed(*parts: str) -> Manifest:
    return parse.parse("".join(parts).encode())


@pytest.mark.parametrize(
    ("refused", "says", "mended"),
    [
        (
            (agent(), LOCAL, '[process]\ncwd = "/x"\n'),
            "[process] is written while the backend is `trusted-local`",
            (agent(), GVISOR, '[process]\ncwd = "/x"\n'),
        ),
        (
            (agent(), LOCAL, "[root]\nlayers = []\n"),
            "[root] is written while the backend is `trusted-local`",
            (agent(), GVISOR, "[root]\nlayers = []\n"),
        ),
        (
            (agent("command"), LOCAL),
            "the runtime is `command` while the backend is `trusted-local`",
            (agent("command"), GVISOR),
        ),
        (
            (agent(), GVISOR, "standby = 1\n", '[process]\ncontract = "text"\n'),
            "standby is `1` while the contract is `text`",
            (agent(), GVISOR, "standby = 0\n", '[process]\ncontract = "text"\n'),
        ),
        (
            (agent(), GVISOR, '[process]\nargs = ["a{intent}"]\n'),
            "`{intent}` stands in an argument while the contract is `line`",
            (agent(), GVISOR, '[process]\nargs = ["a{intent}"]\ncontract = "text"\n'),
        ),
        (
            (agent(), GVISOR, '[process]\nenv = { A = "1" }\n[permissions.credentials]\ngrants = ["A"]\n'),
            "variable `A` has the name of a granted secret",
            (agent(), GVISOR, '[process]\nenv = { B = "1" }\n[permissions.credentials]\ngrants = ["A"]\n'),
        ),
        (
            (agent(), GVISOR, f'[root]\nbase = "l@sha256:{HEX}"\nlayers = ["l@sha256:{HEX}"]\n'),
            "two layers have the name `l`",
            (agent(), GVISOR, f'[root]\nbase = "l@sha256:{HEX}"\nlayers = ["m@sha256:{HEX}"]\n'),
        ),
        (
            (agent(), GVISOR, ALLOW.format('"layer:l"')),
            "layer `l` is not in the agent's root",
            (agent(), GVISOR, f'[root]\nlayers = ["l@sha256:{HEX}"]\n', ALLOW.format('"layer:l"')),
        ),
        (
            (agent(), DISK, GVISOR, WORKSPACE, ALLOW.format('"workspace"')),
            "`workspace` is named while workspace.exec is `false`",
            (agent(), DISK, GVISOR, WORKSPACE, "exec = true\n", ALLOW.format('"workspace"')),
        ),
        (
            (agent(), DISK, GVISOR, WORKSPACE, "exec = true\n"),
            "workspace.exec is `true` while permissions.executables.allow has no `workspace`",
            (agent(), DISK, GVISOR, WORKSPACE, "exec = true\n", ALLOW.format('"workspace", "/bin/a"')),
        ),
        (
            (agent(), DISK, GVISOR, WORKSPACE.replace('mode = "overlay"\n', "")),
            "[workspace] has no mode",
            (agent(), DISK, GVISOR, WORKSPACE),
        ),
        (
            (agent(), DISK, GVISOR, WORKSPACE.replace('from = ["/home"]\n', "")),
            "does not say where it may be",
            (agent(), DISK, GVISOR, WORKSPACE),
        ),
        (
            (agent(), DISK, GVISOR.replace("ephemeral", "read-only-package"), WORKSPACE),
            "[workspace] is written while sandbox.filesystem is `read-only-package`",
            (agent(), DISK, GVISOR, WORKSPACE),
        ),
        (
            (agent(), DISK, GVISOR, WORKSPACE.replace("32", "64")),
            "max_mb is `64` of a disk_mb of `64`",
            (agent(), DISK, GVISOR, WORKSPACE.replace("32", "63")),
        ),
        (
            (agent(), DISK, GVISOR, "dev_shm_mb = 8\n", WORKSPACE.replace("32", "56")),
            "max_mb is `56` of a disk_mb of `64`",
            (agent(), DISK, GVISOR, "dev_shm_mb = 8\n", WORKSPACE.replace("32", "55")),
        ),
        (
            (agent(), DISK, GVISOR, "dev_shm_mb = 64\n"),
            "dev_shm_mb is `64` of a disk_mb of `64`",
            (agent(), DISK, GVISOR, "dev_shm_mb = 63\n"),
        ),
    ],
)
def test_sections_that_do_not_go_together(refused: tuple[str, ...], says: str, mended: tuple[str, ...]) -> None:
    with pytest.raises(errors.ManifestError) as caught:
        parsed(*refused)
    assert says in str(caught.value)
    assert caught.value.hint
    parsed(*mended)


@pytest.mark.parametrize(
    ("runtime", "entry", "read"),
    [
        ("command", "/usr/bin/sh", "/usr/bin/sh"),
        ("command", "sh", "sh"),
        ("command", "./tool", "./tool"),
        ("command", "bin/tool", "bin/tool"),
        ("python3", "main.py", "main.py"),
        ("python3", "/main.py", None),
        ("command", "/usr//bin/sh", None),
        ("command", "/usr/../sh", None),
        ("command", "./../sh", None),
        ("command", "../sh", None),
        ("command", "", None),
    ],
)
def test_entry_by_runtime(runtime: str, entry: str, read: str | None) -> None:
    if read is None:
        with pytest.raises(errors.ManifestError):
            parsed(agent(runtime, entry), GVISOR)
    else:
        assert parsed(agent(runtime, entry), GVISOR).agent.entry == read


def test_package_alone_needs_no_disk() -> None:
    sandbox = '[sandbox]\nbackend = "linux-gvisor"\nfilesystem = "{0}"\n'
    none = "[resources]\ndisk_mb = 0\n"
    assert parsed(agent(), none, sandbox.format("read-only-package")).resources.disk_mb == 0
    for mode in ("ephemeral", "host"):
        with pytest.raises(errors.ManifestError, match="disk_mb is `0`"):
            parsed(agent(), none, sandbox.format(mode))
