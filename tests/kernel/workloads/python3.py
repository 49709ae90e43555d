"""The work of an honest Python agent with the standard library: the profile `python3` must allow all of it.

It is run inside gVisor with and without the filter, and once under strace when the profile grows. Each step prints its
name when it is done; the last line is `done`. It needs /tmp and nothing else.
"""

import asyncio
import bz2
import concurrent.futures
import ctypes
import faulthandler
import fcntl
import gc
import glob
import gzip
import hashlib
import json
import lzma
import mmap
import os
import pathlib
import resource
import select
import selectors
import shutil
import signal
import socket
import sqlite3
import ssl
import sys
import tempfile
import threading
import time
import urllib.request
import zoneinfo

SCRATCH = pathlib.Path(tempfile.mkdtemp())


def threads() -> None:
    workers = [threading.Thread(target=time.sleep, args=(0.01,)) for _ in range(8)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert sum(pool.map(lambda x: x * x, range(50))) == 40425
    rung = threading.Event()
    threading.Timer(0.01, rung.set).start()
    assert rung.wait(5)


def event_loop() -> None:
    async def main() -> int:
        queue: asyncio.Queue[int] = asyncio.Queue()

        async def produce() -> None:
            for number in range(10):
                await queue.put(number)
                await asyncio.sleep(0.001)

        producer = asyncio.create_task(produce())
        total = sum([await queue.get() for _ in range(10)])
        await producer
        await asyncio.to_thread(time.sleep, 0.001)
        loop = asyncio.get_running_loop()
        rung = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, rung.set)
        os.kill(os.getpid(), signal.SIGUSR1)
        await rung.wait()
        reader = asyncio.StreamReader()
        source, sink = os.pipe()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(source, "rb"))
        os.write(sink, b"line\n")
        assert await reader.readline() == b"line\n"
        os.close(sink)
        return total

    assert asyncio.run(main()) == 45


def databases() -> None:
    for path in (":memory:", SCRATCH / "data.db"):
        database = sqlite3.connect(path)
        database.execute("pragma journal_mode=wal")
        database.execute("create table t(a, b)")
        database.executemany("insert into t values(?, ?)", [(i, str(i)) for i in range(1000)])
        database.commit()
        assert database.execute("select sum(a) from t").fetchone()[0] == 499500
        database.execute("vacuum")
        database.close()


def digests_and_archives() -> None:
    data = os.urandom(1 << 16) * 4
    for module in (gzip, bz2, lzma):
        assert module.decompress(module.compress(data)) == data
    for name in hashlib.algorithms_guaranteed:
        assert hashlib.new(name, data).block_size
    hashlib.scrypt(b"p", salt=b"s" * 16, n=1024, r=8, p=1)
    assert json.loads(json.dumps({"a": [1, 2.5, None]})) == {"a": [1, 2.5, None]}


def tls_and_socketpairs() -> None:
    ssl.create_default_context()
    ssl.RAND_bytes(16)
    assert urllib.request.Request("https://example.org/").host == "example.org"
    left, right = socket.socketpair()
    left.sendall(b"hi")
    assert right.recv(2) == b"hi"
    left.close()
    right.close()


def files() -> None:
    path = SCRATCH / "a"
    path.write_text("x" * 100_000)
    path = path.rename(SCRATCH / "b")
    (SCRATCH / "d").mkdir()
    (SCRATCH / "s").symlink_to("b")
    (SCRATCH / "s").readlink()
    os.link(path, SCRATCH / "l")
    os.chmod(path, 0o600)
    os.utime(path, (1, 1))
    os.truncate(path, 10)
    os.chown(path, -1, -1)
    shutil.copy2(path, SCRATCH / "c")
    shutil.copytree(SCRATCH, f"{SCRATCH}2", symlinks=True)
    assert list(os.walk(SCRATCH))
    assert glob.glob(f"{SCRATCH}/**", recursive=True)
    assert shutil.disk_usage(SCRATCH).total
    with open(SCRATCH / "m", "w+b") as file:
        number = file.fileno()
        file.truncate(8192)
        with mmap.mmap(number, 8192) as mapped:
            mapped[0:3] = b"abc"
            mapped.flush()
        fcntl.flock(file, fcntl.LOCK_EX)
        fcntl.lockf(file, fcntl.LOCK_EX)
        os.fsync(number)
        os.fdatasync(number)
        os.posix_fallocate(number, 0, 16384)
        os.fchmod(number, 0o600)
        os.pwrite(number, b"x", 0)
        os.pread(number, 4, 0)
        os.writev(number, [b"a", b"b"])
        os.preadv(number, [bytearray(3)], 0)
        os.pwritev(number, [b"q"], 0)
        os.readv(number, [bytearray(4)])
        os.close(os.dup(number))
        os.close(os.dup2(number, 99))
    for kind in (tempfile.TemporaryFile, tempfile.NamedTemporaryFile, tempfile.SpooledTemporaryFile):
        with kind() as file:
            file.write(b"x")
            file.flush()
    os.mkfifo(SCRATCH / "fifo")
    os.unlink(SCRATCH / "fifo")
    os.chdir(SCRATCH)
    os.getcwd()
    os.umask(0o22)
    os.access(SCRATCH, os.R_OK)
    folder = os.open(SCRATCH, os.O_RDONLY)
    os.stat("b", dir_fd=folder)
    os.listdir(folder)
    os.fchdir(folder)
    os.close(folder)
    os.replace(SCRATCH / "c", SCRATCH / "e")
    shutil.rmtree(f"{SCRATCH}2")


def signals() -> None:
    seen = []
    for number in (signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM):
        signal.signal(number, lambda number, frame: seen.append(number))
    signal.setitimer(signal.ITIMER_REAL, 0.01)
    while signal.SIGALRM not in seen:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    signal.raise_signal(signal.SIGTERM)
    assert seen == [signal.SIGALRM, signal.SIGUSR1, signal.SIGTERM]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
    signal.pthread_kill(threading.get_ident(), signal.SIGUSR2)
    assert signal.sigwait([signal.SIGUSR2]) == signal.SIGUSR2
    signal.sigpending()
    signal.sigtimedwait([signal.SIGUSR2], 0.001)
    faulthandler.enable()


def foreign_functions() -> None:
    libc = ctypes.CDLL(None)
    assert libc.getpid() == os.getpid()
    numbers = (ctypes.c_int * 4)(3, 1, 2, 0)
    compare = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_int))
    libc.qsort(numbers, 4, 4, compare(lambda a, b: a[0] - b[0]))
    assert list(numbers) == [0, 1, 2, 3]


def descriptors_and_ids() -> None:
    os.getuid()
    os.getgid()
    os.getgroups()
    os.getresuid()
    os.getresgid()
    os.getpgid(0)
    os.getsid(0)
    os.uname()
    os.cpu_count()
    os.sched_getaffinity(0)
    os.times()
    os.getpriority(0, 0)
    os.nice(0)
    resource.getrusage(0)
    resource.setrlimit(7, resource.getrlimit(7))
    time.clock_getres(1)
    selectors.DefaultSelector().close()
    select.poll().poll(1)
    select.select([], [], [], 0.001)
    event = os.eventfd(0)
    os.eventfd_write(event, 1)
    os.eventfd_read(event)
    os.close(event)
    source, sink = os.pipe()
    os.set_blocking(source, False)
    os.write(sink, b"x")
    os.read(source, 1)
    zoneinfo.ZoneInfo("UTC")


def memory() -> None:
    blocks = [bytearray(1 << 20) for _ in range(64)]
    del blocks
    gc.collect()
    with mmap.mmap(-1, 1 << 20) as mapped:
        mapped.resize(1 << 21)
        mapped.madvise(mmap.MADV_DONTNEED)


def forks() -> None:
    child = os.fork()
    if child == 0:
        os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3


for step in (
    threads,
    event_loop,
    databases,
    digests_and_archives,
    tls_and_socketpairs,
    files,
    signals,
    foreign_functions,
    descriptors_and_ids,
    memory,
    forks,
):
    step()
    print(step.__name__)
print("done")
sys.stdout.flush()
