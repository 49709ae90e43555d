"""The store of volumes below COVENANT_STATE. A process that is killed at any step leaves before or after.

volumes/NAME/record.json          whose volume it is
volumes/NAME/image.ext4           the file system
volumes/NAME/snapshots/S.ext4     copies of it
volumes/NAME/lock                 shared by runs that have it mounted, and held alone by a verb that changes it
volumes/NAME/mounts               held for a moment by a run that mounts it
volumes/.lock                     held by a verb that makes or removes a volume
volumes/.making.*, .removing.*    what a killed verb left; the next one removes it
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from policy import errors
from policy.manifest import text
from policy.manifest.permissions import VOLUME_NAME
from sandbox.volumes import image

RECORD, IMAGE, LOCK, MOUNTS, SNAPSHOTS, SUFFIX = "record.json", "image.ext4", "lock", "mounts", "snapshots", ".ext4"
LEAST_MB: Final = 8
MOST_MB: Final = 16 * 1024 * 1024
# A mount that a run has left goes a moment later.
_LEAVING_SECONDS: Final = 5.0
Log = Callable[[], None]


class VolumeRecord(Struct, frozen=True):
    """``owner`` is the uid whose runs may use the volume, beside those of root."""

    owner: int
    created_ms: int


class Snapshot(Struct, frozen=True):
    """A copy of a volume: its name, its size, and the MiB that it takes on the host."""

    name: str
    mb: int
    taken_mb: int


class Volume:
    """One volume of the store."""

    def __init__(self, path: Path) -> None:
        self.path, self.name, self.image = path, path.name, path / IMAGE

    @property
    def mb(self) -> int:
        """The size of its image in MiB: its quota."""
        return self.image.stat().st_size // image.MIB

    def record(self) -> VolumeRecord:
        """Return its record.

        Raises:
            errors.VolumeError: it is damaged.
        """
        try:
            return msgspec.json.decode((self.path / RECORD).read_bytes(), type=VolumeRecord)
        except (OSError, msgspec.MsgspecError) as e:
            raise errors.VolumeError(f"the volume `{self.name}` is damaged: {e}") from e

    def snapshots(self) -> list[Snapshot]:
        """Return its snapshots by name."""
        found = sorted((self.path / SNAPSHOTS).glob(f"*{SUFFIX}"))
        return [
            Snapshot(one.name.removesuffix(SUFFIX), info.st_size // image.MIB, info.st_blocks * 512 // image.MIB)
            for one in found
            if not one.name.startswith(".")
            for info in [one.stat()]
        ]

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Hold the volume for a run, beside other runs.

        Raises:
            errors.VolumeBusyError: a verb changes it now.
        """
        with self._locked(fcntl.LOCK_SH, "it is changed by a command now", "run it again"):
            yield

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Hold the volume for a verb that changes it: no run has it.

        Raises:
            errors.VolumeBusyError: a run has it.
        """
        wait = "covenant ps shows the runs: wait until it has ended"
        with self._locked(fcntl.LOCK_EX, "a run uses it", wait):
            until = time.monotonic() + _LEAVING_SECONDS
            # The sandbox of a killed run keeps its mount when the lock is gone.
            while image.is_attached(self.image):
                if time.monotonic() > until:
                    raise errors.VolumeBusyError(f"volume `{self.name}` is in use: it is mounted", hint=wait)
                time.sleep(0.02)
            yield

    @contextlib.contextmanager
    def mounting(self) -> Iterator[None]:
        """Hold the turn to attach and mount the image."""
        with _flock(self.path / MOUNTS, fcntl.LOCK_EX):
            yield

    @contextlib.contextmanager
    def _locked(self, operation: int, message: str, hint: str) -> Iterator[None]:
        try:
            with _flock(self.path / LOCK, operation | fcntl.LOCK_NB):
                if not (self.path / RECORD).exists():
                    raise FileNotFoundError
                yield
        except BlockingIOError:
            raise errors.VolumeBusyError(f"volume `{self.name}` is in use: {message}", hint=hint) from None
        except FileNotFoundError:
            raise missing(self.name) from None


class VolumeStore:
    """The volumes below a state."""

    def __init__(self, state: Path) -> None:
        self._top = state / "volumes"

    def create(self, name: str, mb: int, owner: int, log: Log, *, now_ms: int) -> Volume:
        """Make a volume. ``log`` is called when it is complete and not there yet.

        Raises:
            errors.VolumeError: there is one of that name, or no room.
        """
        check_name(name)
        check_size(mb)
        with self._changing():
            place = self._top / name
            if place.exists():
                raise errors.VolumeError(f"there is a volume `{name}` already", hint=f"covenant volume show {name}")
            image.check_free(self._top, mb)
            making = self._top / f".making.{name}"
            try:
                making.mkdir(mode=0o700)
                (making / SNAPSHOTS).mkdir(mode=0o700)
                (making / RECORD).write_bytes(msgspec.json.encode(VolumeRecord(owner, now_ms)))
                image.make(making / IMAGE, mb)
                image.sync(making / RECORD)
                image.sync(making)
                log()
                os.rename(making, place)
                image.sync(self._top)
            except BaseException:
                shutil.rmtree(making, ignore_errors=True)
                raise
        return Volume(place)

    def remove(self, name: str, log: Log) -> None:
        """Remove a volume with its snapshots.

        Raises:
            errors.VolumeError: there is none, or a run has it.
        """
        with self._changing():
            one = self.find(name)
            with one.alone():
                log()
                gone = self._top / f".removing.{name}"
                os.rename(one.path, gone)
                image.sync(self._top)
            shutil.rmtree(gone)

    def resize(self, name: str, mb: int, log: Log) -> Volume:
        """Give a volume another size.

        Raises:
            errors.VolumeError: there is none, a run has it, its files take more, or there is no room.
        """
        check_size(mb)

        def change(one: Volume, made: Path) -> None:
            image.check(one.image)
            image.check_free(self._top, max(mb, one.mb))
            image.copy(one.image, made)
            image.resize(made, mb)

        return self._replaced(name, change, log)

    def restore(self, name: str, snapshot: str, log: Log) -> Volume:
        """Give a volume the content and the size of a snapshot.

        Raises:
            errors.VolumeError: there is no such volume or snapshot, a run has it, or there is no room.
        """

        def change(one: Volume, made: Path) -> None:
            source = self._snapshot(one, snapshot)
            image.check_free(self._top, source.stat().st_size // image.MIB)
            image.copy(source, made)
            with _no_room():
                image.allocate(made)

        return self._replaced(name, change, log)

    def snapshot(self, name: str, snapshot: str, log: Log) -> Snapshot:
        """Copy a volume as it is. The copy has its data, and not its empty blocks.

        Raises:
            errors.VolumeError: there is no such volume, a run has it, the name is taken, or there is no room.
        """
        check_name(snapshot)
        with self._changing():
            one = self.find(name)
            with one.alone():
                target = one.path / SNAPSHOTS / f"{snapshot}{SUFFIX}"
                if target.exists():
                    raise errors.VolumeError(
                        f"volume `{name}` has a snapshot `{snapshot}` already",
                        hint=f"covenant volume rm {name} {snapshot}",
                    )
                image.check(one.image)
                image.check_free(self._top, one.mb)
                made = one.path / SNAPSHOTS / f".{snapshot}"
                self._put(made, target, lambda: image.copy(one.image, made), log)
        return next(found for found in one.snapshots() if found.name == snapshot)

    def remove_snapshot(self, name: str, snapshot: str, log: Log) -> None:
        """Remove one snapshot of a volume.

        Raises:
            errors.VolumeError: there is none.
        """
        with self._changing():
            source = self._snapshot(self.find(name), snapshot)
            log()
            source.unlink()
            image.sync(source.parent)

    def find(self, name: str, *, suggest: bool = False) -> Volume:
        """Return the volume of that name. With ``suggest`` an error has the nearest name: for root alone.

        Raises:
            errors.VolumeError: there is none, or the name is none.
        """
        check_name(name)
        if not (self._top / name / RECORD).exists():
            raise missing(name, tuple(one.name for one in self.listed()) if suggest else ())
        return Volume(self._top / name)

    def listed(self) -> list[Volume]:
        """Return the volumes by name."""
        if not self._top.exists():
            return []
        return [Volume(one) for one in sorted(self._top.iterdir()) if (one / RECORD).exists() and one.name[0] != "."]

    def recover(self) -> None:
        """Remove what killed verbs left, unless a verb is at work."""
        with contextlib.suppress(BlockingIOError, FileNotFoundError), self._turn(fcntl.LOCK_NB):
            self._sweep()

    @contextlib.contextmanager
    def _changing(self) -> Iterator[None]:
        self._top.mkdir(mode=0o700, exist_ok=True)
        with self._turn():
            self._sweep()
            yield

    def _turn(self, extra: int = 0) -> contextlib.AbstractContextManager[None]:
        return _flock(self._top / ".lock", fcntl.LOCK_EX | extra)

    def _sweep(self) -> None:
        """Remove what a killed verb left. The caller has the turn."""
        for one in self._top.iterdir():
            if one.name.startswith((".making.", ".removing.")):
                shutil.rmtree(one)
        for volume in self.listed():
            for left in (*volume.path.glob(f".{IMAGE}"), *(volume.path / SNAPSHOTS).glob(".*")):
                left.unlink()

    def _replaced(self, name: str, change: Callable[[Volume, Path], None], log: Log) -> Volume:
        """Make a new image of a volume and put it in the place of the old one."""
        with self._changing():
            one = self.find(name)
            with one.alone():
                made = one.path / f".{IMAGE}"
                self._put(made, one.image, lambda: change(one, made), log)
        return one

    def _put(self, made: Path, target: Path, make: Callable[[], None], log: Log) -> None:
        """Have a file made, and give it its name when it is complete and the row is in the log."""
        try:
            make()
            image.sync(made)
            log()
            os.rename(made, target)
            image.sync(target.parent)
        except BaseException:
            made.unlink(missing_ok=True)
            raise

    def _snapshot(self, one: Volume, snapshot: str) -> Path:
        check_name(snapshot)
        found = one.path / SNAPSHOTS / f"{snapshot}{SUFFIX}"
        if not found.exists():
            raise errors.VolumeError(
                f"volume `{one.name}` has no snapshot `{snapshot}`", hint=f"covenant volume show {one.name}"
            )
        return found


def check_name(name: str) -> None:
    """Refuse a name that no volume or snapshot has.

    Raises:
        errors.VolumeError: it is none.
    """
    if not VOLUME_NAME.fullmatch(name):
        raise errors.VolumeError(
            f"{text.quote(name)} is no name of a volume", hint="1 to 32 of a-z, 0-9 and `-`, the first no `-`"
        )


def check_size(mb: int) -> None:
    """Refuse a size that no volume has.

    Raises:
        errors.VolumeError: it is none.
    """
    if not LEAST_MB <= mb <= MOST_MB:
        raise errors.VolumeError(f"a volume has no {mb} MiB", hint=f"from {LEAST_MB} MiB to {MOST_MB >> 20} TiB")


def missing(name: str, names: tuple[str, ...] = ()) -> errors.VolumeError:
    """Return the error for a volume that is not there. ``names`` are those that are."""
    near = text.nearest(name, names)
    meant = f"did you mean `{near}`? If not: " if near else ""
    return errors.VolumeError(f"there is no volume `{name}`", hint=f"{meant}covenant volume create {name} --size 1G")


@contextlib.contextmanager
def _no_room() -> Iterator[None]:
    try:
        yield
    except OSError as e:
        raise errors.VolumeError(
            f"there is no room for the volume: {e.strerror}", hint="see the free space of COVENANT_STATE"
        ) from e


@contextlib.contextmanager
def _flock(path: Path, operation: int) -> Iterator[None]:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(fd, operation)
        yield
    finally:
        os.close(fd)
