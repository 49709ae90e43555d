"""Set-up and undo, piece by piece: the source line, the record, missing parts, and removal."""

from __future__ import annotations

import json
import os
import pathlib
import pwd
from collections.abc import Sequence

import pytest

from sandbox import config
from scripts.machine import apt, console, environment, gvisor, runsc, sources, steps, takeback, where
from scripts.machine.record import Record

DEB822 = """\
Types: deb
# http://archive.example/debian/20250520T000000Z
URIs: http://mirror.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""

KEYRING = "/usr/share/keyrings/debian-archive-keyring.gpg"

BACKPORTS = """\
Types: deb
URIs: http://mirror.example/debian
Suites: bookworm-backports
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


# --- the source line


def _derive(files: dict[str, str]) -> str | None:
    return sources.derive(files, "bookworm", "bookworm-backports", "main")


def test_backports_come_from_machines_own_deb822_entry() -> None:
    assert _derive({"/etc/apt/sources.list.d/debian.sources": DEB822}) == BACKPORTS


@pytest.mark.parametrize(
    "line",
    [
        f"deb [signed-by={KEYRING}] http://mirror.example/debian bookworm main",
        f"deb [arch=amd64 signed-by={KEYRING}] http://mirror.example/debian bookworm main contrib # comment",
    ],
)
def test_backports_come_from_one_line_entry(line: str) -> None:
    text = f"# a comment\n# deb http://other.example/debian bookworm main\n\n{line}\n"
    assert _derive({"/etc/apt/sources.list": text}) == BACKPORTS


def test_one_line_entry_without_options_names_no_key() -> None:
    found = _derive({"/etc/apt/sources.list": "deb http://m.example/debian bookworm main"})
    assert found == "Types: deb\nURIs: http://m.example/debian\nSuites: bookworm-backports\nComponents: main\n"


def test_embedded_key_is_kept() -> None:
    key = "Signed-By:\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n abc\n -----END PGP PUBLIC KEY BLOCK-----"
    text = f"Types: deb\nURIs: http://m.example/d\nSuites: bookworm\nComponents: main\n{key}\n"
    found = _derive({"x.sources": text})
    assert found is not None
    assert found.replace("Signed-By: \n", "Signed-By:\n").endswith(key + "\n")


@pytest.mark.parametrize(
    "text",
    [
        "Types: deb\nEnabled: no\nURIs: http://m.example/d\nSuites: bookworm\n",
        "Types: deb-src\nURIs: http://m.example/d\nSuites: bookworm\n",
        "Types: deb\nURIs: http://m.example/d\nSuites: bookworm-security\n",
        "",
    ],
)
def test_no_backports_without_live_entry_of_release(text: str) -> None:
    assert _derive({"x.sources": text}) is None


def test_source_there_already_is_seen() -> None:
    assert sources.names({"a.sources": BACKPORTS}, "bookworm-backports")
    assert not sources.names({"a.sources": DEB822}, "bookworm-backports")


# --- what is missing


def _machine(clone: pathlib.Path, *, root: bool = True, codename: str | None = "bookworm") -> where.Machine:
    return where.Machine(clone, Record(clone), "Testix 1", codename, root)


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nftables, and nothing that may touch the real one."""
    need = steps.Need("nftables", lambda: False, "firewall rules")
    monkeypatch.setattr(steps, "NEEDS", (need,))
    monkeypatch.setattr(console, "run", _refuse)


def _refuse(command: Sequence[str], **options: object) -> str:
    raise AssertionError(f"a test changed the machine: {command}")


@pytest.mark.usefixtures("absent")
def test_without_root_missing_package_and_its_command_are_named(tmp_path: pathlib.Path) -> None:
    with pytest.raises(console.SetupError) as caught:
        steps._packages(_machine(tmp_path, root=False))
    assert "nftables" in str(caught.value)
    assert "sudo apt-get install --no-install-recommends nftables" in caught.value.mend


@pytest.mark.usefixtures("absent")
def test_on_unknown_system_nothing_is_installed(tmp_path: pathlib.Path) -> None:
    with pytest.raises(console.SetupError, match="Testix 1"):
        steps._packages(_machine(tmp_path, codename=None))


@pytest.mark.parametrize(
    ("found", "root", "codename", "says"),
    [
        (runsc.Probe(None, "there is no runsc"), False, "bookworm", "needs root"),
        (runsc.Probe("/usr/bin/runsc", "status 2: panic"), True, "bookworm", "status 2: panic"),
        (runsc.Probe(None, "there is no runsc"), True, None, "Testix 1"),
        (runsc.Probe(None, "there is no runsc"), True, "trixie", "offers 0.0~20221219.0-2"),
    ],
)
def test_without_runsc_that_works_mend_is_exact(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    found: runsc.Probe,
    *,
    root: bool,
    codename: str | None,
    says: str,
) -> None:
    monkeypatch.setattr(runsc, "probe", lambda: found)
    monkeypatch.setattr(apt, "candidate", lambda name: "0.0~20221219.0-2")
    monkeypatch.setattr(apt, "update", lambda: None)
    monkeypatch.setattr(console, "run", _refuse)
    with pytest.raises(console.SetupError) as caught:
        gvisor.provide(_machine(tmp_path, root=root, codename=codename))
    assert says in str(caught.value)
    assert caught.value.mend
    if root:
        assert any("/usr/local/bin/runsc" in line for line in caught.value.mend)
    assert not (tmp_path / ".setup").exists()


def test_bookworm_gets_runsc_from_its_backports_and_says_so_first(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "covenant-runsc.sources"
    installed: list[object] = []

    def install(record: Record, packages: Sequence[str], *, release: str = "") -> None:
        installed.append((list(packages), release, target.read_text()))

    answers = iter([runsc.Probe(None, "there is no runsc"), runsc.Probe("/usr/bin/runsc", None)])
    monkeypatch.setattr(runsc, "probe", lambda: next(answers))
    monkeypatch.setattr(gvisor, "SOURCE_FILE", str(target))
    monkeypatch.setattr(apt, "source_files", lambda: {"debian.sources": DEB822})
    monkeypatch.setattr(apt, "candidate", lambda name: "0.0~20221219.0-2+b3")
    monkeypatch.setattr(apt, "update", lambda: None)
    monkeypatch.setattr(apt, "install", install)
    machine = _machine(tmp_path)
    gvisor.provide(machine)
    assert installed == [(["runsc"], "bookworm-backports", BACKPORTS)]
    assert machine.record.added.files == [str(target)]
    assert f"change: write {target}" in capsys.readouterr().out


UBUNTU = """\
Types: deb
URIs: http://mirror.example/ubuntu/
Suites: noble noble-updates noble-backports
Components: main universe restricted multiverse
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""

QUESTING = """\
Types: deb
URIs: http://mirror.example/ubuntu/
Suites: questing
Components: universe
Signed-By: /usr/share/keyrings/ubuntu-archive-keyring.gpg
"""


def test_noble_gets_runsc_alone_from_later_release(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, pin = tmp_path / "covenant-runsc.sources", tmp_path / "covenant-runsc"
    installed: list[object] = []

    def install(record: Record, packages: Sequence[str], *, release: str = "") -> None:
        # No `-t questing`: a default release would outweigh the pin that keeps the rest of it out.
        installed.append((list(packages), release, source.read_text(), pin.read_text()))

    answers = iter([runsc.Probe(None, "there is no runsc"), runsc.Probe("/usr/bin/runsc", None)])
    monkeypatch.setattr(runsc, "probe", lambda: next(answers))
    monkeypatch.setattr(gvisor, "SOURCE_FILE", str(source))
    monkeypatch.setattr(gvisor, "PIN_FILE", str(pin))
    monkeypatch.setattr(apt, "source_files", lambda: {"ubuntu.sources": UBUNTU})
    monkeypatch.setattr(apt, "candidate", lambda name: "0.0~20230807.0-4build1")
    monkeypatch.setattr(apt, "update", lambda: None)
    monkeypatch.setattr(apt, "install", install)
    machine = _machine(tmp_path, codename="noble")
    gvisor.provide(machine)
    pinned = (
        "Package: *\nPin: release n=questing\nPin-Priority: -1\n\n"
        "Package: runsc\nPin: release n=questing\nPin-Priority: 500\n"
    )
    assert installed == [(["runsc"], "", QUESTING, pinned)]
    assert machine.record.added.files == [str(pin), str(source)]


def test_source_that_its_mirror_lacks_is_taken_back(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gone() -> None:
        assert (tmp_path / "covenant-runsc.sources").exists()
        raise console.SetupError("404 Not Found")

    monkeypatch.setattr(runsc, "probe", lambda: runsc.Probe(None, "there is no runsc"))
    monkeypatch.setattr(gvisor, "SOURCE_FILE", str(tmp_path / "covenant-runsc.sources"))
    monkeypatch.setattr(gvisor, "PIN_FILE", str(tmp_path / "covenant-runsc"))
    monkeypatch.setattr(apt, "source_files", lambda: {"ubuntu.sources": UBUNTU})
    monkeypatch.setattr(apt, "candidate", lambda name: None)
    monkeypatch.setattr(apt, "update", gone)
    machine = _machine(tmp_path, codename="noble")
    with pytest.raises(console.SetupError, match="404") as caught:
        gvisor.provide(machine)
    assert any("/usr/local/bin/runsc" in line for line in caught.value.mend)
    assert machine.record.added.files == []
    assert [path.name for path in tmp_path.iterdir()] == [".setup"]


def test_source_file_that_another_process_made_is_not_overwritten(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "covenant-runsc.sources"
    target.write_text("Enabled: no\n")
    monkeypatch.setattr(runsc, "probe", lambda: runsc.Probe(None, "there is no runsc"))
    monkeypatch.setattr(gvisor, "SOURCE_FILE", str(target))
    monkeypatch.setattr(apt, "source_files", lambda: {"debian.sources": DEB822})
    monkeypatch.setattr(apt, "candidate", lambda name: None)
    monkeypatch.setattr(console, "run", _refuse)
    with pytest.raises(console.SetupError, match="was not made by set-up"):
        gvisor.provide(_machine(tmp_path))
    assert target.read_text() == "Enabled: no\n"


def test_old_version_is_older_and_backport_is_not() -> None:
    assert not apt.at_least("0.0~20221219.0-2+b3", runsc.OLDEST)
    assert apt.at_least("0.0~20240729.0-4~bpo12+2", runsc.OLDEST)
    assert not apt.at_least(None, runsc.OLDEST)


# --- the environment


def test_foreign_environment_is_left_alone(
    tmp_path: pathlib.Path, clone: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "digest", lambda folder: "digest")
    monkeypatch.setattr(console, "run", _refuse)
    (tmp_path / ".venv").mkdir()
    with pytest.raises(console.SetupError, match="was not made by set-up"):
        environment.provide(_machine(tmp_path))
    assert (tmp_path / ".venv").exists()


def test_environment_is_made_anew_when_lock_changes(tmp_path: pathlib.Path, clone: pathlib.Path) -> None:
    (tmp_path / "locks").mkdir()
    (tmp_path / "pyproject.toml").write_text((clone / "pyproject.toml").read_text())
    digests = []
    for text in ("a==1 --hash=sha256:1", "a==2 --hash=sha256:2"):
        (tmp_path / "locks/dev.txt").write_text(text)
        digests.append(environment.digest(tmp_path))
        digests.append(environment.digest(tmp_path))
    assert digests[0] == digests[1] != digests[2] == digests[3]


# --- undo


@pytest.fixture
def machine_calls(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Record the commands that undo would run on the machine, and run none."""
    calls: list[list[str]] = []

    def run(command: Sequence[str], **options: object) -> str:
        calls.append(list(command))
        return ""

    monkeypatch.setattr(console, "run", run)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(pwd, "getpwnam", lambda name: None)
    return calls


def test_undo_takes_back_record_and_nothing_else(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, machine_calls: list[list[str]]
) -> None:
    ours, others = tmp_path / "covenant.sources", tmp_path / "others.sources"
    for path in (ours, others):
        path.write_text("x")
    for name in (".venv", ".demo", "kept"):
        (tmp_path / name).mkdir()
    record = Record(tmp_path)
    record.add("packages", "runsc", "gone-since")
    record.add("files", str(ours))
    record.add("users", "covenant-agent")
    record.add("paths", ".venv", ".demo")
    monkeypatch.setattr(apt, "installed", lambda: {"runsc": "1", "nftables": "1"})
    monkeypatch.setattr(apt, "removal", list)
    takeback.take_back(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "others.sources"]
    assert ["userdel", "covenant-agent"] in machine_calls
    purged = [call for call in machine_calls if "purge" in call]
    assert [call[call.index("purge") + 1 :] for call in purged] == [["runsc"]]


def test_undo_keeps_what_others_need_now(
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    machine_calls: list[list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    Record(tmp_path).add("packages", "nftables")
    monkeypatch.setattr(apt, "installed", lambda: {"nftables": "1", "firewalld": "1"})
    monkeypatch.setattr(apt, "removal", lambda packages: [*packages, "firewalld"])
    takeback.take_back(tmp_path)
    assert machine_calls == []
    assert "firewalld need them now" in capsys.readouterr().out
    assert Record(tmp_path).added.packages == ["nftables"]


def test_undo_without_record_changes_nothing(tmp_path: pathlib.Path, machine_calls: list[list[str]]) -> None:
    (tmp_path / ".venv").mkdir()
    takeback.take_back(tmp_path)
    assert machine_calls == []
    assert (tmp_path / ".venv").exists()


@pytest.mark.parametrize("name", ["../outside", "/etc", "a/../../b", ""])
def test_undo_removes_nothing_outside_clone(tmp_path: pathlib.Path, machine_calls: list[list[str]], name: str) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    clone = tmp_path / "clone"
    (clone / ".setup").mkdir(parents=True)
    (clone / ".setup/added.json").write_text(json.dumps({"paths": [name]}))
    with pytest.raises(console.SetupError, match="not inside the clone"):
        takeback.take_back(clone)
    assert outside.exists()


def test_record_names_each_thing_once_and_survives_reading(tmp_path: pathlib.Path) -> None:
    Record(tmp_path).add("packages", "a", "b")
    again = Record(tmp_path)
    again.add("packages", "b", "c")
    again.forget("packages", "a")
    assert Record(tmp_path).added.packages == ["b", "c"]


def test_set_up_and_covenant_look_for_same_runsc() -> None:
    assert config._DEFAULT_PATHS["runsc"] == runsc.PLACES
