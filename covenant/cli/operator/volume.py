"""``covenant volume``: named file systems of a size, which agents write and which outlive their runs."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from covenant.cli import common, spinner, times
from policy import errors

if TYPE_CHECKING:
    from sandbox.volumes.store import Volume, VolumeStore

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
_NAME = click.argument("name", metavar="NAME")
_UNITS = {"M": 1, "G": 1024, "T": 1024 * 1024}


class _Size(click.ParamType[int]):
    """A size such as 512M or 1G, as MiB."""

    name = "SIZE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = re.fullmatch(r"([1-9][0-9]{0,7})([MGT])", str(value))
        if found is None:
            self.fail(f"`{value}` is no size: write it as 512M, 1G or 2T", param, ctx)
        return int(found[1]) * _UNITS[found[2]]


_SIZE = click.option("--size", "mb", type=_Size(), required=True, help="Its quota: 512M, 1G or 2T.")


@click.group()
def volume() -> None:
    """Make file systems of a size that agents write to, and keep them."""


@volume.command(epilog=common.examples("covenant volume create data --size 1G"))
@_NAME
@_SIZE
@click.option("--owner", type=int, default=0, metavar="UID", help="Whose runs may use it, beside root's; default 0.")
@_JSON
def create(name: str, mb: int, owner: int, as_json: bool) -> None:
    """Make a volume. Its whole size is taken from the disk of COVENANT_STATE at once."""
    if not 0 <= owner < 2**32 - 1:
        raise errors.UsageError(f"`{owner}` is no uid", hint="give the number that `id -u NAME` prints")
    store = _store()
    with spinner.shown(f"making volume {common.visible(name)}", quiet=as_json):
        log = _log("created", name, owner, mb)
        one = store.create(name, mb, owner, log, now_ms=int(time.time() * 1000))
    _done("volume_created", one, as_json=as_json, says=f"volume {name} of {mb} MiB")


@volume.command("list", epilog=common.examples("covenant volume list", "covenant volume list --json"))
@_JSON
def list_volumes(as_json: bool) -> None:
    """List the volumes of this host."""
    found = _store().listed()
    if as_json:
        common.emit({"kind": "volumes", "volumes": [_document(one) for one in found]})
        return
    for one in found:
        owner = one.record().owner
        common.say(common.visible(f"{one.name}  {one.mb} MiB  uid {owner}  {len(one.snapshots())} snapshots"))


@volume.command(epilog=common.examples("covenant volume show data"))
@_NAME
@_JSON
def show(name: str, as_json: bool) -> None:
    """Show one volume: its size, its owner, its snapshots."""
    one = _store().find(name, suggest=True)
    if as_json:
        common.emit({"kind": "volume", **_document(one)})
        return
    record = one.record()
    common.say(f"name       {one.name}")
    common.say(f"size       {one.mb} MiB")
    common.say(f"owner      uid {record.owner}")
    common.say(f"made       {times.utc(record.created_ms)}")
    common.say(f"grant      volume:{one.name}:/PLACE")
    for snapshot in one.snapshots():
        common.say(f"snapshot   {snapshot.name}  {snapshot.mb} MiB, {snapshot.taken_mb} MiB on the disk")


@volume.command(epilog=common.examples("covenant volume resize data --size 2G"))
@_NAME
@_SIZE
@_JSON
def resize(name: str, mb: int, as_json: bool) -> None:
    """Give a volume another size. A smaller one is refused when its files take more."""
    store = _store()
    with spinner.shown(f"copying volume {common.visible(name)}", quiet=as_json):
        one = store.resize(name, mb, _log("resized", name, _owner(store, name), mb))
    _done("volume_resized", one, as_json=as_json, says=f"volume {name} of {mb} MiB")


@volume.command(epilog=common.examples("covenant volume rm data", "covenant volume rm data before"))
@_NAME
@click.argument("snapshot_name", metavar="[SNAPSHOT]", required=False)
@_JSON
def rm(name: str, snapshot_name: str | None, as_json: bool) -> None:
    """Remove a volume with its snapshots, or one snapshot. There is no way back."""
    store = _store()
    one = store.find(name, suggest=True)
    document = _document(one)
    if snapshot_name is not None:
        log = _log("snapshot_removed", name, _owner(store, name), one.mb, snapshot_name)
        store.remove_snapshot(name, snapshot_name, log)
        says = f"removed snapshot {snapshot_name} of volume {name}"
        _done("volume_snapshot_removed", one, as_json=as_json, says=says)
        return
    store.remove(name, _log("removed", name, _owner(store, name), one.mb))
    if as_json:
        common.emit({"kind": "volume_removed", **document})
    else:
        common.say(f"removed volume {name}")


@volume.command(epilog=common.examples("covenant volume snapshot data before"))
@_NAME
@click.argument("snapshot_name", metavar="SNAPSHOT")
@_JSON
def snapshot(name: str, snapshot_name: str, as_json: bool) -> None:
    """Copy a volume that no run uses, as it is now."""
    store = _store()
    one = store.find(name, suggest=True)
    with spinner.shown(f"copying volume {common.visible(name)}", quiet=as_json):
        store.snapshot(name, snapshot_name, _log("snapshot", name, _owner(store, name), one.mb, snapshot_name))
    _done("volume_snapshot", one, as_json=as_json, says=f"snapshot {snapshot_name} of volume {name}")


@volume.command(epilog=common.examples("covenant volume restore data before"))
@_NAME
@click.argument("snapshot_name", metavar="SNAPSHOT")
@_JSON
def restore(name: str, snapshot_name: str, as_json: bool) -> None:
    """Give a volume the content and the size of a snapshot. What it has now is lost."""
    store = _store()
    one = store.find(name, suggest=True)
    size = next((found.mb for found in one.snapshots() if found.name == snapshot_name), one.mb)
    with spinner.shown(f"copying snapshot {common.visible(snapshot_name)}", quiet=as_json):
        store.restore(name, snapshot_name, _log("restored", name, _owner(store, name), size, snapshot_name))
    _done("volume_restored", one, as_json=as_json, says=f"volume {name} is as in snapshot {snapshot_name}")


def _done(kind: str, one: Volume, *, as_json: bool, says: str) -> None:
    if as_json:
        common.emit({"kind": kind, **_document(one)})
    else:
        common.say(says)


def _document(one: Volume) -> dict[str, Any]:
    record = one.record()
    snapshots = [{"name": found.name, "mb": found.mb, "taken_mb": found.taken_mb} for found in one.snapshots()]
    known = {"name": one.name, "mb": one.mb, "owner": record.owner, "created_ms": record.created_ms}
    return {**known, "snapshots": snapshots}


def _owner(store: VolumeStore, name: str) -> int:
    return store.find(name, suggest=True).record().owner


def _store() -> VolumeStore:
    from sandbox.volumes.store import VolumeStore

    if os.geteuid() != 0:
        raise errors.PrivilegeError("volumes are root's", hint="run it with sudo, and give COVENANT_HOME")
    return VolumeStore(common.state())


def _log(act: str, name: str, owner: int, mb: int, snapshot_name: str | None = None) -> Callable[[], None]:
    """Return the function that writes the row of a change into the supervisor's log, before the change."""

    def log() -> None:
        from covenant.keys import identity
        from sandbox.supervisor import open_ledger

        issuer = identity.issuer(common.home())
        fields = {"act": act, "name": name, "owner": owner, "mb": mb, "snapshot": snapshot_name}
        with open_ledger(common.state()) as ledger:
            row = {"operator": identity.OPERATOR, **fields}
            ledger.append("volume_changed", row, issuer=issuer, now_ms=int(time.time() * 1000))

    return log
