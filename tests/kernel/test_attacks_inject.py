"""A hostile agent under gVisor at the gate that adds secrets, and the memory of its sandbox after 1,000 tries.

Each refusal stands beside a request of the same run that is granted, and arrives with the secret.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.inject_kit import CHUNKED, PROBES, post, statuses
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import NAME, RAW, InjectWorld, carried, grants, host, net, run, world
from tests.kernel.test_credentials import family, memory, vault

__all__ = ["host", "net", "world"]


def test_hostile_requests_get_no_secret(world: InjectWorld, host: FakeHost) -> None:
    sent = json.dumps([data for _, data, _, _ in PROBES])
    chunk = post(CHUNKED, "ZZ\r\nhi\r\n0\r\n\r\n")
    code = f"""
probes = json.loads({sent!r})
answer = {{"raw": [send(one.encode("latin-1")) for one in probes]}}
answer["chunk"] = send({chunk!r}.encode())
granted = probes[0].encode()
answer["sni"] = send(granted, sni="other.example.com")
try:
    with socket.create_connection(("api.example.com", 4443), timeout=20) as line:
        line.sendall(granted)
        answer["clear"] = said(line).decode("latin-1")
except OSError as e:
    answer["clear"] = type(e).__name__
with opened(alpn=["h2", "http/1.1"]) as line:
    answer["alpn"] = [line.selected_alpn_protocol(), line.getpeercert()["subjectAltName"]]
with opened(alpn=["h2"]) as line:
    answer["h2"] = line.selected_alpn_protocol()
try:
    opened(verify=ssl.create_default_context(cafile="/workspace/ca.pem")).close()
    answer["real"] = "taken"
except ssl.SSLError as e:
    answer["real"] = e.verify_message
"""
    more = grants(["GET", "POST"], ["/user", "/repos/*"])
    ca = world.certificate.read_text()
    said, rows = run(world, RAW + code, more, files={"ca.pem": ca})
    found = {name: statuses(text) for (name, _, _, _), text in zip(PROBES, said["raw"], strict=True)}
    assert found == {name: gives for name, _, gives, _ in PROBES}
    # The one of another SNI passed unread to the other name, with what the agent wrote: nothing.
    with_secret = [one for one in host.seen if ("authorization", f"Bearer {SECRET}") in one["headers"]]
    assert len(with_secret) - _is_begun(with_secret) == sum(count for _, _, _, count in PROBES)
    assert {one["path"].partition("?")[0] for one in with_secret} == {"/user", "/repos/a/b"}
    assert {one["method"] for one in with_secret} == {"GET", "POST"}
    assert carried(host) == [f"Bearer {SECRET}"] * len(with_secret)
    names = {name for one in host.seen for name, _ in one["headers"]}
    assert not names & {"x-http-method-override", "x-original-url", "x-rewrite-url"}
    assert 200 not in statuses(said["chunk"])
    assert statuses(said["sni"]) == [200]
    assert said["clear"] in ("", "ConnectionResetError")
    assert said["alpn"] == ["http/1.1", [["DNS", NAME]]]
    assert said["h2"] is None
    assert "self" in said["real"] or "unable" in said["real"], said["real"]
    assert SECRET not in json.dumps(said)
    codes = {(row["code"], row["grant"]) for row in rows if row["type"] == "denied" and row["layer"] == "inject"}
    assert {
        ("request_not_granted", "permissions.network.inject"), ("path_refused", None), ("host_refused", None),
        ("frame_refused", None),
    } <= codes  # fmt: skip


def _is_begun(seen: Sequence[dict[str, Any]]) -> int:
    """The number of requests with a broken body that the host took for whole ones."""
    return sum(one["body"] == b"ZZ" for one in seen)


# --- where the secret is not --------------------------------------------------------------------------------------


def test_memory_of_sandbox_has_no_secret(world: InjectWorld, host: FakeHost) -> None:
    found: dict[str, Any] = {}

    def looked(number: int) -> None:
        if number == 1:
            needles = [SECRET.encode(), SECRET[4:24].encode(), base64.b64encode(SECRET.encode())[4:-4]]
            for pid in family(os.getpid())[1:]:
                name = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
                who = (
                    "gate" if b"sandbox.network.inject" in name else "gates" if b"sandbox.network" in name else "runsc"
                )
                hits = sum(needle in region for region in memory(pid) for needle in needles)
                found[who] = found.get(who, 0) + hits
                found[f"{who} processes"] = found.get(f"{who} processes", 0) + 1
            vault(world, "rotate", "probe", "github", secret="ghp_rotated/another-secret-0123")
        else:
            vault(world, "rm", "probe", "github")

    host.hook = looked
    code = """
tries = ["/echo", "/split", "/admin/../echo", "/echo?x=" + "y" * 500, "/zipped", "/elsewhere"]
hostile = 0
kept = None
for number in range(1000):
    try:
        kept = kept or http.client.HTTPSConnection("api.example.com", 4443, timeout=30, context=context)
        mine = {"Authorization": "Bearer %d" % number, "X-Odd": chr(33 + number % 90) * 40}
        kept.request(("GET", "POST", "TRACE", "PUT")[number % 4], tries[number % len(tries)], None, mine)
        found = kept.getresponse()
        hostile += 1
        found.read()
        if found.getheader("Connection") == "close":
            kept.close()
            kept = None
    except (OSError, http.client.HTTPException):
        kept = None
answer = [hostile, *(ask("GET", path)[0] for path in ("/hook?1", "/user?2", "/hook?3", "/user?4"))]
"""
    said, rows = run(world, code, grants(), cpu_ms=240000)
    # The third request is under way while its secret is removed: it is cut, and no byte of its answer comes.
    assert said == [said[0], 200, 200, 0, 403]
    assert said[0] > 900
    assert found["runsc processes"] >= 1
    assert found["runsc"] == found["gates"] == 0
    assert found["gate"] > 0  # the control: where it is, by the same means
    by = {one["path"]: dict(one["headers"])["authorization"] for one in host.seen}
    assert by["/hook?1"] == f"Bearer {SECRET}"
    # The request after a rotation has the new one, the one after a removal none.
    assert by["/user?2"] == by["/hook?3"] == "Bearer ghp_rotated/another-secret-0123"
    assert "/user?4" not in by
    versions = [(row["version"], row["host"]) for row in rows if row["type"] == "credential_injected"]
    assert versions == [(1, NAME), (2, NAME)]
    assert "secret_absent" in {row["code"] for row in rows if row["type"] == "denied"}
    vault(world, "put", "probe", "github", secret=SECRET)
