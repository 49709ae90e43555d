"""The units of `policy compile --target systemd`, started by a real systemd: what the agent can do, and what not.

The machine's own systemd, if it has one, is not asked. Limits of cgroups are not looked at here: the cgroup that the
test makes has no controllers on a machine that has them on version 1 (tests/unit/policy/compile/targets/test_systemd.py
has their values).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from policy import decide
from policy.compile.targets import systemd
from sandbox import config
from sandbox.host import facts as host_facts
from sandbox.storage import package_reader
from tests.kernel.booted_systemd import UID, BootedSystemd
from tests.unit.policy.compile import targets_kit as kit

ROOT = Path(__file__).parents[2]
WORKLOAD = ROOT / "tests/kernel/workloads/unit_probe.py"
GRANTS = '[permissions.filesystem]\nread = ["/usr/share/doc"]'


def boot(source: Path, base: Path) -> BootedSystemd:
    """A systemd with the units of the package at `source`."""
    read = package_reader.read(source)
    found = decide.manifest_of(read)
    settings = config.Config(state=base)
    facts = host_facts.for_manifest(host_facts.probe(settings), found, config=settings, package=read.files)
    units = base / "units"
    units.mkdir()
    for name, raw in kit.compiled("systemd", found, host=facts, package_digest=read.digest).files.items():
        (units / name).write_bytes(raw)
    return BootedSystemd(units, source, base)


def made(base: Path, code: str, **changes: str) -> Path:
    """A package of one file."""
    source = base / "package"
    source.mkdir()
    (source / "agent.toml").write_text(kit.TOML.format(**{**kit.PARTS, **changes}))
    (source / "main.py").write_text(code)
    return source


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the results of the probe in its unit."""
    base = tmp_path_factory.mktemp("unit")
    source = made(base, WORKLOAD.read_text(), resources="disk_mb = 3\npids_max = 9", more=GRANTS)
    with boot(source, base) as booted:
        found: dict[str, Any] = json.loads(booted.ask(b"{}\n"))
    return found


@pytest.mark.parametrize("agent", ["hello", "wordcount", "checksum"])
def test_sample_agent_answers_through_socket(agent: str, tmp_path: Path) -> None:
    with boot(ROOT / "agents" / agent, tmp_path) as booted:
        answers = [json.loads(booted.ask(b'{"text": "one two"}\n')) for _ in range(2)]
    assert answers[0] == answers[1]
    assert answers[0]["text"]


def test_root_holds_what_was_bound_and_nothing_of_host(probed: dict[str, Any]) -> None:
    assert set(probed["root"]) <= {
        "bin", "dev", "etc", "home", "lib", "lib64", "proc", "root", "run", "sys", "tmp", "usr", "var", "workspace",
    }  # fmt: skip
    assert all(name.startswith("python3") for name in probed["usr_bin"])
    assert probed["etc"] in ([], "ENOENT")
    assert probed["shadow"] == "ENOENT"
    assert probed["package"] == ["agent.toml", "main.py"]
    assert probed["granted"] is True


def test_only_scratch_is_writable_and_it_has_its_size(probed: dict[str, Any]) -> None:
    assert probed["writable"] == ["/tmp"]
    assert probed["fill"] == [3, "ENOSPC"]
    assert probed["granted_write"] == "EROFS"


def test_what_is_mounted_below_granted_path_is_not_granted(probed: dict[str, Any]) -> None:
    # As under linux-gvisor, which clones the mount of the path alone. below is there, and of the granted file system.
    assert probed["granted_below"] == []


def test_fifo_below_granted_path_is_stated_loss(probed: dict[str, Any]) -> None:
    # systemd.read-sockets: the mount is read-only, and the kernel still fails only for the missing reader.
    assert probed["granted_fifo"] == "ENXIO"


def test_what_systemd_mounts_beside_is_hidden(probed: dict[str, Any]) -> None:
    assert probed["shm"] == probed["sys"] == "EACCES"
    assert probed["proc"] == ["self", "thread-self"]
    assert probed["processes"] == 1


def test_process_is_nobody_without_rights_and_under_filter(probed: dict[str, Any]) -> None:
    assert probed["ids"] == [UID, UID, [UID]]
    none = "0000000000000000"
    assert probed["status"] == {
        "CapEff": none, "CapBnd": none, "CapPrm": none, "CapAmb": none, "NoNewPrivs": "1", "Seccomp": "2",
    }  # fmt: skip
    assert probed["environment"] == ["COVENANT_RUN_ID", "HOME", "LANG", "PATH", "TMPDIR"]
    assert probed["limits"] == {"NPROC": 9, "FSIZE": 3 * 1024 * 1024, "CORE": 0}


def test_no_program_of_agents_own_can_be_started(probed: dict[str, Any]) -> None:
    assert probed["start_shell"] == "ENOENT"
    started, linked = probed["start_copy"]
    assert started == "EACCES"
    assert linked == 127  # the dynamic linker runs, and cannot map a file of a noexec mount
    # systemd.executables: this is what the loss report says.
    assert probed["start_itself"] == 0


def test_calls_outside_filter_get_eperm_and_threads_run(probed: dict[str, Any]) -> None:
    assert {probed[name] for name in ("clone", "unshare", "memfd_create", "mount", "bpf", "ptrace")} == {"EPERM"}
    assert probed["clone3"] == "ENOSYS"
    assert probed["thread"] == "done"
    assert {probed[name] for name in ("AF_INET", "AF_INET6", "AF_NETLINK", "AF_PACKET")} == {"EPERM"}


def test_number_of_processes_is_exact(probed: dict[str, Any]) -> None:
    assert probed["children"] == [8, "EAGAIN"]


def test_run_ends_at_its_deadline(tmp_path: Path) -> None:
    code = "import sys, time\nsys.stdin.readline()\nprint('on', flush=True)\ntime.sleep(30)\nprint('late')\n"
    with boot(made(tmp_path, code, resources="cpu_ms_per_task = 1500"), tmp_path) as booted:
        began = time.monotonic()
        assert booted.ask(b"{}\n") == b"on\n"
        assert time.monotonic() - began < 20


def test_with_network_there_are_its_families_and_no_unix_sockets(tmp_path: Path) -> None:
    code = (
        "import json, socket, sys\nsys.stdin.readline()\nout = {}\n"
        "for name in ('AF_UNIX', 'AF_INET', 'AF_INET6', 'AF_PACKET'):\n"
        "    try:\n        socket.socket(getattr(socket, name)).close()\n        out[name] = 'done'\n"
        "    except OSError as e:\n        out[name] = e.errno\n"
        "print(json.dumps(out))\n"
    )
    with boot(made(tmp_path, code, network="full", more=kit.NETWORK), tmp_path) as booted:
        found = json.loads(booted.ask(b"{}\n"))
    assert found["AF_INET"] == found["AF_INET6"] == "done"
    assert "done" not in (found["AF_UNIX"], found["AF_PACKET"])


def test_with_network_only_granted_addresses_are_reached(tmp_path: Path) -> None:
    # Nothing listens there: where packets pass, the answer is a refusal; where they do not, there is none.
    code = (
        "import errno, json, socket, sys\nsys.stdin.readline()\nout = {}\n"
        "for host, wait in (('127.0.0.2', 20), ('127.0.0.3', 2)):\n"
        "    with socket.socket() as end:\n        end.settimeout(wait)\n"
        "        try:\n            end.connect((host, 9))\n"
        "        except OSError as e:\n            out[host] = errno.errorcode.get(e.errno, 'silence')\n"
        "print(json.dumps(out))\n"
    )
    entry = '[[permissions.network]]\nhost = "127.0.0.2"\nports = [80]\nprotocol = "tcp"'
    with boot(made(tmp_path, code, network="full", more=entry), tmp_path) as booted:
        found = json.loads(booted.ask(b"{}\n"))
    # systemd.ports: another port than the granted one is reached too.
    assert found["127.0.0.2"] == "ECONNREFUSED"
    assert found["127.0.0.3"] in ("silence", "EPERM")


def test_root_would_be_hosts_with_tmpfs_in_its_place(tmp_path: Path) -> None:
    """The control, and why RootDirectory= is used: systemd drops TemporaryFileSystem=/ beside ProtectSystem=strict."""
    source = made(tmp_path, "import os, sys\nsys.stdin.readline()\nprint(os.path.exists('/etc/passwd'))\n")
    booted = boot(source, tmp_path)
    unit = next((tmp_path / "systemd/units").glob("*@.service"))
    text = unit.read_text()
    assert text.count("RootDirectory=") == 1
    kept = [line for line in text.splitlines() if not line.startswith(("RootDirectory=", "NoExecPaths=", "ExecPaths="))]
    scratch = "TemporaryFileSystem=/tmp"
    unit.write_text("\n".join(kept).replace(scratch, f"TemporaryFileSystem=/:ro\n{scratch}"))
    with booted:
        assert booted.ask(b"{}\n") == b"True\n"


def test_setting_of_root_is_never_left_out() -> None:
    text = kit.compiled("systemd", kit.manifest()).files
    (unit,) = (raw.decode() for name, raw in text.items() if name.endswith(".service"))
    assert f"RootDirectory={systemd.ROOTS}/covenant-sample-" in unit
