"""Starting a program in a child and telling a refusal from a run."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from elf import EXIT_STATUS
from harness import Blocked

_EXEC_FAILED = 111
_LOADERS = ("/lib64/ld-linux-x86-64.so.2", "/lib/ld-linux-aarch64.so.1")


def in_child(start: Callable[[], object]) -> str:
    """Call `start`, which should become another program, in a child without outputs.

    Raises:
        OSError: that `start` raised.
        Blocked: the program started and ended with a status that it never gives by itself.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(OSError):
            silence = os.open("/dev/null", os.O_WRONLY)
            os.dup2(silence, 1)
            os.dup2(silence, 2)
        try:
            start()
        except OSError as error:
            os.write(writer, str(error.errno).encode())
        finally:
            os._exit(_EXEC_FAILED)
    os.close(writer)
    error_number = os.read(reader, 16)
    os.close(reader)
    _, status = os.waitpid(child, 0)
    if error_number:
        raise OSError(int(error_number), os.strerror(int(error_number)))
    if os.WIFSIGNALED(status):
        raise Blocked(f"started, but ended by signal {os.WTERMSIG(status)}")
    if os.WEXITSTATUS(status) not in (0, EXIT_STATUS):
        raise Blocked(f"started, but ended with status {os.WEXITSTATUS(status)}")
    return "the program ran"


def run(path: str | int, *arguments: str) -> str:
    """`in_child` of an execve (or fexecve, for a descriptor) with `arguments` and no environment."""
    return in_child(lambda: os.execve(path, [str(path), *arguments], {}))


def written(name: str, content: bytes) -> str:
    """Write an executable file to /tmp and give its path."""
    path = f"/tmp/{name}-{os.getpid()}"
    with open(path, "xb") as file:
        file.write(content)
    os.chmod(path, 0o755)
    return path


def memory_file(content: bytes) -> int:
    """A descriptor of an anonymous file, which lies on no mount and so under no mount flag."""
    descriptor = os.memfd_create("program", 0)
    os.write(descriptor, content)
    return descriptor


def loader() -> str:
    """The dynamic loader of this architecture.

    Raises:
        FileNotFoundError: there is none in the root.
    """
    for path in _LOADERS:
        if os.path.exists(path):
            return path
    raise FileNotFoundError(2, "no dynamic loader")
