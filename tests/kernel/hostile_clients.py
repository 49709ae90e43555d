"""Requests of a malicious client to the supervisor; run as another user, prints one JSON document of the answers.

    python3 hostile_clients.py SOCKET PLACE

PLACE is a directory of that user with the files for the descriptors. Standard library alone: the user reads no clone.
"""

import array
import concurrent.futures
import fcntl
import json
import os
import random
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

SOCKET, PLACE = sys.argv[1:3]
DEEP = b"[" * 200_000


def connected() -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.settimeout(60)
    made.connect(SOCKET)
    return made


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def rest(sock: socket.socket) -> Any:
    """Return the supervisor's answer up to its close: a frame's code, or a word."""
    raw = b""
    try:
        while part := sock.recv(65536):
            raw += part
    except ConnectionError:
        raw += b""
    said = []
    while len(raw) >= 4:
        (size,) = struct.unpack(">I", raw[:4])
        document = json.loads(raw[4 : 4 + size])
        raw = raw[4 + size :]
        said.append(document)
    told = [one for one in said if one["kind"] != "state"]
    if not told:
        return "closed"
    return told[0].get("code") or told[0]["kind"], told[0].get("message", "")


def sent(data: bytes, fds: Sequence[int] = (), end: bool = False) -> Any:
    with connected() as sock:
        try:
            if fds:
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))]
                sock.sendmsg([data], rights)
            elif data:
                sock.sendall(data)
            if end:
                sock.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # it said no and closed before it had all
        return rest(sock)


def run(fds: Sequence[int], **fields: Any) -> Any:
    return sent(framed(json.dumps({"kind": "run", "text": "hi", **fields}).encode()), fds)


def opened(name: str, flags: int = os.O_RDONLY) -> int:
    return os.open(os.path.join(PLACE, name), flags)


def frames() -> Any:
    """Send bytes that are no request."""
    body = json.dumps({"kind": "run", "text": "hi"}).encode()
    return {
        "nothing": sent(b"", end=True),
        "half a length": sent(b"\0\0", end=True),
        "half a body": sent(framed(body)[:-3], end=True),
        "length of 4 GiB": sent(b"\xff\xff\xff\xff" + b"x" * 1000),
        "length of nothing": sent(framed(b"")),
        "no JSON": sent(framed(b"\x00\x01\x02")),
        "no UTF-8": sent(framed(b'{"kind": "\xff"}')),
        "no object": sent(framed(b"[]")),
        "deep": sent(framed(DEEP)),
        "millions of objects": sent(framed(b'{"kind": "run", "x": [' + b"{}," * 1_300_000 + b"{}]}")),
        "300,000 keys": sent(framed(b'{"kind": "ps", ' + b",".join(b'"%d":0' % n for n in range(300_000)) + b"}")),
        "texts of four bytes": sent(framed(b'{"kind": "ps", "x": [' + b'"\xf0\x9f\x98\x80",' * 500_000 + b"0]}")),
        "deep in a field": sent(framed(b'{"kind": "run", "text": ' + DEEP + b"]" * len(DEEP) + b"}")),
        "a key twice": sent(framed(b'{"kind": "ps", "kind": "run", "text": "hi"}')),
        "an unknown kind": sent(framed(b'{"kind": "run\\u001b[31m"}')),
        "a kind that is none": sent(framed(b'{"kind": 3}')),
        "an unknown field": sent(framed(b'{"kind": "run", "text": "hi", "parent": "x"}')),
        "an issuer of its own": sent(framed(b'{"kind": "run", "text": "hi", "issuer": {"display": "operator@local"}}')),
        "a package by name": sent(framed(b'{"kind": "run", "text": "hi", "package": "/etc"}')),
        "a float": sent(framed(b'{"kind": "run", "text": "hi", "timeout_ms": 1e9}')),
        "NaN": sent(framed(b'{"kind": "run", "text": "hi", "timeout_ms": NaN}')),
        "no time": sent(framed(b'{"kind": "run", "text": "hi", "timeout_ms": 0}')),
        "an integer of a mile": sent(framed(b'{"kind": "run", "timeout_ms": ' + b"9" * 100_000 + b"}")),
        "another type": sent(framed(b'{"kind": "run", "text": ["hi"]}')),
        "a lone surrogate": sent(framed(b'{"kind": "run", "text": "\\ud800"}'), [opened(".")]),
        "a request and more": sent(framed(body) + framed(body), [opened("package")]),
    }


def descriptors() -> Any:
    """Send descriptors that are no directory, or a directory that their holder may not read."""
    reader, _ = os.pipe()
    gone = os.path.join(PLACE, "gone")
    os.mkdir(gone)
    deleted = os.open(gone, os.O_RDONLY)
    os.rmdir(gone)
    found = {
        "none": run([]),
        "two": run([opened("package"), opened("package")]),
        "three": run([opened("package")] * 3),
        "as many as there may be": run([opened("package")] * 253),
        "a file": run([opened("package/main.py")]),
        "a pipe": run([reader]),
        "a socket": run([connected().detach()]),
        "by path alone": run([opened("package", os.O_PATH)]),
        "root's own by path": run([os.open("/root", os.O_PATH)]),
        "one that is gone": run([deleted]),
        "of the kernel": run([os.open("/proc/self", os.O_RDONLY)]),
        "its own descriptors": run([os.open("/proc/self/fd", os.O_RDONLY)]),
        "of everybody": run([os.open("/", os.O_RDONLY)]),
        "what it may not read in it": run([opened("mixed")]),
        "a link in it": run([opened("linked")]),
        "a fifo in it": run([opened("fifo")]),
        "with a request of another kind": sent(framed(b'{"kind": "ps"}'), [opened("package")]),
        "who an agent becomes": run([opened("package")], user="root"),
    }
    with connected() as sock:
        # Not with the first byte: the kernel drops descriptors that the receiver did not ask for.
        request = framed(json.dumps({"kind": "run", "text": "hi"}).encode())
        sock.sendall(request[:10])
        time.sleep(0.1)
        sock.sendmsg([request[10:]], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [opened("package")]))])
        found["late"] = rest(sock)
    return found


def moving() -> Any:
    """A package that changes while it is read: twelve times, and what was said each time."""
    stop = threading.Event()
    target = os.path.join(PLACE, "moving", "main.py")
    other = os.path.join(PLACE, "moving-other")

    def change() -> None:
        while not stop.is_set():
            with open(other, "wb") as file:
                file.write(os.urandom(200_000))
            os.replace(other, target)
            os.unlink(target)
            os.symlink("/etc/shadow", target)
            os.unlink(target)
            os.mkfifo(target)
            os.unlink(target)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        return sorted({run([opened("moving")])[0] for _ in range(12)})
    finally:
        stop.set()
        thread.join()


def slow(seconds: float) -> Any:
    """A frame of which a byte comes now and then: what was said, and after how long."""
    begin = time.monotonic()
    with connected() as sock:
        data = framed(json.dumps({"kind": "run", "text": "hi" * 1000}).encode())
        for at in range(len(data)):
            try:
                sock.sendall(data[at : at + 1])
            except OSError:
                break
            time.sleep(0.2)
            if time.monotonic() - begin > seconds:
                break
        return rest(sock)[0]


def flood(count: int) -> Any:
    """Connections that say nothing: what each was told, by how often."""
    held: list[socket.socket] = []
    told: dict[str, int] = {}
    for _ in range(count):
        try:
            held.append(connected())
        except OSError as e:
            told[type(e).__name__] = told.get(type(e).__name__, 0) + 1
    time.sleep(0.5)
    for sock in held:
        sock.settimeout(30)
        said = rest(sock)
        word = said if isinstance(said, str) else said[0]
        told[word] = told.get(word, 0) + 1
        sock.close()
    return told


def deaf(count: int) -> Any:
    """Send requests and read no answer; send half requests and never end them."""
    held = []
    for index in range(count):
        sock = connected()
        held.append(sock)
        body = framed(json.dumps({"kind": "run", "text": "hi"}).encode())
        try:
            if index % 2:
                sock.sendall(body[:20])
            else:
                sock.sendmsg([body], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [opened("package")]))])
        except OSError:
            pass
    time.sleep(1)
    return len(held)


def again() -> Any:
    """Repeat a question, each time on a new connection with an extra part that the server might keep.

    Return the answers.
    """
    body, found = framed(b'{"kind": "ps"}'), []
    for beside in ("nothing", "descriptors that nobody takes", "its own other end", "more than was asked"):
        with connected() as sock:
            sock.sendall(body)
            held = [sock.fileno()] if beside == "its own other end" else [opened("package"), *os.pipe()]
            try:
                if "descriptors" in beside or "own" in beside:
                    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", held))]
                    sock.sendmsg([b"x"], rights)
                elif beside != "nothing":
                    sock.sendall(body * 2)
            except OSError:
                pass  # it was answered and closed before
            said = rest(sock)
            found.append(said if isinstance(said, str) else said[0])
            for fd in held[1:]:
                os.close(fd)
    return found


def owned() -> Any:
    """Make the supervisor's processes owners of our descriptors, so that readable data kills them (F_SETSIG, fcntl(2)).

    Return how many processes were tried, and the fate of our own child, on which it works.
    """
    child = os.fork()
    if not child:
        signal.pause()
    with connected() as sock:
        main: int = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]
    with open(f"/proc/{main}/task/{main}/children") as file:
        pids = [child, main, *map(int, file.read().split())]
    for pid in pids:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            fcntl.fcntl(ours, fcntl.F_SETOWN, pid)
            fcntl.fcntl(ours, fcntl.F_SETSIG, signal.SIGKILL)
            fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)
            theirs.send(b"x")
    return len(pids) - 1, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def leased() -> Any:
    """Lease a file of the package: an open then waits until we release the lease, or for the kernel's patience.

    Return the answer, its time in seconds, and the answer after the release.
    """
    file = opened("package/main.py")
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    begin = time.monotonic()
    said = run([opened("package")])
    seconds = time.monotonic() - begin
    fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    return said, seconds, run([opened("package")])


def good() -> list[tuple[dict[str, Any], int]]:
    """A request of each kind, and how many descriptors come with it."""
    on_behalf = {"pubkey_b58": "1" * 32, "display": "somebody@somewhere"}
    return [
        ({"kind": "ps"}, 0),
        ({"kind": "top"}, 0),
        ({"kind": "operate", "operation": "kill", "run": "00000000", "tree": True, "grace_ms": 10, "reason": "no"}, 0),
        ({"kind": "logs", "run": "00000000", "offset": 3}, 0),
        ({"kind": "wait", "run": "00000000"}, 0),
        ({"kind": "run", "text": "hi", "timeout_ms": 1000, "priority": "low", "on_behalf_of": on_behalf}, 1),
        ({"kind": "check_package", "manifest_sha256": "0" * 64}, 1),
    ]


def mutated(chance: random.Random) -> tuple[bytes, int, bool]:
    """A frame with something wrong in it or about it, with so many descriptors, and whether its end is said."""
    fields, count = chance.choice(good())
    frame = bytearray(framed(json.dumps(fields).encode()))
    how, end = chance.choice(("bits", "cut", "length", "more", "descriptors", "bytes", "field")), chance.random() < 0.9
    if how == "bits":
        for _ in range(chance.choice((1, 1, 2, 8, 64))):
            frame[chance.randrange(len(frame))] ^= 1 << chance.randrange(8)
    elif how == "cut":
        del frame[chance.randrange(len(frame)) :]
    elif how == "length":
        around = len(frame) - 4 + chance.choice((-2, -1, 1, 2, 1000))
        frame[:4] = struct.pack(
            ">I", chance.choice((around, 0, 1, 1 << 22, (1 << 22) + 1, 1 << 31, chance.getrandbits(32)))
        )
    elif how == "more":
        for _ in range(chance.choice((1, 2, 20))):
            frame += framed(json.dumps(chance.choice(good())[0]).encode())
    elif how == "descriptors":
        count = chance.choice([wrong for wrong in (0, 1, 2, 3, 9) if wrong != count])
    elif how == "bytes":
        at = chance.randrange(len(frame))
        frame[at : at + chance.choice((0, 1, 4))] = chance.randbytes(chance.choice((1, 4, 300)))
    else:
        name = chance.choice(sorted(fields))
        fields[name] = chance.choice((None, -1, 2**63, 1.5, "", "x" * 5000, [], {}, [[]] * 50, True, "\ud800", "\0"))
        frame = bytearray(framed(json.dumps(fields).encode()))
    return bytes(frame), count, end


def patient(data: bytes, count: int, end: bool) -> str:
    """Return the answer, with retries while the client is refused for too many requests or open connections."""
    for _ in range(600):
        fds = [opened("package") for _ in range(count)]
        try:
            said = sent(data, fds, end)
        finally:
            for fd in fds:
                os.close(fd)
        word: str = said if isinstance(said, str) else said[0]
        if word != "too_many_requests":
            return word
        time.sleep(0.1)
    return "never"


def mutations(count: int) -> Any:
    """So many mutations, the same each time: by what was said, how often; and what the good requests are told before
    and afterwards."""
    chance = random.Random(20_251_122)
    made = [mutated(chance) for _ in range(count)]
    controls = [(framed(json.dumps(fields).encode()), fds, False) for fields, fds in good()]
    before = [patient(*one) for one in controls]
    told: dict[str, int] = {}
    # Not all at once: what a user may have open would be all that is seen.
    with concurrent.futures.ThreadPoolExecutor(5) as pool:
        for word in pool.map(lambda one: patient(*one), made):
            told[word] = told.get(word, 0) + 1
    return before, told, [patient(*one) for one in controls]


ACTS: dict[str, Callable[[], Any]] = {
    "frames": frames,
    "descriptors": descriptors,
    "moving": moving,
    "slow": lambda: slow(20),
    "flood": lambda: flood(120),
    "deaf": lambda: deaf(6),
    "again": again,
    "owned": owned,
    "leased": leased,
    "random": lambda: mutations(300),
}

if __name__ == "__main__":
    print(json.dumps({name: ACTS[name]() for name in sys.argv[3:]}))
