"""Check the embedded vault: changed, exchanged or restored files are refused, and a kill leaves one whole."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import pathlib
import resource
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from policy import errors
from policy.signing import strict_json
from policy.signing.keyfile import Argon2Parameters
from sandbox.kernel import libc
from sandbox.vault import keys
from sandbox.vault.embedded import FileVault
from tests.unit.sandbox.kernel.proc.test_secret_memory import PR_GET_DUMPABLE, status_of

CHEAP = Argon2Parameters(memory_kib=8 * 1024, iterations=1, lanes=1)
FILE, HEAD = "vault/vault.json", "vault-head.json"
Edit = Callable[[dict[str, Any]], object]


def value(text: str) -> memoryview:
    return memoryview(text.encode())


def nothing(change: object) -> None:
    """Do nothing: these tests have no log."""


@pytest.fixture
def state(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "state"
    path.mkdir(mode=0o700)
    return path


@pytest.fixture
def key_file(tmp_path: pathlib.Path) -> pathlib.Path:
    path = tmp_path / "vault.key"
    keys.make_file(path)
    return path


@pytest.fixture
def vault(state: pathlib.Path, key_file: pathlib.Path) -> FileVault:
    made = at(state, key_file)
    with keys.configured(str(key_file)) as key:
        made.create([key], before=nothing)
    return made


def at(state: pathlib.Path, key_file: pathlib.Path) -> FileVault:
    return FileVault(state, lambda: keys.configured(str(key_file)))


def read(vault: FileVault, agent: str = "a", name: str = "n") -> str | None:
    with vault.opened(agent, name) as found:
        return None if found is None else bytes(found.value.view).decode()


def edit(state: pathlib.Path, change: Edit, name: str = FILE) -> None:
    document = json.loads((state / name).read_bytes())
    change(document)
    (state / name).write_bytes(strict_json.dumps(document) + b"\n")


# --- what it keeps --------------------------------------------------------------------------------


def test_passphrase_opens_it_as_well_as_key_file(state: pathlib.Path, vault: FileVault, key_file: pathlib.Path) -> None:
    vault.put("a", "n", value("geheim"), before=nothing)
    with keys.configured(str(key_file)) as by_file, keys.passphrase(bytearray(b"correct horse")) as typed:
        vault.rekey([by_file, typed], before=nothing, parameters=CHEAP)
    by_words = FileVault(state, lambda: keys.passphrase(bytearray(b"correct horse")))
    assert read(by_words) == read(vault) == "geheim"
    with pytest.raises(errors.VaultKeyError, match="this passphrase does not open"):
        read(FileVault(state, lambda: keys.passphrase(bytearray(b"correct hors"))))


def test_after_rekey_old_key_opens_nothing(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    vault.put("a", "n", value("geheim"), before=nothing)
    keys.make_file(tmp_path / "new.key")
    with keys.configured(str(tmp_path / "new.key")) as new:
        vault.rekey([new], before=nothing)
    assert read(at(state, tmp_path / "new.key")) == "geheim"
    with pytest.raises(errors.VaultKeyError):
        read(at(state, key_file))


def test_key_file_is_whole_or_not_there(tmp_path: pathlib.Path) -> None:
    """A half-written file of a killed process is made anew; an existing key is never replaced."""
    (tmp_path / ".key.new").write_bytes(b"half")
    keys.make_file(tmp_path / "key")
    made = (tmp_path / "key").read_bytes()
    assert [path.name for path in tmp_path.iterdir()] == ["key"]
    assert (len(made), (tmp_path / "key").stat().st_mode & 0o777) == (32, 0o400)
    with pytest.raises(errors.VaultKeyError, match="is there already"):
        keys.make_file(tmp_path / "key")
    assert (tmp_path / "key").read_bytes() == made
    assert [path.name for path in tmp_path.iterdir()] == ["key"]


def test_key_file_without_its_directory_names_the_fix(tmp_path: pathlib.Path) -> None:
    with pytest.raises(errors.VaultKeyError, match=r"^the directory of key file") as caught:
        keys.make_file(tmp_path / "a" / "b" / "key")
    subprocess.run(shlex.split(caught.value.hint), check=True)
    keys.make_file(tmp_path / "a" / "b" / "key")
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_no_secret_lies_in_its_files(state: pathlib.Path, vault: FileVault) -> None:
    vault.put("a", "n", value("a-planted-secret"), before=nothing)
    vault.rotate("a", "n", value("another-planted-one"), before=nothing)
    assert read(vault) == "another-planted-one"
    for path in state.rglob("*"):
        if path.is_file():
            assert b"planted" not in path.read_bytes(), path


def test_second_vault_is_not_made_over_first(vault: FileVault, key_file: pathlib.Path) -> None:
    with keys.configured(str(key_file)) as key, pytest.raises(errors.VaultError, match="there is a vault"):
        vault.create([key], before=nothing)


def test_log_that_takes_no_row_changes_nothing(vault: FileVault) -> None:
    def refuse(change: object) -> None:
        raise errors.LedgerError("the disk is full")

    vault.put("a", "n", value("one"), before=nothing)
    acts: list[Callable[[], object]] = [
        lambda: vault.put("a", "m", value("two"), before=refuse),
        lambda: vault.rotate("a", "n", value("two"), before=refuse),
        lambda: vault.remove("a", "n", before=refuse),
    ]
    for act in acts:
        with pytest.raises(errors.LedgerError):
            act()
    assert [(e.name, e.version) for e in vault.entries()] == [("n", 1)]
    assert read(vault) == "one"


# --- changes by an attacker -----------------------------------------------------------------------


def _add_lock(document: dict[str, Any]) -> None:
    document["locks"].append(document["locks"][0])


def _swap_values(document: dict[str, Any]) -> None:
    first, second = document["records"]
    first["value"], second["value"] = second["value"], first["value"]
    first["key"], second["key"] = second["key"], first["key"]


def _in_first(**fields: object) -> Edit:
    return lambda document: document["records"][0].update(fields)


EDITS: dict[str, Edit] = {
    "two records exchanged": _swap_values,
    "a record under another name": _in_first(name="other"),
    "a record of another agent": _in_first(agent_id="0"),
    "another version's number": _in_first(version=7),
    "a time": _in_first(changed_ms=1),
    "a record taken out": lambda d: d.update(records=d["records"][:1]),
    "every record taken out": lambda d: d.update(records=[]),
    "the generation": lambda d: d.update(generation=d["generation"] - 1),
    "the file before it": lambda d: d.update(previous=""),
    "a lock more": _add_lock,
    "another vault's id": lambda d: d.update(id="0" * 32),
    "the seal": lambda d: d.update(seal="0" * 64),
    "a key that is not known": lambda d: d.update(more=1),
}


@pytest.mark.parametrize("change", EDITS.values(), ids=EDITS)
@pytest.mark.parametrize("with_head", [False, True], ids=["alone", "with a head that fits"])
def test_every_edit_is_refused(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, change: Edit, *, with_head: bool
) -> None:
    """Also if an attacker without a key writes the head anew."""
    vault.put("a", "n", value("one"), before=nothing)
    vault.put("b", "n", value("two"), before=nothing)
    assert read(at(state, key_file)) == "one"
    edit(state, change)
    if with_head:
        _fit_head(state)
    with pytest.raises(errors.VaultError):
        read(at(state, key_file))


def _fit_head(state: pathlib.Path) -> None:
    raw = (state / FILE).read_bytes()
    document = json.loads(raw)
    head = {"generation": document["generation"], "id": document["id"], "digest": hashlib.sha256(raw).hexdigest()}
    edit(state, lambda d: d.update(head), HEAD)


def test_every_flipped_bit_and_every_cut_is_refused(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path
) -> None:
    """The test changes one place in each 40 bytes of file and head; for the file it writes a head that fits."""
    vault.put("a", "n", value("one"), before=nothing)
    for name in (FILE, HEAD):
        path = state / name
        whole, head = path.read_bytes(), (state / HEAD).read_bytes()
        for at_byte in range(0, len(whole), 40):
            for broken in (_flipped(whole, at_byte), whole[:at_byte]):
                path.write_bytes(broken)
                if name == FILE:
                    with contextlib.suppress(ValueError):
                        _fit_head(state)
                with pytest.raises(errors.VaultError):
                    read(at(state, key_file))
        path.write_bytes(whole)
        (state / HEAD).write_bytes(head)
    assert read(at(state, key_file)) == "one"


def _flipped(raw: bytes, at_byte: int) -> bytes:
    return raw[:at_byte] + bytes([raw[at_byte] ^ 1]) + raw[at_byte + 1 :]


def test_older_file_put_back_is_refused(state: pathlib.Path, vault: FileVault, key_file: pathlib.Path) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    older = (state / FILE).read_bytes()
    vault.rotate("a", "n", value("two"), before=nothing)
    newer = (state / FILE).read_bytes()
    (state / FILE).write_bytes(older)
    with pytest.raises(errors.VaultError, match="an older one was put back"):
        read(at(state, key_file))
    # A vault that was open before the older file was put back refuses it too.
    with pytest.raises(errors.VaultError, match="an older one was put back"):
        read(vault)
    (state / FILE).write_bytes(newer)
    assert read(vault) == "two"


@pytest.mark.parametrize("killed", [False, True])
@pytest.mark.parametrize("verb", ["rotate", "remove", "rekey"])
def test_older_file_is_refused_from_first_read_after_killed_change(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, tmp_path: pathlib.Path, verb: str, *, killed: bool
) -> None:
    """No later change happens: the next reader writes the head that the change could not write."""
    vault.put("a", "n", value("leaked"), before=nothing)
    keys.make_file(tmp_path / "new.key")
    older, head = ((state / name).read_bytes() for name in (FILE, HEAD))
    now = tmp_path / "new.key" if verb == "rekey" else key_file
    if verb == "rotate":
        vault.rotate("a", "n", value("fresh"), before=nothing)
    elif verb == "remove":
        vault.remove("a", "n", before=nothing)
    else:
        with keys.configured(str(now)) as key:
            vault.rekey([key], before=nothing)
    if killed:
        (state / HEAD).write_bytes(head)
    assert read(at(state, now)) == {"rotate": "fresh", "remove": None, "rekey": "leaked"}[verb]
    (state / FILE).write_bytes(older)
    for one in (now, key_file):
        with pytest.raises(errors.VaultError, match="an older one was put back"):
            read(at(state, one))


def test_whoever_cannot_write_head_after_killed_change_is_given_nothing(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandbox.storage import atomic_file

    def full(*args: object, **more: object) -> None:
        raise OSError(28, "No space left on device")

    vault.put("a", "n", value("one"), before=nothing)
    head = (state / HEAD).read_bytes()
    vault.rotate("a", "n", value("two"), before=nothing)
    with monkeypatch.context() as patched:
        patched.setattr(atomic_file, "replace", full)
        assert read(at(state, key_file)) == "two"  # the control: there is nothing to write
        (state / HEAD).write_bytes(head)
        with pytest.raises(errors.VaultError, match="cannot be written: No space"):
            read(at(state, key_file))
    assert read(at(state, key_file)) == "two"


def test_head_is_not_written_for_what_no_key_has_sealed(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path
) -> None:
    """An attacker with the folder alone can make a next document, but no reader writes it into the head."""
    vault.put("a", "n", value("one"), before=nothing)
    whole, head = ((state / name).read_bytes() for name in (FILE, HEAD))
    previous = hashlib.sha256(whole).hexdigest()
    edit(state, lambda d: d.update(generation=d["generation"] + 1, previous=previous, records=[]))
    with pytest.raises(errors.VaultError, match="its seal does not hold"):
        read(at(state, key_file))
    assert (state / HEAD).read_bytes() == head
    (state / FILE).write_bytes(whole)
    assert read(vault) == "one"


def test_older_record_put_back_into_newest_file_is_refused(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path
) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    older = json.loads((state / FILE).read_bytes())["records"]
    vault.remove("a", "n", before=nothing)
    vault.put("a", "n", value("two"), before=nothing)  # version 1 again, of the same name
    edit(state, lambda d: d.update(records=older))
    _fit_head(state)
    with pytest.raises(errors.VaultError, match="its seal does not hold"):
        read(at(state, key_file))


def test_another_vault_of_same_key_is_refused(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    other = tmp_path / "other"
    other.mkdir(mode=0o700)
    with keys.configured(str(key_file)) as key:
        at(other, key_file).create([key], before=nothing)
    (state / FILE).write_bytes((other / FILE).read_bytes())
    with pytest.raises(errors.VaultError, match="its head names another"):
        read(at(state, key_file))


def test_what_is_gone_is_no_empty_vault(state: pathlib.Path, vault: FileVault, key_file: pathlib.Path) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    (state / FILE).rename(state / "kept")
    with pytest.raises(errors.VaultError, match="the vault is gone"):
        read(vault)
    with keys.configured(str(key_file)) as key, pytest.raises(errors.VaultError, match="there was one"):
        vault.create([key], before=nothing)
    (state / "kept").rename(state / FILE)
    (state / HEAD).unlink()
    with pytest.raises(errors.VaultError, match="its head is gone"):
        read(vault)


def _link(path: pathlib.Path) -> None:
    path.rename(path.with_name("real"))
    path.symlink_to("real")


def _fifo(path: pathlib.Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


def _directory(path: pathlib.Path) -> None:
    path.unlink()
    path.mkdir(mode=0o700)


OTHERS: dict[str, Callable[[pathlib.Path], object]] = {
    "a symlink": _link,
    "readable by others": lambda path: path.chmod(0o640),
    "of another owner": lambda path: os.chown(path, 12345, 12345),
    "a FIFO": _fifo,
    "a directory": _directory,
}


@pytest.mark.parametrize("name", [FILE, HEAD])
@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_file_in_other_hands_is_refused(
    state: pathlib.Path, vault: FileVault, name: str, change: Callable[[pathlib.Path], object]
) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    change(state / name)
    with pytest.raises(errors.VaultError):
        read(vault)


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS)
def test_key_file_in_other_hands_is_refused(
    vault: FileVault, key_file: pathlib.Path, change: Callable[[pathlib.Path], object]
) -> None:
    vault.put("a", "n", value("one"), before=nothing)
    change(key_file)
    with pytest.raises(errors.VaultKeyError):
        read(vault)


# --- who dies, and who comes at once --------------------------------------------------------------


@contextlib.contextmanager
def forked(work: Callable[[], None]) -> Iterator[int]:
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException):
            work()
        os._exit(0)
    try:
        yield pid
    finally:
        os.waitpid(pid, 0)


def test_kill_in_change_leaves_old_or_new(state: pathlib.Path, vault: FileVault, key_file: pathlib.Path) -> None:
    vault.put("a", "n", value("0"), before=nothing)

    def forever(write: int) -> None:
        mine = at(state, key_file)
        for number in range(1, 10**6):
            mine.rotate("a", "n", value(str(number)), before=nothing)
            os.write(write, b".")

    seen = {"0"}
    for attempt in range(20):
        read_end, write_end = os.pipe()
        with forked(functools.partial(forever, write_end)) as pid:
            # So many changes are done, however slow this machine is; the kill comes in a later one.
            for _ in range(attempt % 4):
                os.read(read_end, 1)
            time.sleep(0.003 * attempt)
            os.kill(pid, signal.SIGKILL)
        os.close(read_end)
        os.close(write_end)
        fresh = at(state, key_file)
        text = read(fresh)
        assert text is not None
        version = fresh.entries()[0].version
        # The value read is the one written as this version: the child counts from 1 in each attempt.
        assert version >= 1
        seen.add(text)
        fresh.put("a", f"after-{attempt}", value("x"), before=nothing)
    assert len(seen) > 2


CUTS = ["before the file", "between the file and the head", "after the head"]


@pytest.mark.parametrize("cut", range(3), ids=CUTS)
def test_stop_at_each_step_of_write(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandbox.storage import atomic_file

    vault.put("a", "n", value("old"), before=nothing)
    replace = atomic_file.replace
    done: list[object] = []

    def stopping(*args: Any, **more: Any) -> None:
        if len(done) == cut:
            raise KeyboardInterrupt
        done.append(args)
        replace(*args, **more)

    monkeypatch.setattr(atomic_file, "replace", stopping)
    with contextlib.suppress(KeyboardInterrupt):
        vault.rotate("a", "n", value("new"), before=nothing)
    monkeypatch.undo()
    fresh = at(state, key_file)
    assert read(fresh) == ("old" if cut == 0 else "new")
    fresh.rotate("a", "n", value("newest"), before=nothing)
    assert read(fresh) == "newest"


def test_interrupted_init_may_be_repeated(
    state: pathlib.Path, key_file: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sandbox.storage import atomic_file

    vault, replace = at(state, key_file), atomic_file.replace
    done: list[object] = []

    def once(*args: Any, **more: Any) -> None:
        if done:
            raise KeyboardInterrupt
        done.append(args)
        replace(*args, **more)

    with keys.configured(str(key_file)) as key:
        monkeypatch.setattr(atomic_file, "replace", once)
        with contextlib.suppress(KeyboardInterrupt):
            vault.create([key], before=nothing)
        monkeypatch.undo()
        with pytest.raises(errors.VaultError, match="there is no vault"):
            read(vault)
        vault.create([key], before=nothing)
    assert vault.entries() == []


def test_writers_take_turns_and_readers_see_one_of_them(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path
) -> None:
    vault.put("a", "n", value("0"), before=nothing)

    def writer(agent: str) -> Callable[[], None]:
        def work() -> None:
            for number in range(15):
                at(state, key_file).put(agent, f"n{number}", value("x"), before=nothing)

        return work

    with forked(writer("b")), forked(writer("c")):
        for _ in range(100):
            assert read(vault) == "0"
    assert len(vault.entries("b")) == len(vault.entries("c")) == 15


@pytest.mark.parametrize("kind", ["file", "passphrase"])
def test_whoever_has_what_opens_vault_leaves_no_core_and_is_nobodys_to_trace(kind: str, key_file: pathlib.Path) -> None:
    """Also `covenant vault list`, which neither accepts nor prints a secret."""

    def look() -> None:
        libc.prctl(libc.PR_SET_DUMPABLE, 1)
        with keys.configured(str(key_file)) if kind == "file" else keys.passphrase(bytearray(b"open")):
            assert libc.prctl(PR_GET_DUMPABLE) == 0
            assert resource.getrlimit(resource.RLIMIT_CORE) == (1, 1)

    assert status_of(look) == 0


@pytest.mark.parametrize("verb", ["rotate", "rekey"])
def test_nobody_waits_for_whoever_is_asked_for_passphrase(
    state: pathlib.Path, vault: FileVault, key_file: pathlib.Path, verb: str
) -> None:
    """Also after a killed change, whose head the next reader writes under the lock."""
    vault.put("a", "n", value("one"), before=nothing)
    head = (state / HEAD).read_bytes()
    vault.rotate("a", "n", value("two"), before=nothing)
    (state / HEAD).write_bytes(head)
    seen: list[str | None] = []

    @contextlib.contextmanager
    def prompt() -> Iterator[keys.Key]:
        seen.append(read(at(state, key_file)))
        with keys.configured(str(key_file)) as key:
            yield key

    writer = FileVault(state, prompt)
    if verb == "rotate":
        writer.rotate("a", "n", value("three"), before=nothing)
    else:
        with keys.configured(str(key_file)) as key:
            writer.rekey([key], before=nothing)
    assert seen == ["two"]
    assert read(at(state, key_file)) == {"rotate": "three", "rekey": "two"}[verb]
