"""Secrets that the gate adds, as an agent under gVisor meets them: the host gets them, and the agent never does."""

from __future__ import annotations

import json
import re
import subprocess
import threading
from pathlib import Path

from policy.compile.network.firewall import GATE_UID
from tests.kernel import fake_host, live_runs
from tests.kernel.fake_host import SECRET, FakeHost
from tests.kernel.injecting import NAME, PORT, InjectWorld, carried, grants, host, net, run, world
from tests.kernel.test_credentials import covenant, vault
from tests.kernel.world import ROOT

__all__ = ["host", "net", "world"]


def test_secret_is_added_at_gate(world: InjectWorld, host: FakeHost) -> None:
    code = """
answer = {
    "plain": ask("GET", "/user", headers={"Authorization": "Bearer mine", "X-Mine": "kept"}),
    "other": ask("GET", "/user", headers={"Authorization": "Bearer mine"}, host="other.example.com"),
    "env": dict(os.environ), "ca": open("/run/covenant/ca.pem").read(),
}
"""
    said, rows = run(world, code, grants(more=', env = "GITHUB_TOKEN"'))
    assert [said["plain"][0], said["other"][0]] == [200, 200], said
    # The agent's own is taken away, and a host without a secret is passed through unread.
    assert carried(host) == [f"Bearer {SECRET}", "Bearer mine"]
    assert ("x-mine", "kept") in host.seen[0]["headers"]
    assert said["env"]["GITHUB_TOKEN"] == "covenant-placeholder"
    assert said["ca"].count("BEGIN CERTIFICATE") > 1
    assert SECRET not in json.dumps(said)
    (used,) = [row for row in rows if row["type"] == "request_injected"]
    assert (used["host"], used["name"], used["method"], used["path"], used["status"], used["whole"]) == (
        NAME, "github", "GET", "/user", 200, True
    )  # fmt: skip
    (first,) = [row for row in rows if row["type"] == "credential_injected"]
    assert (first["name"], first["version"], first["host"]) == ("github", 1, NAME)
    assert SECRET not in json.dumps(world.rows())


# --- what a host answers ------------------------------------------------------------------------------------------


def test_answers_come_without_secrets(world: InjectWorld, host: FakeHost) -> None:
    code = """
def headed(path, **more):
    found = raw("GET", path, **more)
    return [found.status, sorted(map(list, found.getheaders())), found.read().decode("latin-1")]
stream = raw("GET", "/stream")
times, begun = [], time.monotonic()
lines = []
while line := stream.readline():
    lines.append(line.decode())
    times.append(time.monotonic() - begun)
tokens = json.loads(ask("GET", "/token")[1])
form = ask("GET", "/formtoken")[1]
bearer = {"Authorization": "Bearer " + tokens["access_token"]}
kind = {"Content-Type": "application/x-www-form-urlencoded"}
refresh = "grant_type=refresh_token&refresh_token=" + tokens["refresh_token"]
upload = os.urandom(3 << 20)
kept = http.client.HTTPSConnection("api.example.com", 4443, timeout=30, context=context)
def again(path, method="GET", body=None, **more):
    kept.request(method, path, body, **more)
    found = kept.getresponse()
    return [found.status, len(found.read())]
answer = {
    "echo": headed("/echo"), "split": ask("GET", "/split"), "elsewhere": headed("/elsewhere"),
    "zipped": ask("GET", "/zipped"), "upgrade": ask("GET", "/upgrade"), "lines": lines, "times": times,
    "tokens": tokens, "form": form,
    "by token": ask("GET", "/user", headers=bearer), "refreshed": ask("POST", "/taken", refresh, kind),
    "elsewhere token": ask("GET", "/user", headers=bearer, host="other.example.com"),
    "kept": [
        again("/big"), again("/big", "HEAD"), again("/taken", "POST", upload), again("/close"),
        again("/taken", "POST", iter([b"a" * 100, b"b" * 50]), encode_chunked=True,
              headers={"Transfer-Encoding": "chunked"}),
        again("/taken", "POST", b"c" * 2000, headers={"Expect": "100-continue"}),
    ],
}
"""
    said, rows = run(world, code, grants())
    text = json.dumps(said)
    for hidden in (SECRET, SECRET[4:24], fake_host.TOKEN, fake_host.REFRESH):
        assert hidden not in text
    status, headers, body = said["echo"]
    names = {name.lower() for name, _ in headers}
    assert (status, "set-cookie" in names, "x-echo" in names) == (200, False, True)
    assert json.loads(body)["given"] == "Bearer " + "*" * len(SECRET)
    assert said["split"] == [200, f"<p>Bearer {'*' * len(SECRET)}</p>"]
    assert ["Location", "https://other.example.com:4443/landed"] in said["elsewhere"][1]
    assert [said["zipped"][0], said["upgrade"][0]] == [502, 502]
    events = [line for line in said["lines"] if line.strip()]
    assert events == [f"data: part{n} Bearer {'*' * len(SECRET)}\n" for n in range(3)]
    assert said["times"][0] < said["times"][-1] - 0.5  # the first came while the host still spoke
    assert said["tokens"]["access_token"].startswith("covenant-")
    assert len(said["tokens"]["refresh_token"]) == len(fake_host.REFRESH)
    assert "access_token=covenant-" in said["form"]
    by = {one["path"]: one for one in host.seen}
    landed = [value for one in host.seen for name, value in one["headers"] if name == "authorization"]
    # At its own host a placeholder is the token again, elsewhere it is nothing.
    assert f"Bearer {fake_host.TOKEN}" in landed
    assert f"Bearer {said['tokens']['access_token']}" in landed
    refreshes = [one["body"] for one in host.seen if b"grant_type" in one["body"]]
    assert refreshes == [f"grant_type=refresh_token&refresh_token={fake_host.REFRESH}".encode()]
    assert said["kept"] == [[200, 1 << 20], [200, 0], [200, 7], [200, 4], [200, 3], [200, 4]]
    assert by["/big"]["method"] == "HEAD"
    taken = [len(one["body"]) for one in host.seen if one["path"] == "/taken"]
    assert taken == [len(refreshes[0]), 3 << 20, 150, 2000]
    codes = [row["code"] for row in rows if row["type"] == "denied" and row["layer"] == "inject"]
    assert sorted(codes) == ["answer_refused", "host_failed"]


def test_stream_is_cut_when_its_secret_goes(world: InjectWorld, host: FakeHost) -> None:
    code = """
size, stream = 0, raw("GET", "/drip")
while line := stream.readline():  # of 600; http.client ends a cut stream as it ends a whole one
    size += len(line)
answer = [size, ask("GET", "/user")[0]]
"""

    counted: list[int] = []

    def remove() -> None:
        live_runs.until(lambda: [one for one in host.seen if one["path"] == "/drip"])
        vault(world, "rm", "probe", "github")
        # The command returns once the request has ended, so its row has every byte that passed.
        rows = (row["kind"] for row in world.rows())
        counted.extend(row["in_bytes"] for row in rows if row["type"] == "request_injected" and row["path"] == "/drip")

    removing = threading.Thread(target=remove)
    removing.start()
    try:
        said, rows = run(world, code, grants())
    finally:
        removing.join()
        vault(world, "put", "probe", "github", secret=SECRET + "\n")
    size, after = said
    assert after == 403
    assert size <= counted[0]
    (used,) = [row for row in rows if row["type"] == "request_injected" and row["path"] == "/drip"]
    assert (used["status"], used["whole"]) == (200, False)
    codes = [row["code"] for row in rows if row["type"] == "denied" and row["layer"] == "inject"]
    assert codes == ["secret_taken", "secret_absent"]


# --- what attestation says -----------------------------------------------------------------------------------------


def test_way_around_the_gate_is_drift(world: InjectWorld, host: FakeHost) -> None:
    """A rule by hand lets the agent to the host without the gate that reads its requests."""
    said: list[tuple[int, str]] = []

    def look(number: int) -> None:
        (run,) = [one for one in (world.state / "runs").iterdir() if one.is_dir()]
        if number == 2:
            (gate,) = [pid for pid in Path("/proc").glob("[0-9]*") if _is_gate(pid, run.name)]
            rule = ("insert", "rule", "inet", "covenant", "prerouting", "iifname", "agent0", "tcp", "dport", "4443")
            nft = ("nsenter", f"--net={gate}/ns/net", "nft", *rule, "accept")
            subprocess.run(nft, check=True)
        done = covenant(world, "attest", run.name)
        said.append((done.returncode, done.stdout.decode() + done.stderr.decode()))

    host.hook = look
    try:
        answer, _ = run(world, 'answer = [ask("GET", f"/hook?{n}")[0] for n in (1, 2)]', grants())
    finally:
        host.hook = lambda number: None
    assert answer == [200, 200]
    assert [status for status, _ in said] == [0, 3], said
    assert "firewall" in said[1][1]


def _is_gate(process: Path, run_id: str) -> bool:
    """Whether a process is the TLS gate of a run, by its user and its cgroup."""
    try:
        return process.stat().st_uid == GATE_UID and run_id in (process / "cgroup").read_text()
    except OSError:
        return False


# --- what the page says -------------------------------------------------------------------------------------------


def test_entry_of_page_works(world: InjectWorld, host: FakeHost) -> None:
    page = (ROOT / "docs" / "credentials.md").read_text()
    (entry,) = [one for one in re.findall(r"```toml\n(.*?)```", page, re.DOTALL) if "inject" in one]
    written = entry.replace("api.github.com", NAME).replace("[443]", f"[{PORT}]")
    code = 'answer = [ask("GET", "/user")[0], ask("GET", "/admin")[0], os.environ["GITHUB_TOKEN"]]'
    said, _ = run(world, code, written)
    assert said == [200, 403, "covenant-placeholder"]
    assert carried(host) == [f"Bearer {SECRET}"]
