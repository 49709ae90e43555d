"""Check COVENANT_STATE: the ratchet, the clock and the root survive crashes, races and damage without loss."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors
from policy.signing import trust
from sandbox.audit.log import Ledger
from sandbox.storage import atomic_file
from sandbox.storage.trust_state import CLOCK_STEP_MS, ClockAhead, State
from tests import signing_kit as kit

NOW = kit.NOW
ISSUER = {"display": "operator@local", "pubkey": "4wBqpZM9xaSheZzJSMawUKKwhdpChKbZ5eu5ky4Vigw"}
ROOT = kit.root_bytes(kit.root_document(), 1)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    made = tmp_path / "state"
    made.mkdir(mode=0o700)
    return made


@pytest.fixture
def state(path: Path) -> Iterator[State]:
    with State(path) as made:
        made.init_root(ROOT, NOW)
        yield made


def _trusted(state: State, serial: int, **changes: Any) -> trust.TrustedPackage:
    return kit.verify(kit.signed(serial=serial, **changes), state.trust_root(NOW), serials=state)


# --- the directory --------------------------------------------------------------------------------


def test_directory_not_ours_alone_is_refused(tmp_path: Path) -> None:
    good = tmp_path / "good"
    good.mkdir(mode=0o700)
    State(good).close()
    for mode in (0o750, 0o701, 0o770, 0o777):
        good.chmod(mode)
        with pytest.raises(errors.HomeError, match=f"has mode 0{mode:o}"):
            State(good)
    good.chmod(0o700)
    (tmp_path / "link").symlink_to(good)
    with pytest.raises(errors.HomeError, match="it is a symlink"):
        State(tmp_path / "link")
    with pytest.raises(errors.HomeError, match="No such file"):
        State(tmp_path / "missing")


def test_another_owner_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    State(path).close()
    monkeypatch.setattr(os, "geteuid", lambda: 4242)
    with pytest.raises(errors.HomeError, match="not to uid 4242"):
        State(path)


def test_state_stays_where_it_was_opened(state: State, path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.mkdir(mode=0o700)
    state.accept(_trusted(state, 7), now_ms=NOW)
    with State(path.with_name("moved")) as moved:
        assert moved.accepted("hello")
    assert list(path.iterdir()) == []


# --- the trust root -------------------------------------------------------------------------------


def test_version_1_is_installed_once(path: Path) -> None:
    with State(path) as state:
        assert not state.has_root()
        with pytest.raises(errors.TrustError, match="no trust root is installed"):
            state.trust_root(NOW)
        with pytest.raises(errors.TrustError, match="version 1, not 2"):
            state.init_root(kit.root_bytes(kit.root_document(version=2), 1), NOW)
        with pytest.raises(errors.TrustError, match="not signed"):
            state.init_root(kit.root_bytes(kit.root_document(), 2), NOW)
        assert not state.has_root()
        state.init_root(ROOT, NOW)
        assert state.trust_root(NOW).version == 1
        with pytest.raises(errors.TrustError, match="installed already"):
            state.init_root(ROOT, NOW)


def test_root_is_followed_by_next_only(state: State) -> None:
    second = kit.root_bytes(kit.root_document(kit.operator(2), version=2), 1, 2)
    with pytest.raises(errors.TrustError, match="is not signed by the keys of version 1"):
        state.replace_root(kit.root_bytes(kit.root_document(kit.operator(2), version=2), 2), NOW)
    assert state.replace_root(second, NOW).version == 2
    assert state.trust_root(NOW).keys[0].name == "op2"
    for raw in (ROOT, second):
        with pytest.raises(errors.TrustError, match="cannot follow 2"):
            state.replace_root(raw, NOW)


def test_next_root_that_had_ended_before_is_not_installed(state: State) -> None:
    state.accept(_trusted(state, 10), now_ms=NOW + kit.DAY)
    ended = kit.root_bytes(kit.root_document(version=2, expires_at=NOW + kit.DAY), 1)
    with pytest.raises(errors.TrustError, match="has ended"):
        state.replace_root(ended, NOW)
    assert state.root_version() == 1


def test_root_under_name_of_another_version_is_refused(state: State, path: Path) -> None:
    (path / "trust" / "root-00000002.json").write_bytes(ROOT)
    (path / "trust" / "root-00000002.json").chmod(0o600)
    with pytest.raises(errors.TrustError, match="says that it is version 1"):
        state.trust_root(NOW)


def test_state_that_lost_its_roots_is_not_begun_again(state: State, path: Path) -> None:
    state.replace_root(kit.root_bytes(kit.root_document(version=2), 1), NOW)
    for file in (path / "trust").iterdir():
        file.unlink()
    for attempt in (state.present_root, lambda: state.init_root(ROOT, NOW)):
        with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
            attempt()


def test_init_that_was_killed_can_be_repeated_and_sets_no_clock_back(state: State, path: Path) -> None:
    (path / "trust" / "root-00000001.json").unlink()
    state.init_root(ROOT, NOW - 5 * kit.DAY)
    assert state.greatest_time_ms() == NOW
    assert state.trust_root(NOW).version == 1


def test_what_is_accepted_later_keeps_version_in_record(state: State, path: Path) -> None:
    state.replace_root(kit.root_bytes(kit.root_document(version=2), 1), NOW)
    state.accept(_trusted(state, 10), now_ms=NOW + kit.DAY)
    (path / "trust" / "root-00000002.json").unlink()
    with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
        state.present_root()


def test_root_that_came_in_between_is_asked_before_anything_starts(state: State) -> None:
    verified = _trusted(state, 10)
    entry = {"payload_digest": verified.payload_digest, "at": NOW, "reason": "it leaks"}
    taken_back = kit.root_document(version=2, revoked=kit.revoked(manifests=[entry]))
    state.replace_root(kit.root_bytes(taken_back, 1), NOW)
    with pytest.raises(errors.TrustError, match="version 1, 2 holds now"):
        state.accept(verified, now_ms=NOW)
    assert state.accepted("hello") is None
    state.accept(_trusted(state, 11), now_ms=NOW)


def test_replacement_that_was_killed_halfway_is_missed_as_well_once_anything_was_accepted(
    state: State, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(State, "_write_clock", killed)
        with pytest.raises(KeyboardInterrupt):
            state.replace_root(kit.root_bytes(kit.root_document(version=2), 1), NOW)
    assert state.present_root().version == 2
    state.accept(_trusted(state, 10), now_ms=NOW)
    assert state.greatest_time_ms() == NOW
    (path / "trust" / "root-00000002.json").unlink()
    with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
        state.present_root()


def test_what_is_told_before_root_holds_can_stop_it_and_is_not_told_of_one_that_cannot(state: State) -> None:
    told: list[int] = []
    second = kit.root_bytes(kit.root_document(version=2), 1)

    def refuse(root: trust.TrustRoot) -> None:
        told.append(state.root_version())
        raise errors.LedgerError("the log is full")

    with pytest.raises(errors.LedgerError):
        state.replace_root(second, NOW, before=refuse)
    assert (told, state.root_version()) == ([1], 1)
    state.replace_root(second, NOW)
    with pytest.raises(errors.TrustError, match="cannot follow 2"):
        state.replace_root(second, NOW, before=refuse)
    with pytest.raises(errors.TrustError, match="installed already"):
        state.init_root(ROOT, NOW, before=refuse)
    assert told == [1]


# --- the ratchet ----------------------------------------------------------------------------------


def test_serials_only_go_up(state: State, path: Path) -> None:
    assert state.accepted("hello") is None
    ten = _trusted(state, 10)
    state.accept(ten, now_ms=NOW)
    state.accept(ten, now_ms=NOW)
    assert state.accepted("hello") == trust.Accepted(10, ten.payload_digest)
    assert state.accepted("Hello") is None
    with pytest.raises(errors.SerialError):
        _trusted(state, 9)
    with pytest.raises(errors.SerialError):
        _trusted(state, 10, approve_unlimited=True)
    state.accept(_trusted(state, 11), now_ms=NOW)
    with State(path) as again:
        assert again.accepted("hello") == state.accepted("hello")
        assert again.accepted("hello") != trust.Accepted(10, ten.payload_digest)


def test_two_that_were_verified_at_once_do_not_both_win(state: State) -> None:
    one, other, older = _trusted(state, 10), _trusted(state, 10, approve_unlimited=True), _trusted(state, 9)
    state.accept(one, now_ms=NOW)
    for late in (other, older):
        with pytest.raises(errors.SerialError):
            state.accept(late, now_ms=NOW)
    assert state.accepted("hello") == trust.Accepted(10, one.payload_digest)


def test_two_processes_that_race_have_one_winner(state: State, path: Path) -> None:
    for serial in range(20, 30):
        rivals = [_trusted(state, serial), _trusted(state, serial, approve_unlimited=True)]
        children = [_in_child(lambda r=rival: _accept(path, r)) for rival in rivals]  # type: ignore[misc]
        statuses = sorted(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)
        assert statuses == [0, 3]
        accepted = state.accepted("hello")
        assert accepted is not None
        assert accepted.payload_digest in {r.payload_digest for r in rivals}


def test_held_lock_is_waited_for_and_then_refused(state: State, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trusted = _trusted(state, 10)
    monkeypatch.setattr(atomic_file, "LOCK_SECONDS", 0.05)
    fd = os.open(path, os.O_RDONLY)
    try:
        with (
            atomic_file.locked(fd, where="state", error=errors.StateError),
            pytest.raises(errors.StateError, match="held by another process"),
        ):
            state.accept(trusted, now_ms=NOW)
    finally:
        os.close(fd)
    state.accept(trusted, now_ms=NOW)


# --- the clock ------------------------------------------------------------------------------------


def test_greatest_time_only_grows_and_not_every_moment(state: State) -> None:
    assert state.greatest_time_ms() == NOW
    trusted = _trusted(state, 10)
    for moment, greatest in [
        (NOW + CLOCK_STEP_MS - 1, NOW),
        (NOW + CLOCK_STEP_MS, NOW + CLOCK_STEP_MS),
        (NOW - 1, NOW + CLOCK_STEP_MS),
        (0, NOW + CLOCK_STEP_MS),
    ]:
        state.accept(trusted, now_ms=moment)
        assert state.greatest_time_ms() == greatest


def test_accepting_same_again_writes_nothing(state: State, path: Path) -> None:
    trusted = _trusted(state, 10)
    state.accept(trusted, now_ms=NOW)
    before = {f: f.stat().st_ino for f in path.rglob("*")}
    state.accept(trusted, now_ms=NOW + 1)
    assert {f: f.stat().st_ino for f in path.rglob("*")} == before


def test_root_that_was_read_still_holds_until_another_does_or_it_is_taken_away(state: State, path: Path) -> None:
    assert state.still_holds(1) == NOW == state.greatest_time_ms() == state.time_under(1)
    assert state.root_place(1).read_bytes() == ROOT
    state.replace_root(kit.root_bytes(kit.root_document(version=2), 1), NOW + CLOCK_STEP_MS)
    with pytest.raises(errors.TrustError, match="version 2 holds now, not 1"):
        state.still_holds(1)
    with pytest.raises(errors.TrustError, match="version 2 was installed after 1"):
        state.time_under(1)
    assert state.still_holds(2) == state.greatest_time_ms() == state.time_under(2)
    state.root_place(2).unlink()
    for version in (1, 2):
        with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
            state.still_holds(version)
    (path / "clock.json").unlink()
    for ask in (state.still_holds, state.time_under):
        with pytest.raises(errors.StateError, match="the clock record is gone"):
            ask(1)


def test_what_was_verified_under_old_root_is_not_accepted_where_new_one_was_taken_away(state: State) -> None:
    """The new root's revocations still hold, although the folder shows the old root again."""
    trusted = _trusted(state, 10)
    state.replace_root(kit.root_bytes(kit.root_document(version=2), 1), NOW + CLOCK_STEP_MS)
    with pytest.raises(errors.TrustError, match="verified under trust root version 1, 2 holds now"):
        state.accept(trusted, now_ms=NOW)
    state.root_place(2).unlink()
    with pytest.raises(errors.TrustError, match="version 2 was installed and is gone"):
        state.accept(trusted, now_ms=NOW)
    assert state.accepted(trusted.statement.agent_id) is None


# --- damage ---------------------------------------------------------------------------------------


def _serial_file(path: Path) -> Path:
    (found,) = (path / "serials").glob("*.json")
    return found


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda raw: b"",
    "cut": lambda raw: raw[: len(raw) // 2],
    "zeroes": lambda raw: bytes(len(raw)),
    "trailing": lambda raw: raw + b"{}",
    "another kind": lambda raw: raw.replace(b"covenant-serial", b"covenant-clock"),
    "unknown key": lambda raw: raw.replace(b'"serial":10', b'"serial":10,"x":1'),
    "a key twice": lambda raw: raw.replace(b'"serial":10', b'"serial":10,"serial":1'),
    "a serial as text": lambda raw: raw.replace(b'"serial":10', b'"serial":"10"'),
    "another agent": lambda raw: raw.replace(b'"hello"', b'"other"'),
    "too large": lambda raw: raw + b" " * 5000,
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_serial_is_error_and_never_empty_ratchet(name: str, state: State, path: Path) -> None:
    trusted = _trusted(state, 10)
    state.accept(trusted, now_ms=NOW)
    file = _serial_file(path)
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    with pytest.raises(errors.StateError):
        state.accepted("hello")
    with pytest.raises(errors.StateError):
        state.accept(trusted, now_ms=NOW)


def test_unsafe_records_are_refused(state: State, path: Path) -> None:
    state.accept(_trusted(state, 10), now_ms=NOW)
    file = _serial_file(path)
    file.chmod(0o640)
    with pytest.raises(errors.StateError, match="has mode 0640"):
        state.accepted("hello")
    file.chmod(0o600)
    file.rename(path / "elsewhere")
    file.symlink_to(path / "elsewhere")
    with pytest.raises(errors.StateError, match="it is a symlink"):
        state.accepted("hello")
    file.unlink()
    os.mkfifo(file, 0o600)
    with pytest.raises(errors.StateError, match="no plain file"):
        state.accepted("hello")


def test_ratchet_that_was_taken_away_is_missed(state: State, path: Path) -> None:
    (path / "serials").rmdir()
    with pytest.raises(errors.StateError, match="serials` is missing"):
        state.accepted("hello")
    (path / "clock.json").unlink()
    with pytest.raises(errors.StateError, match="the clock record is gone"):
        state.greatest_time_ms()


# --- crashes --------------------------------------------------------------------------------------


def _in_child(act: Callable[[], int]) -> int:
    child = os.fork()
    if child:
        return child
    status = 99
    try:
        status = act()
    finally:
        os._exit(status)


def _accept(path: Path, trusted: trust.TrustedPackage, *, now_ms: int = NOW) -> int:
    try:
        with State(path) as state:
            state.accept(trusted, now_ms=now_ms)
    except errors.SerialError:
        return 3
    return 0


_STEPS = ("write", "fsync", "rename", "unlink", "link")


def _die_at(step: int, *, torn: bool) -> None:
    """Make this process die as by kill -9 in place of its n-th call that changes the disk."""
    left = [step]

    def deadly(real: Callable[..., Any], name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if left[0] == 0:
                if torn and name == "write":
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                os._exit(9)
            left[0] -= 1
            return real(*args, **kwargs)

        return call

    for name in _STEPS:
        setattr(os, name, deadly(getattr(os, name), name))


def _crash(act: Callable[[], int], step: int, *, torn: bool) -> int:
    def dying() -> int:
        _die_at(step, torn=torn)
        return act()

    return os.waitstatus_to_exitcode(os.waitpid(_in_child(dying), 0)[1])


@pytest.mark.parametrize("torn", [False, True])
def test_crash_at_any_point_leaves_old_serial_or_new(state: State, path: Path, torn: bool) -> None:
    died = 0
    for step in range(40):
        serial = 100 + 10 * step
        old = _trusted(state, serial)
        state.accept(old, now_ms=NOW + step * 10 * CLOCK_STEP_MS)
        new = kit.verify(kit.signed(serial=serial + 1), state.trust_root(NOW), serials=state)
        later = NOW + (step * 10 + 5) * CLOCK_STEP_MS
        status = _crash(lambda n=new, t=later: _accept(path, n, now_ms=t), step, torn=torn)  # type: ignore[misc]
        assert status in {0, 9}
        died += status == 9
        found = state.accepted("hello")
        assert found in {
            trust.Accepted(serial, old.payload_digest),
            trust.Accepted(serial + 1, new.payload_digest),
        }
        assert state.greatest_time_ms() in {NOW + step * 10 * CLOCK_STEP_MS, later}
        if status == 0:
            assert found == trust.Accepted(serial + 1, new.payload_digest)
            break
        # The leftovers do not hinder the next start.
        state.accept(new, now_ms=later)
    assert died >= 6
    leftovers = [f.name for f in path.rglob(".*")]
    assert leftovers == []


def test_crash_while_root_is_installed_leaves_none_or_whole_one(tmp_path: Path) -> None:
    def install(place: Path) -> int:
        with State(place) as made:
            made.init_root(ROOT, NOW)
        return 0

    died = 0
    for step in range(40):
        place = tmp_path / str(step)
        place.mkdir(mode=0o700)
        status = _crash(lambda p=place: install(p), step, torn=True)  # type: ignore[misc]
        died += status == 9
        with State(place) as after:
            if not after.has_root():
                assert status == 9
                after.init_root(ROOT, NOW)
            assert after.trust_root(NOW).version == 1
            assert after.greatest_time_ms() == NOW
            after.accept(_trusted(after, 1), now_ms=NOW)
        if status == 0:
            break
    assert died >= 6


def test_crash_while_root_is_replaced_leaves_old_one_or_new_one_with_its_line(tmp_path: Path) -> None:
    line = {"operator": "op1", "version_from": 1, "version_to": 2, "digest": "0" * 64, "signers": [], "changes": []}
    revoked = kit.revoked(serials=[{"agent_id": "hello", "serial_at_most": 5, "at": NOW, "reason": "old"}])
    second = kit.root_bytes(kit.root_document(version=2, revoked=revoked), 1)

    def log(place: Path) -> Ledger:
        return Ledger.open(place / "audit", head=place / "audit-head" / "head.json")

    def replace(place: Path) -> int:
        def told(root: trust.TrustRoot) -> None:
            with log(place) as ledger:
                ledger.append("trust_changed", line, issuer=ISSUER, now_ms=NOW)

        with State(place) as made:
            made.replace_root(second, NOW, before=told)
        return 0

    ends = []
    for step in range(60):
        place = tmp_path / str(step)
        place.mkdir(mode=0o700)
        with State(place) as made:
            made.init_root(ROOT, NOW)
        log(place).close()
        status = _crash(lambda p=place: replace(p), step, torn=True)  # type: ignore[misc]
        with State(place) as after, log(place) as ledger:
            version = after.present_root().version
            assert (version, ledger.count) in {(1, 0), (1, 1), (2, 1)}
            # With any leftovers, the same step succeeds, and a revoked package is not accepted meanwhile.
            if version == 1:
                after.replace_root(second, NOW)
            with pytest.raises(errors.RevokedError):
                _trusted(after, 5)
        ends.append((version, status))
        if status == 0:
            break
    assert ends[-1] == (2, 0)
    # The kills came on both sides of the moment at which the new version holds.
    assert {(1, 9), (2, 9)} < set(ends)


def test_what_is_written_is_synced_before_and_after_it_gets_its_name(
    state: State, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trusted = _trusted(state, 10)
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        calls.append("fsync " + os.path.relpath(os.readlink(f"/proc/self/fd/{fd}"), path / "serials")[:3])
        fsync(fd)

    def renamed(*args: Any, **kwargs: Any) -> None:
        calls.append("rename")
        rename(*args, **kwargs)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "rename", renamed)
    state.accept(trusted, now_ms=NOW)
    # A power cut cannot be made here; its rule is that the bytes come before the name, and the name before
    # the answer (fsync(2), rename(2)).
    name = "." + _serial_file(path).name[:2]
    assert calls == [f"fsync {name}", "rename", "fsync ."]


def test_full_disk_is_error_and_changes_nothing(state: State, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _trusted(state, 10)
    state.accept(first, now_ms=NOW)
    second = _trusted(state, 11)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(errors.StateError, match="No space left"):
            state.accept(second, now_ms=NOW)
    assert state.accepted("hello") == trust.Accepted(10, first.payload_digest)


# --- dev ------------------------------------------------------------------------------------------


def test_dev_states_are_apart(state: State) -> None:
    with state.dev("hello") as one, state.dev("other") as other, state.dev("hello") as again:
        one.init_root(ROOT, NOW)
        assert again.has_root()
        assert not other.has_root()
        one.accept(_trusted(one, NOW), now_ms=NOW)
        assert state.accepted("hello") is None
        assert json.loads(_serial_file(one.path).read_text())["serial"] == NOW


# --- a clock that was ahead -----------------------------------------------------------------------

DAY = 86_400_000


def test_clock_ahead_is_found_and_taken_back(state: State) -> None:
    late = NOW + 60 * DAY
    state.accept(_trusted(state, NOW - DAY), now_ms=NOW)
    assert state.clock_ahead(NOW) is None
    assert state.set_clock(NOW) is None
    state.accept(_trusted(state, NOW + DAY // 2), now_ms=late)
    with pytest.raises(errors.SerialError, match="older"):
        _trusted(state, NOW)
    told: list[ClockAhead] = []
    ahead = state.set_clock(NOW + 5, before=told.append)
    assert told == [ahead]
    assert ahead == ClockAhead(late, ("hello",))
    assert state.greatest_time_ms() == NOW + 5
    assert state.clock_ahead(NOW + 5) is None


def test_clock_taken_back_revives_no_package(state: State) -> None:
    late = NOW + 60 * DAY
    state.accept(_trusted(state, NOW + DAY // 2), now_ms=late)
    state.set_clock(NOW)
    last = state.accepted("hello")
    assert last is not None
    assert last.serial == NOW
    with pytest.raises(errors.SerialError, match="older"):
        _trusted(state, NOW - 1)
    state.accept(_trusted(state, NOW + 1), now_ms=NOW)


def test_refused_row_leaves_the_clock(state: State) -> None:
    late = NOW + 60 * DAY
    state.accept(_trusted(state, NOW), now_ms=late)

    def full(ahead: ClockAhead) -> None:
        raise errors.LedgerError("no space")

    with pytest.raises(errors.LedgerError):
        state.set_clock(NOW, before=full)
    assert state.greatest_time_ms() == late


def test_clock_of_dev_is_taken_back(state: State) -> None:
    late = NOW + 60 * DAY
    with state.dev("hello") as dev:
        dev.init_root(ROOT, NOW)
        dev.accept(_trusted(dev, NOW), now_ms=late)
    assert state.clock_ahead(NOW) == ClockAhead(late, ())
    state.set_clock(NOW)
    with state.dev("hello") as dev:
        assert dev.greatest_time_ms() == NOW
