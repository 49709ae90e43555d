"""A daemon that is killed while it brings memory.db to its version: the next one opens it, with every record."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from covenant.stores.memory.schema import VERSION
from tests.memory_kit import ALICE, V1_SCHEMA, name, opened

pytestmark = pytest.mark.anyio

RECORDS = 40

# One process for all: each kill takes a child of it, which has everything imported. `at` is the statement after which
# it dies, or of those that do much, within which.
MIGRATE = """
import os, pathlib, shutil, signal, sys
import aiosqlite, anyio
from covenant.stores.memory.durable import DurableMemory

source, aim = map(pathlib.Path, sys.argv[1:])
execute = aiosqlite.Connection.execute
count = 0

def migrate(path, at, when):
    async def counted(self, *given):
        global count
        count += when == "after" or given[0].startswith(("INSERT", "CREATE INDEX", "COMMIT"))
        if count == at and when == "within":
            await self.set_progress_handler(lambda: os.kill(os.getpid(), signal.SIGKILL), 40)
        done = await execute(self, *given)
        if count == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return done

    aiosqlite.Connection.execute = counted
    async def go():
        await (await DurableMemory.open(path, space="test")).close()
    anyio.run(go)

for when in ("within", "after"):
    for at in range(1, 100):
        path = aim / f"{when}-{at}.db"
        shutil.copy(source, path)
        child = os.fork()
        if not child:
            try:
                migrate(path, at, when)
            finally:
                os._exit(1 if sys.exc_info()[1] else 0)
        _, status = os.waitpid(child, 0)
        print(path.name, os.WTERMSIG(status) if os.WIFSIGNALED(status) else -os.WEXITSTATUS(status), flush=True)
        if not os.WIFSIGNALED(status):
            break
"""


def old_database(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as db:
        db.executescript(V1_SCHEMA)
        db.executemany(
            "INSERT INTO memories VALUES (?, 'working', ?, ?, ?, X'', 'null', ?, NULL)",
            [(name(n), ALICE.display, ALICE.pubkey, f"text word{n}", n) for n in range(RECORDS)],
        )
        db.commit()
    path.chmod(0o600)


@pytest.mark.parametrize("version", [0, 1])
async def test_migration_killed_loses_nothing(tmp_path: Path, clone: Path, version: int) -> None:
    source, aim = tmp_path / "memory.db", tmp_path / "killed"
    aim.mkdir()
    old_database(source)
    if version == 1:
        async with opened("durable", source):
            pass
        with contextlib.closing(sqlite3.connect(source)) as db:
            db.execute("DROP INDEX memories_by_owner")
            db.execute("PRAGMA user_version = 1")
            db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    done = subprocess.run(
        [sys.executable, "-c", MIGRATE, str(source), str(aim)],
        capture_output=True,
        text=True,
        cwd=clone,
        env={**os.environ, "PYTHONPATH": str(clone)},
        check=True,
    )
    ends = {one: int(how) for one, how in (line.split() for line in done.stdout.splitlines())}
    assert set(ends.values()) == {signal.SIGKILL, 0}, done.stderr
    # Every statement of it was one that it was killed at, and of each kind there is one that came through.
    assert sum(how == signal.SIGKILL for how in ends.values()) >= (18 if version == 0 else 8)
    assert len([how for how in ends.values() if how == 0]) == 2
    before = set()
    for one in ends:
        path = aim / one
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            before.add(db.execute("PRAGMA user_version").fetchone()[0])
        async with opened("durable", path) as store:
            assert {found.id for found in await store.recent(None, 2 * RECORDS)} == set(map(name, range(RECORDS)))
            hits = await store.search((), f"word{RECORDS - 1}", None, 9, None, owner=ALICE.pubkey)
            assert [hit.record.id for hit in hits] == [name(RECORDS - 1)]
        with contextlib.closing(sqlite3.connect(path)) as db:
            assert db.execute("PRAGMA user_version").fetchall() == [(VERSION,)]
    # All of it or nothing: no file was in between.
    assert before == {version, VERSION}
