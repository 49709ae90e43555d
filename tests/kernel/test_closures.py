"""Closures run: the interpreters and a compiled program start from a root that holds nothing else."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

from sandbox.config import Config
from sandbox.rootfs import closure, skeleton
from tests.kernel import skeleton_runsc

LOADER = "/usr/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Config:
    state = tmp_path_factory.mktemp("state")
    state.chmod(0o700)
    return Config(state=state)


@pytest.fixture(scope="module")
def store(config: Config) -> skeleton.Skeletons:
    return skeleton.Skeletons(config.state / "rootfs")


def _programs(root: Path) -> set[str]:
    """Everything in the root that has an execute bit."""
    found = set()
    for folder, _, names in os.walk(root):
        for name in names:
            info = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(info.st_mode) and info.st_mode & 0o111:
                found.add("/" + os.path.relpath(os.path.join(folder, name), root))
    return found


def _check_modes(root: Path) -> None:
    for folder, directories, names in os.walk(root):
        for name in (*directories, *names):
            info = os.lstat(os.path.join(folder, name))
            assert (info.st_uid, info.st_gid) == (0, 0), name
            if not stat.S_ISLNK(info.st_mode):
                assert not info.st_mode & 0o7022, f"{name}: {info.st_mode:o}"


PYTHON = """
import asyncio, bz2, ctypes, curses, dbm, decimal, hashlib, json, lzma, math, readline, sqlite3, ssl, sys, threading
import locale, unittest, urllib.request, uuid, xml.etree.ElementTree, zlib, zoneinfo, multiprocessing, email
import http.client
thread = threading.Thread(target=lambda: None)
thread.start(); thread.join()
assert locale.setlocale(locale.LC_ALL, "") == "C.UTF-8", "LANG is C.UTF-8 in every run"
base = sqlite3.connect(":memory:").execute("select 40 + 2").fetchone()[0]
print(json.dumps({
    "sqlite": base, "ssl": ssl.OPENSSL_VERSION.split()[0], "libc": ctypes.CDLL("libc.so.6").abs(-7),
    "sha": hashlib.sha256(b"x").hexdigest()[:8], "cached": json.__spec__.cached, "program": sys.executable,
    "float": decimal.Decimal("0.1") + 0 == decimal.Decimal("0.1"), "utf8": sys.stdout.encoding,
    "xml": xml.etree.ElementTree.fromstring("<a/>").tag, "compressed": len(zlib.compress(bytes(100))) < 100,
}))
"""


def test_python_starts_with_its_standard_library_and_nothing_else(config: Config, store: skeleton.Skeletons) -> None:
    found = closure.of_runtime("python3", config)
    root = skeleton_runsc.skeleton(store, found)
    done = skeleton_runsc.run(root, [found.entry, "-c", PYTHON])
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["sqlite"], answer["ssl"], answer["libc"], answer["sha"]) == (42, "OpenSSL", 7, "2d711642")
    assert answer["program"] == found.entry
    assert answer["utf8"] == "utf-8"
    assert _programs(root) == {found.entry, LOADER}
    _check_modes(root)


def test_python_takes_byte_code_of_copy(config: Config, store: skeleton.Skeletons) -> None:
    """A copy with other mtimes would compile its standard library at every start."""
    found = closure.of_runtime("python3", config)
    done = skeleton_runsc.run(skeleton_runsc.skeleton(store, found), [found.entry, "-v", "-c", "import json"])
    log, source = done.stderr.decode(), f"/usr/lib/{os.path.basename(found.entry)}/json/__init__.py"
    # The host's own Python is asked the same; a distribution without byte code has none to copy.
    host = subprocess.run([found.entry, "-v", "-c", "import json"], capture_output=True, text=True).stderr
    assert source in log
    assert (f"matches {source}" in log) == (f"matches {source}" in host)


def test_python_s_root_holds_no_package_of_distribution(config: Config, store: skeleton.Skeletons) -> None:
    found = closure.of_runtime("python3", config)
    root = skeleton_runsc.skeleton(store, found)
    probe = "import os, sys; print(sorted(os.listdir('/')), sorted(os.listdir('/usr')), sorted(os.listdir('/usr/bin')))"
    done = skeleton_runsc.run(root, [found.entry, "-c", probe])
    inside = done.stdout.decode()
    assert "'etc'" not in inside
    assert "'share'" not in inside
    assert f"['python3', '{os.path.basename(found.entry)}']" in inside
    for name in ("pip", "tkinter", "ensurepip", "test"):
        assert skeleton_runsc.run(root, [found.entry, "-c", f"import {name}"]).returncode == 1


NODE = """
const crypto = require('crypto'), zlib = require('zlib');
(async () => {
  const fs = await import('node:fs/promises');
  const { Worker } = require('worker_threads');
  const answer = await new Promise(r => new Worker('require("worker_threads").parentPort.postMessage(6 * 7)',
    { eval: true }).once('message', r));
  console.log(JSON.stringify({
    answer, sha: crypto.createHash('sha256').update('x').digest('hex').slice(0, 8), esm: typeof fs.readFile,
    intl: new Intl.NumberFormat('de').format(1234.5), gzip: zlib.gunzipSync(zlib.gzipSync('y')).toString(),
  }));
})();
"""


def test_node_starts_and_nothing_else_can(config: Config, store: skeleton.Skeletons) -> None:
    found = closure.of_runtime("node", config)
    root = skeleton_runsc.skeleton(store, found)
    done = skeleton_runsc.run(root, [found.entry, "-e", NODE])
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {
        "answer": 42,
        "sha": "2d711642",
        "esm": "function",
        "intl": "1.234,5",
        "gzip": "y",
    }
    assert _programs(root) == {found.entry, LOADER}
    _check_modes(root)


C_SOURCE = r"""
#include <math.h>
#include <pthread.h>
#include <stdio.h>
static void *work(void *x) { pthread_exit(x); }
int main(int argc, char **argv) {
    pthread_t t; void *back = 0; char line[64];
    pthread_create(&t, 0, work, argv); pthread_join(t, &back);
    if (!fgets(line, sizeof line, stdin)) return 3;
    printf("%.3f %d %s", sqrt(argc * 2.0), back == argv, line);
    return 0;
}
"""


@pytest.mark.parametrize("flags", [["-static"], ["-static-pie"], [], ["-no-pie"]], ids=" ".join)
def test_compiled_program_starts_static_and_dynamic(
    config: Config, store: skeleton.Skeletons, tmp_path: Path, flags: list[str]
) -> None:
    (tmp_path / "main.c").write_text(C_SOURCE)
    package = tmp_path / "package"
    package.mkdir()
    subprocess.run(
        ["gcc", "-O1", *flags, str(tmp_path / "main.c"), "-o", str(package / "main"), "-lm", "-pthread"], check=True
    )
    tmp_path.chmod(0o755)
    found = closure.of_elf((package / "main").read_bytes(), config, entry="/workspace/main")
    root = skeleton_runsc.skeleton(store, found)
    done = skeleton_runsc.run(root, ["/workspace/main"], binds={"/workspace": package}, stdin=b"hello\n")
    assert (done.returncode, done.stdout) == (0, b"1.414 1 hello\n"), done.stderr
    static = any("static" in f for f in flags)
    assert _programs(root) == (set() if static else {LOADER})
    assert bool(found.files) != static


def test_runsc_leaves_root_as_it_was(config: Config, store: skeleton.Skeletons) -> None:
    """runsc makes mount points that are missing in the root and leaves them; none may be missing."""
    found = closure.of_runtime("node", config)
    root = skeleton_runsc.skeleton(store, found, also=[("/srv/docs", "dir"), ("/srv/page", "file")])

    def listing() -> list[tuple[str, int, int, int]]:
        out = []
        for folder, directories, names in os.walk(root):
            for name in (*directories, *names):
                info = os.lstat(os.path.join(folder, name))
                out.append((os.path.join(folder, name), info.st_mode, info.st_mtime_ns, info.st_ino))
        return sorted(out)

    before = listing()
    binds = {"/srv/docs": Path("/usr/share/common-licenses"), "/srv/page": Path("/usr/share/common-licenses/GPL-3")}
    probe = (
        "const fs = require('fs'); console.log(fs.readdirSync('/srv/docs').length > 3, fs.statSync('/srv/page').size)"
    )
    done = skeleton_runsc.run(root, [found.entry, "-e", probe], binds=binds)
    assert done.stdout.split()[0] == b"true", done.stderr
    assert listing() == before


def test_granted_executable_joins_runtime_s_root(config: Config, store: skeleton.Skeletons) -> None:
    python = closure.of_runtime("python3", config)
    granted = closure.of_elf(Path("/usr/bin/sort"), config)
    root = skeleton_runsc.skeleton(store, python, granted)
    assert _programs(root) == {python.entry, LOADER, "/usr/bin/sort"}
    probe = "import subprocess; print(subprocess.run(['/usr/bin/sort'], input=b'b\\na\\n', capture_output=True).stdout)"
    done = skeleton_runsc.run(root, [python.entry, "-c", probe])
    assert done.stdout == b"b'a\\nb\\n'\n", done.stderr
    without = skeleton_runsc.run(skeleton_runsc.skeleton(store, python), [python.entry, "-c", probe])
    assert b"FileNotFoundError" in without.stderr
