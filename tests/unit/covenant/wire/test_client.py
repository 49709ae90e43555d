"""The client of the command line: errors as they were raised, and a daemon that does not speak as one."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from covenant.wire import client, frames
from policy import errors


@contextlib.contextmanager
def answering(home: Path, *answers: bytes, before: Callable[[], None] | None = None) -> Iterator[list[bytes]]:
    """A socket that reads what comes, does what it does ``before`` the first answer, says these bytes, then ends."""
    home.mkdir(mode=0o700, parents=True)
    seen: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(home / "sock"))
        listener.listen()

        def serve() -> None:
            one, _ = listener.accept()
            with one:
                for index, answer in enumerate(answers):
                    size = frames.length(one.recv(4, socket.MSG_WAITALL))
                    seen.append(one.recv(size, socket.MSG_WAITALL))
                    if before is not None and index == 0:
                        before()
                    one.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield seen
        finally:
            thread.join(30)


def frame(document: object) -> bytes:
    return frames.encode(json.dumps(document).encode())


def test_fields_none_are_left_out(covenant_home: Path) -> None:
    with answering(covenant_home, frame({"kind": "pong"})) as seen, client.opened(covenant_home) as one:
        assert one.ask("ping", a=None, b=0) == {"kind": "pong"}
    assert json.loads(seen[0]) == {"kind": "ping", "b": 0}


def test_error_is_raised_as_it_was(covenant_home: Path) -> None:
    said = errors.NoTaskError("no such task", hint="look", where="here")
    answers = answering(covenant_home, frame(said.to_json()))
    with answers, client.opened(covenant_home) as one, pytest.raises(errors.NoTaskError) as caught:
        one.ask("ping")
    assert (caught.value.message, caught.value.hint, caught.value.where) == ("no such task", "look", "here")


def test_refusal_of_a_closed_connection_is_read(covenant_home: Path) -> None:
    """As of a daemon that takes no more connections: it answers, and ends, before anything is sent."""
    covenant_home.mkdir(mode=0o700, parents=True)
    said = errors.BusyError("too many connections", hint="wait")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(covenant_home / "sock"))
        listener.listen()
        with client.opened(covenant_home) as one:
            peer, _ = listener.accept()
            peer.sendall(frame(said.to_json()))
            peer.close()
            with pytest.raises(errors.BusyError) as caught:
                one.ask("ping")
    assert caught.value.hint == "wait"


def test_error_of_version_1_has_message_alone(covenant_home: Path) -> None:
    answers = answering(covenant_home, frame({"kind": "error", "message": "no"}))
    with answers, client.opened(covenant_home) as one, pytest.raises(errors.CovenantError, match=r"^no$"):
        one.ask("ping")


@pytest.mark.parametrize(
    "answer", [b"", b"\0\0\0", frames.encode(b"x"), frames.encode(b"[]"), frames.encode(b"\xff"), b"\0\0\0\x09{"]
)
def test_what_does_not_speak_as_daemon(covenant_home: Path, answer: bytes) -> None:
    answers = answering(covenant_home, answer)
    with answers, client.opened(covenant_home) as one, pytest.raises(errors.DaemonSilentError):
        one.ask("ping")


def test_hint_of_root_home_names_option_for_root(covenant_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    covenant_home.mkdir(mode=0o700)
    for euid, owner, hint in (
        (0, 0, "start it: covenantd --allow-root"),
        (0, 1000, "start it: covenantd"),
        (1000, 0, "start it: covenantd"),
    ):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        monkeypatch.setattr(Path, "stat", lambda *_, owner=owner: os.stat_result((0, 0, 0, 0, owner, 0, 0, 0, 0, 0)))
        assert client.silent(covenant_home, FileNotFoundError(2, "absent")).hint == hint
    monkeypatch.undo()


def test_daemon_that_takes_too_long(covenant_home: Path) -> None:
    covenant_home.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(covenant_home / "sock"))
        listener.listen()
        with client.opened(covenant_home, answer_seconds=0.05) as one, pytest.raises(errors.DaemonSilentError):
            one.ask("ping")


def test_stream_ends_with_its_end_or_its_error(covenant_home: Path) -> None:
    begin = {"kind": "stream_begin", "stream_id": 0, "response_kind": "memories"}
    chunk = {"kind": "stream_chunk", "stream_id": 0, "sequence": 0, "chunk": {}}
    end = {"kind": "stream_end", "stream_id": 0, "summary": None}
    broken = {"kind": "stream_error", "stream_id": 0, "message": "the store failed"}
    answers = (frame(begin) + frame(chunk) + frame(end), frame(begin) + frame(broken), frame({"kind": "memories"}))
    with answering(covenant_home, *answers) as seen, client.opened(covenant_home) as one:
        assert list(one.stream("recent_memory")) == [begin, chunk, end]
        with pytest.raises(errors.CovenantError, match="the store failed"):
            list(one.stream("recent_memory"))
        assert list(one.stream("recent_memory")) == [{"kind": "memories"}]
    assert json.loads(seen[0])["prefer_stream"] is True


def test_home_whose_path_is_longer_than_address(covenant_home: Path) -> None:
    home = covenant_home / ("x" * 120)
    home.mkdir(parents=True)
    directory = os.open(home, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"/proc/self/fd/{directory}/sock")
        os.close(directory)
        listener.listen()
        with client.opened(home):
            pass


def test_token_that_others_can_read_is_not_used(covenant_home: Path) -> None:
    (covenant_home / "peers").mkdir(parents=True)
    token = covenant_home / "peers" / "operator.token"
    token.write_text("secret\n")
    token.chmod(0o640)
    with pytest.raises(errors.KeyFileError, match="can be read by others"):
        client.operator_token(covenant_home)
    token.chmod(0o600)
    assert client.operator_token(covenant_home) == "secret"
    token.rename(covenant_home / "elsewhere")
    token.symlink_to(covenant_home / "elsewhere")
    with pytest.raises(errors.KeyFileError):
        client.operator_token(covenant_home)


def test_what_cannot_be_sent_is_callers_mistake() -> None:
    with pytest.raises(errors.UsageError, match="Unicode"):
        client.encoded("submit_intent", {"text": "\ud800"})
    with pytest.raises(errors.UsageError, match="too long"):
        client.encoded("submit_intent", {"text": "x" * frames.MAX_BYTES})


@pytest.mark.parametrize("has_run", [False, True])
def test_first_connection_starts_daemon_and_then_reads_its_token(has_run: bool, tmp_path: Path) -> None:
    home = tmp_path / "home"
    info, let_in = (frames.encode(json.dumps({"kind": kind}).encode()) for kind in ("protocol_info", "authenticated"))

    def make() -> None:
        (home / "peers").mkdir()
        (home / client.TOKEN).write_text("secret\n")
        (home / client.TOKEN).chmod(0o600)

    with answering(home, *([] if has_run else [info]), let_in, before=None if has_run else make) as seen:
        if has_run:
            make()
        with client.connected(home):
            pass
    asked = [json.loads(one) for one in seen]
    assert asked == [
        *([] if has_run else [{"kind": "protocol_info"}]),
        {"kind": "authenticate", "token_b58": "secret"},
    ]
