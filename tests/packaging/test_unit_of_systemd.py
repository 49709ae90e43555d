"""Units as systemd itself sees them: its parser, its review of exposure, and its own list of implicit calls."""

from __future__ import annotations

import json
import random
import re
import subprocess
from pathlib import Path

import pytest

from policy import data, errors
from policy.compile.targets import systemd, unit_quoting
from policy.data import target_table
from policy.manifest import parse
from policy.manifest.agent import Manifest
from sandbox import config
from sandbox.host import facts as host_facts
from sandbox.storage import package_reader
from tests.unit.policy.compile import targets_kit as kit

ROOT = Path(__file__).parents[2]
ANALYZE = "/usr/bin/systemd-analyze"
# Of 10, where 0 is nothing; what is left is @resources and @privileged calls of the profiles (setpriority, chown,
# which no capability backs), W+X memory, /tmp that is a tmpfs of its own and no PrivateTmp=, and the clock device of
# ProtectClock=. A network adds the address families and PrivateNetwork=.
MOST_EXPOSURE = {"off": 0.8, "on": 1.6}
WANTING = {
    "SystemCallFilter=~@resources", "SystemCallFilter=~@privileged", "MemoryDenyWriteExecute", "PrivateTmp",
    "DeviceAllow",
}  # fmt: skip
WANTING_OFF = {"RestrictAddressFamilies=~AF_UNIX"}
WANTING_ON = {"PrivateNetwork", "RestrictAddressFamilies=~AF_(INET|INET6)", "IPAddressDeny"}
MANIFESTS = {
    "hello": parse.parse((ROOT / "agents/hello/agent.toml").read_bytes()),
    "librarian": parse.parse((ROOT / "agents/librarian/agent.toml").read_bytes()),
    "wordcount": parse.parse((ROOT / "agents/wordcount/agent.toml").read_bytes()),
    "network": kit.manifest(
        network="full",
        resources="cpu_time_ms = 1500\nio_read_bps = 1\nio_write_bps = 1\nio_read_iops = 1\nio_write_iops = 1",
        more=kit.NETWORK + '[permissions.credentials]\ngrants = ["a.key"]',
    ),
    "odd": kit.manifest(entry="a $HOME %i 'b' ;#é.py"),
}


def analyze(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([ANALYZE, *arguments], cwd=cwd, capture_output=True, text=True, timeout=60, check=False)


def written(found: Manifest, directory: Path) -> Path:
    """The units of a manifest for this host in a directory; the path of the service."""
    settings = config.Config(state=directory)
    files = package_reader.read(ROOT / "agents/hello").files
    facts = host_facts.for_manifest(host_facts.probe(settings), found, config=settings, package=files)
    for name, raw in kit.compiled("systemd", found, host=facts).files.items():
        (directory / name).write_bytes(raw)
    (service,) = directory.glob("*@.service")
    return service


@pytest.mark.parametrize("name", MANIFESTS)
def test_systemd_takes_every_line_of_units(name: str, tmp_path: Path) -> None:
    service = written(MANIFESTS[name], tmp_path)
    for unit in (service, *tmp_path.glob("*.socket")):
        done = analyze("verify", "--man=no", f"./{unit.name}", cwd=tmp_path)
        # Each line that it does not know or does not like is one of these messages.
        assert (done.stdout, done.stderr, done.returncode) == ("", "", 0)


@pytest.mark.parametrize(
    "line", ["NoNewPrivilegs=yes", "ProtectSystem=strictly", "SystemCallFilter=opennat", "RestrictNamespaces=perhaps"]
)
def test_line_that_systemd_does_not_know_is_seen(line: str, tmp_path: Path) -> None:
    service = written(MANIFESTS["hello"], tmp_path)
    service.write_text(service.read_text().replace("UMask=0077", line))
    number = service.read_text().splitlines().index(line) + 1
    assert f"{service.name}:{number}: " in analyze("verify", "--man=no", f"./{service.name}", cwd=tmp_path).stderr


def exposure(service: Path) -> float:
    done = analyze("security", "--offline=true", "--no-pager", f"./{service.name}", cwd=service.parent)
    found = re.search(r"Overall exposure level for \S+: ([0-9.]+)", done.stdout)
    assert found, done.stdout + done.stderr
    return float(found[1])


@pytest.mark.parametrize("name", MANIFESTS)
def test_exposure_is_below_stated_number(name: str, tmp_path: Path) -> None:
    kind = "off" if MANIFESTS[name].resources.network == "off" else "on"
    assert exposure(written(MANIFESTS[name], tmp_path)) <= MOST_EXPOSURE[kind]


def open_rows(service: Path) -> set[str]:
    """Return the faults that systemd's review finds, by its own names."""
    done = analyze("security", "--offline=true", "--no-pager", "--json=short", f"./{service.name}", cwd=service.parent)
    return {row["name"].rstrip("=") for row in json.loads(done.stdout) if row["set"] is False}


@pytest.mark.parametrize("name", MANIFESTS)
def test_review_finds_wanting_what_is_stated_and_nothing_else(name: str, tmp_path: Path) -> None:
    on = MANIFESTS[name].resources.network != "off"
    assert open_rows(written(MANIFESTS[name], tmp_path)) <= WANTING | (
        WANTING_ON if on else {"RestrictAddressFamilies=~AF_UNIX"}
    )


# A setting, and the row of the review that appears without it.
REVIEWED = {
    "CapabilityBoundingSet": "CapabilityBoundingSet=~CAP_SYS_ADMIN",
    "IPAddressDeny": "IPAddressDeny",
    "LockPersonality": "LockPersonality",
    "PrivateDevices": "PrivateDevices",
    "PrivateNetwork": "PrivateNetwork",
    "PrivateUsers": "PrivateUsers",
    "ProcSubset": "ProcSubset",
    "ProtectClock": "ProtectClock",
    "ProtectControlGroups": "ProtectControlGroups",
    "ProtectHome": "ProtectHome",
    "ProtectHostname": "ProtectHostname",
    "ProtectKernelLogs": "ProtectKernelLogs",
    "ProtectKernelModules": "ProtectKernelModules",
    "ProtectKernelTunables": "ProtectKernelTunables",
    "ProtectProc": "ProtectProc",
    "ProtectSystem": "ProtectSystem",
    "RestrictAddressFamilies": "RestrictAddressFamilies=~AF_NETLINK",
    "RestrictNamespaces": "RestrictNamespaces=~user",
    "RestrictRealtime": "RestrictRealtime",
    "RestrictSUIDSGID": "RestrictSUIDSGID",
    "RootDirectory": "RootDirectory=/RootImage",
    "SystemCallArchitectures": "SystemCallArchitectures",
    "SystemCallFilter": "SystemCallFilter=~@mount",
    "UMask": "UMask",
    "User": "User=/DynamicUser",
}


def test_review_sees_each_setting_taken_out(tmp_path: Path) -> None:
    service = written(MANIFESTS["hello"], tmp_path)
    whole, text = open_rows(service), service.read_text()
    for setting, row in REVIEWED.items():
        service.write_text(re.sub(rf"^{setting}=.*\n", "", text, flags=re.MULTILINE))
        assert row in open_rows(service) - whole, setting


def test_calls_that_systemd_adds_to_every_list_are_those_of_table(tmp_path: Path) -> None:
    done = analyze("syscall-filter", "--no-pager", "@default", cwd=tmp_path)
    listed = {line.strip() for line in done.stdout.splitlines()} - {"@default"}
    ours = {name for name in listed if name in data.syscall_names()}
    # Another release may know fewer; what it knows and the table does not would be a loss that is not reported.
    assert ours <= target_table.implicit_calls()
    assert len(ours) > 30


ALPHABET = " \"'\\%$;:#=@!+-|~*[]{}/a0éıxn\u00a0"


def samples(count: int) -> list[str]:
    """Strings of what means something in a unit file; the same ones each time."""
    chance = random.Random(7)
    return ["".join(chance.choices(ALPHABET, k=chance.randint(1, 24))) for _ in range(count)]


def complaints(lines: list[str], tmp_path: Path) -> list[str]:
    unit = tmp_path / "quoting.service"
    unit.write_text("\n".join(["[Service]", "Type=oneshot", 'ExecStart=:"/bin/true"', *lines]) + "\n")
    done = analyze("verify", "--man=no", f"./{unit.name}", cwd=tmp_path)
    return [line.partition("ignoring: ")[2] for line in done.stderr.splitlines() if "ignoring: " in line]


@pytest.mark.parametrize("setting", ["BindReadOnlyPaths", "ExecPaths", "InaccessiblePaths"])
def test_systemd_reads_word_back_as_it_was(setting: str, tmp_path: Path) -> None:
    # A path that is not absolute is shown as it was read, which is how the parser's result can be seen. `r` keeps the
    # prefixes from being taken, which is why unit_quoting.path wants a slash. TemporaryFileSystem= reads backslashes
    # twice: it only ever gets paths of ours.
    words = [f"r{text}" for text in samples(300)]
    assert complaints([f"{setting}={unit_quoting.word(word)}" for word in words], tmp_path) == words


def test_systemd_reads_two_sides_of_bind_apart(tmp_path: Path) -> None:
    words = [f"r{text}" for text in samples(200)]
    lines = [f'BindReadOnlyPaths="/x":{unit_quoting.word(word)}' for word in words]
    assert complaints(lines, tmp_path) == words


def test_systemd_reads_line_of_environment_back(tmp_path: Path) -> None:
    words = [f"1{text}" for text in samples(200)]  # no name of a variable begins with a digit
    assert complaints([f"Environment={unit_quoting.word(word)}" for word in words], tmp_path) == words


def test_systemd_names_program_as_it_was(tmp_path: Path) -> None:
    for number, text in enumerate(samples(12)):
        name = f"/nowhere/x{text}"
        try:
            line = unit_quoting.program(name)
        except errors.NotEnforceableError:
            continue
        unit = tmp_path / f"program{number}.service"
        unit.write_text(f"[Service]\nType=oneshot\nExecStart={line}\n")
        said = analyze("verify", "--man=no", f"./{unit.name}", cwd=tmp_path).stderr
        # Doubled slashes are one, as in every path.
        assert f"Command {re.sub('/+', '/', name).rstrip('/')} is not executable" in said


def test_without_quotes_systemd_reads_something_else(tmp_path: Path) -> None:
    assert complaints(["ExecPaths=ra b%%"], tmp_path) == ["ra", "b%"]


@pytest.mark.parametrize("setting", ["ExecStart", "LoadCredentialEncrypted", "RootDirectory"])
def test_settings_that_know_no_quotes_get_none(setting: str, tmp_path: Path) -> None:
    values = re.findall(rf"^{setting}=(.*)$", written(MANIFESTS["network"], tmp_path).read_text(), re.MULTILINE)
    assert values
    quoted = [value for value in values if '"' in value]
    assert bool(quoted) == (setting == "ExecStart")


def test_packages_lie_where_supervisor_keeps_them() -> None:
    assert f"{config.Config().state}/packages" == systemd.PACKAGES
