"""Hostile clients of the supervisor: each gets an error, other clients do not notice, and no descriptor stays open."""

from __future__ import annotations

import json
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from policy import errors, json_bounds
from sandbox import unix_wire
from sandbox.serve.api import client
from tests.kernel import serving
from tests.kernel.conftest import leftovers
from tests.kernel.serving import CALLER, STRANGER, Served
from tests.kernel.world import World

OPEN, SECONDS = 8, 2
CLIENTS = Path(__file__).with_name("hostile_clients.py")
SECRET = "the-name-of-a-secret"


@pytest.fixture(scope="module")
def served(warm: Path) -> Iterator[Served]:
    with (
        serving.open_place() as base,
        Served(World(base, warm=warm), caller_requests=OPEN, request_seconds=SECONDS) as made,
    ):
        _furnish(base / "place", made)
        yield made
        made.quiet()
        assert leftovers(made.world) == []


def _furnish(place: Path, served: Served) -> None:
    """Return the files of the hostile client's descriptors. It owns all but two of them."""
    place.mkdir()
    for name in ("package", "moving", "mixed", "linked", "fifo"):
        (place / name).mkdir()
        (place / name / "agent.toml").write_text("no = 1\n")
        (place / name / "main.py").write_text("print(1)\n")
    (place / "linked" / "shadow").symlink_to("/etc/shadow")
    os.mkfifo(place / "fifo" / "pipe")
    for path in (place, *place.rglob("*")):
        os.chown(path, CALLER, CALLER, follow_symlinks=False)
    others = place / "mixed" / "others"
    others.mkdir(mode=0o700)
    (others / SECRET).write_text("of root alone")


def attacked(served: Served, *acts: str, uid: int = CALLER, seconds: float = 120) -> dict[str, Any]:
    """Return the answer to the hostile client."""
    source = served.world.base / "hostile_clients.py"
    source.write_text(CLIENTS.read_text())
    done = subprocess.run(
        ["/usr/bin/python3", str(source), str(served.path), str(served.world.base / "place"), *acts],
        env={"PATH": "/usr/bin:/bin"}, cwd="/", capture_output=True, text=True, timeout=seconds,
        **serving.identity(uid),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def unharmed(served: Served) -> Iterator[None]:
    """Afterwards the supervisor has as many descriptors as before, no keeper, and serves."""
    with served.connected() as sock:  # it listens before it has opened all that it serves with
        client.ask(sock, "ps")
    served.alone()
    before, pid = served.descriptors(), served.pid
    yield
    served.alone()
    until = time.monotonic() + 60
    while served.descriptors() != before:
        assert time.monotonic() < until, sorted(os.listdir(f"/proc/{pid}/fd"))
        time.sleep(0.05)
    with served.connected() as sock:
        assert client.ask(sock, "ps")["kind"] == "runs"
    assert leftovers(served.world) == []


@pytest.mark.usefixtures("unharmed")
def test_what_is_no_request_is_refused_by_name(served: Served) -> None:
    rows = len(served.world.rows())
    heard = attacked(served, "frames")["frames"]
    assert heard.pop("nothing") == "closed"
    # Read with the package: the manifest of this one is none.
    assert heard.pop("a request and more")[0] != "answer"
    assert heard.pop("a lone surrogate")[0] == "bad_request"
    assert {name: said[0] for name, said in heard.items()} == dict.fromkeys(heard, "bad_request")
    assert all(said[1].isprintable() and len(said[1]) < 300 for said in heard.values())
    # What is no request leaves nothing in the log: it would be for anybody to fill.
    assert len(served.world.rows()) <= rows + 2


@pytest.mark.usefixtures("unharmed")
def test_request_of_too_many_values_is_answered(served: Served) -> None:
    """The process of a request ended by SIGABRT, without an answer (RLIMIT_DATA, sandbox.serve.api.rlimits)."""

    def answer(raw: bytes) -> Any:
        with served.connected() as sock:
            sock.settimeout(60)
            sock.sendall(unix_wire.LENGTH.pack(len(raw)) + raw)
            said = unix_wire.receive(sock, max_bytes=unix_wire.ANSWER_BYTES, until=None)
        assert said is not None, "no answer"
        return json.loads(said)

    def keys(count: int) -> bytes:
        return b'{"kind":"ps",' + b",".join(b'"%d":0' % n for n in range(count)) + b"}"

    most = json_bounds.REQUEST_VALUES
    for raw in (keys(300_000), keys(most - 1), b'{"kind":"ps","x":[' + b"[]," * 1_000_000 + b"0]}"):
        told = answer(raw)
        assert (told["code"], told["message"]) == (
            "bad_request", f"the request is refused: made of more than {most} values",
        )  # fmt: skip
    # The control: one value less is read, and refused for what it says.
    assert answer(keys(most - 2))["message"] == "the request is refused: `0`: extra inputs are not permitted"
    # What is counted may be in a text, as much of it as there may be.
    text = ',[{"' * 100_000
    done = served.run(served.world.sign(served.world.copy("hello")), text)
    assert done.error is None
    assert done.result is not None


@pytest.mark.usefixtures("unharmed")
def test_descriptors_are_taken_for_what_their_holder_may_read(served: Served) -> None:
    heard = attacked(served, "descriptors")["descriptors"]
    wrong = ("none", "two", "three", "as many as there may be", "a file", "a pipe", "a socket", "by path alone",
             "root's own by path", "with a request of another kind", "late")  # fmt: skip
    assert {name: heard[name][0] for name in wrong} == dict.fromkeys(wrong, "bad_request")
    assert heard["who an agent becomes"][0] == "not_a_caller"
    # None of the others ran, and no answer names a path that its client cannot see.
    assert "answer" not in {said[0] for said in heard.values()}
    assert SECRET not in json.dumps(heard)
    assert "`others` cannot be read" in heard["what it may not read in it"][1]
    assert "Permission denied" in heard["what it may not read in it"][1]
    assert "shadow" in heard["a link in it"][1]
    # The control: root's own request may read it, and says so.
    place = served.world.base / "place" / "mixed"
    with pytest.raises(errors.CovenantError) as told:
        served.run(place)
    assert "Permission denied" not in str(told.value)


@pytest.mark.usefixtures("unharmed")
def test_package_that_changes_while_it_is_read_is_refused(served: Served) -> None:
    assert set(attacked(served, "moving")["moving"]) <= {
        "package_invalid", "package", "unsigned", "digest_mismatch", "manifest_invalid", "package_unreadable",
    }  # fmt: skip


@pytest.mark.usefixtures("unharmed")
def test_frame_that_does_not_come_is_not_waited_for(served: Served) -> None:
    begin = time.monotonic()
    assert attacked(served, "slow")["slow"] == "bad_request"
    assert time.monotonic() - begin > SECONDS - 1


@pytest.mark.usefixtures("unharmed")
def test_bytes_after_request_stay_with_its_worker(served: Served) -> None:
    before = served.alone()
    opened = len(os.listdir(f"/proc/{before}/fd"))
    heard = attacked(served, "again")["again"]
    assert (heard[0], set(heard)) == ("runs", {"runs"})
    after = served.alone()
    assert after != before
    assert len(os.listdir(f"/proc/{after}/fd")) == opened


@pytest.mark.usefixtures("unharmed")
def test_no_descriptor_of_client_s_sends_signal_to_whoever_serves(served: Served) -> None:
    waits, main = served.alone(), served.pid
    tried, child = attacked(served, "owned")["owned"]
    assert tried >= 2
    assert child == -9  # the control: its own it kills so
    assert served.process is not None
    assert served.process.poll() is None
    assert (served.pid, waits in served.waiting()) == (main, True)


@pytest.mark.usefixtures("unharmed")
def test_leased_package_is_waited_for_no_longer_than_any(served: Served) -> None:
    said, seconds, control = attacked(served, "leased")["leased"]
    assert said[0] == "package_invalid"
    assert "cannot be read" in said[1]
    assert seconds < 30  # the kernel's patience is 45
    assert control[0] == "unsigned"


@pytest.mark.usefixtures("unharmed")
def test_flood_of_one_user_stops_no_other(served: Served) -> None:
    heard: dict[str, Any] = {}
    thread = threading.Thread(target=lambda: heard.update(attacked(served, "flood")["flood"]))
    thread.start()
    answered = 0
    try:
        while thread.is_alive():
            with served.connected() as sock:
                answered += client.ask(sock, "ps")["kind"] == "runs"
    finally:
        thread.join()
    assert answered
    # As many as may be open wait until their time is over; the rest are told at once.
    assert heard["too_many_requests"] >= 120 - 2 * OPEN
    assert heard["bad_request"] >= OPEN
    assert set(heard) == {"too_many_requests", "bad_request"}


@pytest.mark.usefixtures("unharmed")
def test_stranger_gets_one_word_whatever_they_send(served: Served) -> None:
    rows = len(served.world.rows())
    heard = attacked(served, "frames", "flood", uid=STRANGER)
    assert {said[0] for said in heard["frames"].values()} == {"not_a_caller"}
    assert heard["flood"] == {"not_a_caller": 120}
    assert len(served.world.rows()) == rows


@pytest.mark.usefixtures("unharmed")
def test_who_does_not_listen_costs_nothing_that_stays(served: Served) -> None:
    time.sleep(1)  # the flood took what one user may ask in a second
    assert attacked(served, "deaf") == {"deaf": 6}


def test_whoever_listens_is_root_or_is_told_nothing(served: Served) -> None:
    """A client that is told the socket of another user sends nothing there."""
    code = (
        "import os, socket, sys\n"
        "s = socket.socket(socket.AF_UNIX); s.bind(sys.argv[1]); os.chmod(sys.argv[1], 0o777); s.listen()\n"
        "print('up', flush=True)\n"
        "c, _ = s.accept(); c.settimeout(20); print(len(c.recv(100)), flush=True)\n"
    )
    place = served.world.base / "place" / "false.sock"
    with subprocess.Popen(
        ["/usr/bin/python3", "-c", code, str(place)], stdout=subprocess.PIPE, text=True, **serving.identity(CALLER)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        done = serving.covenant(
            "run", str(served.world.base / "place" / "package"), "x", "--json",
            served=served, environment={"COVENANT_SOCKET": str(place)},
        )  # fmt: skip
        assert json.loads(done.stdout)["code"] == "supervisor_untrusted"
        assert process.stdout.readline() == "0\n"


@pytest.mark.usefixtures("unharmed")
def test_three_hundred_requests_with_something_wrong_are_each_answered(served: Served) -> None:
    """By an error or an end, or as what they still are: a mutation may leave a good request good. The last test here:
    it takes all that a user may ask in a second, and waits for more."""
    log = served.log()
    before, told, after = attacked(served, "random")["random"]
    # The controls are one of each kind.
    assert before == after == ["runs", "top", *["no_such_run"] * 3, *["unsigned"] * 2]
    # No fault of the supervisor's own (`internal`) is among them, and none that only its log tells of.
    assert set(told) == {"bad_request", "closed", *before}
    assert (sum(told.values()), served.log()) == (300, log)
    assert told["bad_request"] > 200
