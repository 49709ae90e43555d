"""Check that threads of a process share one heap of malloc, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

# Threads that live at once and allocate; then the number of heaps by malloc_info(3).
_HEAPS = """
import ctypes, sys, tempfile, threading
from sandbox import heap
if "shared" in sys.argv:
    heap.share()
libc = ctypes.CDLL(None)
meet = threading.Barrier(4)
def work():
    libc.malloc(5000)
    meet.wait()
threads = [threading.Thread(target=work) for _ in range(4)]
[one.start() for one in threads]
[one.join() for one in threads]
with tempfile.TemporaryFile("w+") as told:
    libc.fdopen.restype = ctypes.c_void_p
    stream = libc.fdopen(told.fileno(), b"w+")
    libc.malloc_info(0, ctypes.c_void_p(stream))
    libc.fflush(ctypes.c_void_p(stream))
    told.seek(0)
    print(told.read().count("<heap nr="))
"""


def _heaps(*arguments: str) -> int:
    ran = subprocess.run([sys.executable, "-c", _HEAPS, *arguments], capture_output=True, text=True, check=True)
    return int(ran.stdout)


def test_threads_share_one_heap() -> None:
    assert _heaps() > 1
    assert _heaps("shared") == 1
