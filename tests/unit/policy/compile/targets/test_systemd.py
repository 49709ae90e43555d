"""The units of systemd: each restriction once, under its own setting, and nothing where nothing was granted."""

from __future__ import annotations

import configparser
from pathlib import Path

import pytest

from policy import data, errors
from policy.compile.targets import systemd, unit_root
from policy.host import Closure, ClosureFile, GrantedPath
from policy.manifest import parse
from policy.manifest.agent import Manifest
from tests.unit.policy.compile import sample
from tests.unit.policy.compile import targets_kit as kit

ROOT = Path(__file__).parents[5]
# What may not be found in any unit: each of these settings would give something back.
WIDENS = ("ReadWritePaths", "BindPaths", "DeviceAllow", "Delegate", "PermissionsStartOnly", "ExecStartPre")


def files(found: Manifest, **order: object) -> dict[str, str]:
    """The files by their ending."""
    made = kit.compiled("systemd", found, **order).files
    names = {name.rpartition("@")[0] or name.split(".")[0]: None for name in made if name != "loss.json"}
    assert len(names) == 1
    (name,) = names
    return {one.removeprefix(name): raw.decode() for one, raw in made.items()}


def settings(text: str, section: str = "Service") -> dict[str, list[str]]:
    """Every value of each setting, in order."""
    out: dict[str, list[str]] = {}
    now = ""
    for line in text.splitlines():
        if line.startswith("["):
            now = line.strip("[]")
        elif line and now == section:
            key, _, value = line.partition("=")
            out.setdefault(key, []).append(value)
    return out


def service(**changes: str) -> dict[str, list[str]]:
    return settings(files(kit.manifest(**changes))["@.service"])


def test_every_fixed_setting_stands_once_and_nothing_widens() -> None:
    for changes in ({}, {"network": "full"}, {"filesystem": "read-only-package"}):
        found = service(**changes)
        assert {key: found[key] for key, _ in systemd.FIXED} == {key: [value] for key, value in systemd.FIXED}
        assert not set(WIDENS) & set(found)


def test_process_is_interpreter_with_entry_and_no_variable_is_replaced() -> None:
    found = service(entry="a $HOME %i b.py")
    assert found["ExecStart"] == [':"/usr/bin/python3.11" "a $HOME %%i b.py"']
    assert found["WorkingDirectory"] == ["/workspace"]
    assert found["Environment"] == [
        '"HOME=/tmp" "LANG=C.UTF-8" "PATH=/usr/bin:/bin" "TMPDIR=/tmp"',
        "COVENANT_RUN_ID=%i",
    ]
    assert found["RuntimeMaxSec"] == ["30000ms"]


def test_lifetime_that_ends_earlier_is_deadline() -> None:
    assert service(more="[lifetime]\nttl_seconds = 7")["RuntimeMaxSec"] == ["7000ms"]
    assert service(more="[lifetime]\nttl_seconds = 77")["RuntimeMaxSec"] == ["30000ms"]


def test_root_holds_closure_and_package_and_nothing_else() -> None:
    found = service()
    binds = found["BindReadOnlyPaths"]
    assert f'"/var/lib/covenant/packages/{kit.PACKAGE}":"/workspace":norbind' in binds
    assert {bind.split(":")[1] for bind in binds} == {
        '"/usr/bin/python3.11"', '"/usr/lib/libc.so.6"', '"/lib/libc.so.6"', '"/workspace"',
    }  # fmt: skip
    assert found["NoExecPaths"] == ['"+/"']
    assert set(found["ExecPaths"]) == {'"+/usr/bin/python3.11"', '"+/usr/lib/libc.so.6"', '"+/lib/libc.so.6"'}
    (root,) = found["RootDirectory"]
    assert root.startswith("/run/covenant/roots/covenant-sample-")


def test_scratch_is_tmpfs_of_its_size_or_empty() -> None:
    options = "nosuid,nodev,noexec"
    assert service()["TemporaryFileSystem"][0] == f"/tmp:size=100M,mode=1777,{options}"
    empty = f"ro,size=4K,mode=0755,{options}"
    assert service(filesystem="read-only-package")["TemporaryFileSystem"] == [f"/tmp:{empty}", f"/run:{empty}"]


def test_limits_are_those_of_manifest() -> None:
    found = service(
        resources="memory_mb = 300\ndisk_mb = 7\npids_max = 9\ncpu_millis = 255\ncpu_weight = 5\nswap_mb = 3\n"
        "cpu_time_ms = 1500\nio_read_bps = 11\nio_write_bps = 12\nio_read_iops = 13\nio_write_iops = 14"
    )
    wanted = {
        "MemoryMax": str(307 * 1024 * 1024), "MemorySwapMax": str(3 * 1024 * 1024), "TasksMax": "9", "LimitNPROC": "9",
        "LimitFSIZE": str(7 * 1024 * 1024), "CPUQuota": "25.5%", "CPUWeight": "5", "LimitCPU": "2",
    }  # fmt: skip
    assert {key: found[key] for key in wanted} == {key: [value] for key, value in wanted.items()}
    places = ["/", "/usr", "/usr/bin", "/usr/lib", systemd.PACKAGES]
    for key, value in {
        "IOReadBandwidthMax": 11,
        "IOWriteBandwidthMax": 12,
        "IOReadIOPSMax": 13,
        "IOWriteIOPSMax": 14,
    }.items():
        assert found[key] == [f'"{path}" {value}' for path in places]


def test_every_disk_that_something_is_bound_from_is_limited() -> None:
    file = ClosureFile("/opt/python/bin/python3", "file", source="/opt/python/bin/python3")
    host = sample.host(runtimes={"python3": Closure("python3", "/opt/python/bin/python3", (file,))})
    more = '[permissions.filesystem]\nread = ["/srv/data"]'
    found = settings(files(kit.manifest(resources="io_read_bps = 11", more=more), host=host)["@.service"])
    limited = {line.split('"')[1] for line in found["IOReadBandwidthMax"]}
    sources = {line.split('"')[1] for line in found["BindReadOnlyPaths"]}
    assert len(sources) == 3
    assert all(any(source.startswith(path) for path in limited - {"/", "/usr"}) for source in sources)


def test_what_is_not_limited_has_no_setting() -> None:
    assert not {"LimitCPU", "IOReadBandwidthMax", "IOWriteIOPSMax"} & set(service())


def test_filter_has_granted_names_and_clone3_beside_clone() -> None:
    found = kit.manifest()
    (line,) = service()["SystemCallFilter"]
    assert set(line.split()) == set(kit.effective(found).syscalls.names) | {"clone3"}
    assert not {"execve", "execveat", "memfd_create", "ptrace", "~"} & set(line.split())
    (without,) = service(more='[permissions.syscalls]\ndeny = ["clone"]')["SystemCallFilter"]
    assert "clone3" not in without.split()


@pytest.mark.parametrize("arch", ["x86_64", "aarch64"])
def test_agent_without_call_has_filter_all_same(arch: str) -> None:
    # systemd.exec(5): an empty SystemCallFilter= is no filter at all.
    every = sorted(kit.effective(kit.manifest()).syscalls.names)
    only_there = set(every) - set(data.syscalls(arch).numbers)
    for left in ((), only_there):
        denied = ", ".join(f'"{name}"' for name in every if name not in left)
        found = kit.manifest(more=f"[permissions.syscalls]\ndeny = [{denied}]")
        made = settings(files(found, host=sample.host(arch=arch))["@.service"])
        assert made["SystemCallFilter"] == ["@default"]


def test_another_machine_has_its_own_names() -> None:
    (line,) = settings(files(kit.manifest(), host=sample.host(arch="aarch64"))["@.service"])["SystemCallFilter"]
    assert "arch_prctl" not in line.split()


def test_without_network_there_is_none_and_with_one_only_addresses() -> None:
    off = service()
    assert off["PrivateNetwork"] == ["yes"]
    assert off["RestrictAddressFamilies"] == ["AF_UNIX"]
    assert "IPAddressAllow" not in off
    on = service(network="full", more=kit.NETWORK)
    assert "PrivateNetwork" not in on
    assert on["RestrictAddressFamilies"] == ["AF_INET AF_INET6"]
    assert on["IPAddressDeny"] == ["any"]
    assert on["IPAddressAllow"] == ["10.1.2.0/24", "192.0.2.7/32", "2001:db8::/32"]


def test_read_paths_are_bound_read_only_and_write_paths_are_not_there() -> None:
    found = service(filesystem="host", more='[permissions.filesystem]\nread = ["/srv/data"]\nwrite = ["/srv/out"]')
    assert '"/srv/data":"/srv/data":norbind' in found["BindReadOnlyPaths"]
    assert not any("/srv/out" in value for values in found.values() for value in values)


@pytest.mark.parametrize("path", ["/usr", "/usr/lib/libc.so.6", "/tmp/x", "/workspace", "/run/x", "/proc/1", "/gone"])
def test_read_path_that_would_cover_root_or_is_not_there_is_refused(path: str) -> None:
    granted = {p: GrantedPath(p, "dir") for p in (path,) if p != "/gone"}
    with pytest.raises(errors.NotEnforceableError, match="read path") as caught:
        kit.compiled(
            "systemd",
            kit.manifest(more=f'[permissions.filesystem]\nread = ["{path}"]'),
            host=sample.host(granted=granted),
        )
    assert caught.value.where.startswith("agent.toml:")


def test_runtime_or_program_not_on_host_is_refused() -> None:
    with pytest.raises(errors.NotEnforceableError, match="python3"):
        kit.compiled("systemd", kit.manifest(), host=sample.host(runtimes={}))
    with pytest.raises(errors.NotEnforceableError, match="/usr/bin/cat"):
        kit.compiled(
            "systemd",
            kit.manifest(more='[permissions.executables]\nallow = ["/usr/bin/cat"]'),
            host=sample.host(executables={}),
        )


def test_granted_program_is_in_root_and_can_be_started() -> None:
    found = service(more='[permissions.executables]\nallow = ["/usr/bin/cat"]')
    assert '"/usr/bin/cat":"/usr/bin/cat":norbind' in found["BindReadOnlyPaths"]
    assert '"+/usr/bin/cat"' in found["ExecPaths"]
    assert "execve" in found["SystemCallFilter"][0].split()


def test_compiled_agent_is_only_program_of_its_package() -> None:
    host = sample.host(runtimes={"rust-bin": Closure("rust-bin", "/workspace/bin/x", ())})
    text = files(kit.manifest(runtime="rust-bin", entry="bin/x"), host=host)["@.service"]
    found = settings(text)
    assert found["ExecStart"] == [':"/workspace/bin/x"']
    assert found["ExecPaths"] == ['"+/workspace/bin/x"']
    assert found["BindReadOnlyPaths"] == [f'"/var/lib/covenant/packages/{kit.PACKAGE}-x":"/workspace":norbind']
    with pytest.raises(errors.NotEnforceableError, match="systemd"):
        files(kit.manifest(runtime="rust-bin", entry="bin/x'y"), host=host)


def test_credentials_are_files_of_unit() -> None:
    found = service(more='[permissions.credentials]\ngrants = ["b", "a.key"]')
    store = systemd.CREDENTIALS
    assert found["LoadCredentialEncrypted"] == [f"a.key:{store}/a.key", f"b:{store}/b"]
    assert "LoadCredentialEncrypted" not in service()


def test_socket_is_roots_and_takes_one_connection() -> None:
    text = files(kit.manifest())[".socket"]
    found = settings(text, "Socket")
    assert found["SocketMode"] == ["0600"]
    assert found["Accept"] == ["yes"]
    assert found["MaxConnections"] == ["1"]
    (path,) = found["ListenStream"]
    assert len(path) < 108  # sun_path of unix(7)


def test_user_and_root_are_made_as_unit_names_them() -> None:
    made = files(kit.manifest(id="A.b_c" * 25))
    found = settings(made["@.service"])
    (user,) = found["User"]
    assert found["Group"] == [user]
    assert made[".sysusers.conf"].split()[:2] == ["u", user]
    assert len(user) <= 31  # useradd(8)
    (root,) = found["RootDirectory"]
    assert f"d {root} 0555 root root -" in made[".tmpfiles.conf"].splitlines()
    assert files(kit.manifest(id="other"))[".sysusers.conf"] != made[".sysusers.conf"]


def test_what_was_accepted_stands_in_both_units() -> None:
    found = kit.manifest()
    accepted = " ".join(sorted(kit.restrictions("systemd", found)))
    for ending in ("@.service", ".socket"):
        marks = settings(files(found)[ending], "X-Covenant")
        assert marks["AcceptedLosses"] == [accepted]
        assert marks["PackageDigest"] == [kit.PACKAGE]
    other = settings(files(found, package_digest="e" * 63 + "d")["@.service"], "X-Covenant")["PolicyDigest"]
    assert other != settings(files(found)["@.service"], "X-Covenant")["PolicyDigest"]


@pytest.mark.parametrize("name", ["hello", "librarian"])
def test_samples_compile_to_ini_files_without_stray_line(name: str) -> None:
    found = parse.parse((ROOT / f"agents/{name}/agent.toml").read_bytes())
    host = sample.host(granted={p: GrantedPath(p, "dir") for p in ("/usr/share/doc",)})
    for ending, text in files(found, host=host).items():
        if ending in ("@.service", ".socket"):
            configparser.RawConfigParser(strict=False, delimiters=("=",), comment_prefixes=()).read_string(text)


LINKED = Closure(
    "python3",
    "/usr/bin/py",
    (
        ClosureFile("/bin", "symlink", target="usr/bin"),
        ClosureFile("/lib", "symlink", target="/usr/lib"),
        ClosureFile("/usr/bin/py", "file", 0o755),
        ClosureFile("/usr/bin/python", "symlink", target="py"),
        ClosureFile("/usr/lib/libx.so", "symlink", target="libx.so.1"),
        ClosureFile("/usr/lib/libx.so.1", "file", source="/host/libx.so.1"),
        ClosureFile("/usr/lib/locale", "file"),
        ClosureFile("/usr/lib/py", "dir"),
        ClosureFile("/usr/lib/py/os.py", "file"),
        ClosureFile("/usr/lib/py/a/b.py", "file"),
    ),
)


def test_file_is_bound_at_every_place_that_symlink_leads_to() -> None:
    found = {one.destination: one for one in unit_root.binds([LINKED])}
    assert set(found) == {
        "/bin/py", "/bin/python", "/usr/bin/py", "/usr/bin/python",
        "/lib/libx.so", "/lib/libx.so.1", "/usr/lib/libx.so", "/usr/lib/libx.so.1",
        "/lib/locale", "/usr/lib/locale", "/lib/py", "/usr/lib/py",
    }  # fmt: skip
    assert found["/lib/libx.so"].source == "/host/libx.so.1"
    assert {name for name, one in found.items() if not one.runs} == {"/lib/locale", "/usr/lib/locale"}


def test_symlinks_that_lead_in_ring_end() -> None:
    ring = Closure(
        "x",
        "/a/f",
        (
            ClosureFile("/a", "symlink", target="b"),
            ClosureFile("/b", "symlink", target="a"),
            ClosureFile("/b/a", "symlink", target="."),
            ClosureFile("/b/f", "file"),
        ),
    )
    assert 2 <= len(unit_root.binds([ring])) <= 64
