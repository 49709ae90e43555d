"""A real Chromium for tests of the web console, driven over two pipes by the DevTools protocol.

The browser is that of the machine, or Debian's, unpacked below build/ with the libraries that the machine lacks:
nothing is installed. Protocol: https://chromedevtools.github.io/devtools-protocol/
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import hashlib
import json
import os
import selectors
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
UNPACKED = ROOT / "build/browser"
PACKAGE = "chromium-headless-shell"
NAMES = ("chromium-headless-shell", "chromium")
PATIENCE_SECONDS = 60.0
# The browser opens pages of the daemon under test alone, and root has no sandbox of Chromium's own.
OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--no-proxy-server"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync", "--mute-audio"),
    *("--hide-scrollbars", "--remote-debugging-pipe"),
)
SIZES = {"desk": (1280, 900), "phone": (360, 780)}


def program() -> tuple[str, dict[str, str]]:
    """Return the browser and its environment."""
    for name in NAMES:
        if found := shutil.which(name):
            return found, dict(os.environ)
    if not (UNPACKED / "done").exists():
        _unpack()
    libraries = UNPACKED / f"usr/lib/{os.uname().machine}-linux-gnu"
    return str(UNPACKED / "usr/lib/chromium" / PACKAGE), {
        **os.environ,
        "LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio",
    }


def _unpack() -> None:
    try:
        names = _download()
    except subprocess.CalledProcessError:
        # The lists name a version that the mirror has no more, or there are none.
        subprocess.run(["apt-get", "update"], check=True, capture_output=True)
        names = _download()
    (UNPACKED / "done").write_text("\n".join(names))


def _download() -> list[str]:
    command = ["apt-get", "install", "--simulate", "--no-install-recommends", PACKAGE]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("Inst ")]
    UNPACKED.mkdir(parents=True, exist_ok=True)
    # As root: apt's own user may not write there.
    download = ["apt-get", "-o", "APT::Sandbox::User=root", "download", *names]
    with tempfile.TemporaryDirectory(dir=UNPACKED) as place:
        subprocess.run(download, cwd=place, check=True, capture_output=True)
        for package in Path(place).glob("*.deb"):
            subprocess.run(["dpkg-deb", "--extract", str(package), str(UNPACKED)], check=True)
    return names


def axe() -> str:
    """Return the program of axe-core, which npm compares with its digest in the lock."""
    lock = ROOT / "locks/console-test.json"
    top = ROOT / "build/axe" / hashlib.sha256(lock.read_bytes()).hexdigest()[:16]
    program = top / "node_modules/axe-core/axe.min.js"
    if not program.exists():
        top.mkdir(parents=True, exist_ok=True)
        shutil.copy(lock, top / "package-lock.json")
        needed = json.loads(lock.read_bytes())["packages"][""]["dependencies"]
        (top / "package.json").write_text(json.dumps({"private": True, "dependencies": needed}))
        command = ["npm", "install", "--no-audit", "--no-fund", "--ignore-scripts", "--prefix", str(top)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
    return program.read_text()


class Page:
    """One tab. ``urls`` are what it asked for, ``problems`` what its console said."""

    def __init__(self, process: subprocess.Popen[bytes], into: int, out: int) -> None:
        self._process, self._into, self._out = process, into, out
        self._number = 0
        self._rest = b""
        self._session = ""
        self._ready = selectors.DefaultSelector()
        self._ready.register(out, selectors.EVENT_READ)
        self.urls: list[str] = []
        self.problems: list[str] = []

    def open(self) -> None:
        """Make the tab."""
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.send(f"{domain}.enable")

    def send(self, method: str, /, **params: Any) -> dict[str, Any]:
        """Send a command and return its result."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._into, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + PATIENCE_SECONDS
        while (found := self._next(until)).get("id") != self._number:
            self._note(found)
        assert "error" not in found, (method, found)
        result: dict[str, Any] = found["result"]
        return result

    def _next(self, until: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            assert self._ready.select(max(0.0, until - time.monotonic())), "the browser does not answer"
            part = os.read(self._out, 1 << 20)
            assert part, "the browser ended"
            self._rest += part
        raw, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(raw)
        return found

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.urls.append(params["request"]["url"])
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:2000])
        if event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.problems.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")

    def go(self, url: str) -> None:
        """Open an address and wait until it is loaded."""
        self.send("Page.navigate", url=url)
        self.until("document.readyState === 'complete'")

    def evaluate(self, expression: str) -> Any:
        """Return the value of an expression; a promise is waited for."""
        done = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in done, done
        return done["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait for an expression to be true."""
        until = time.monotonic() + PATIENCE_SECONDS
        while not (found := self.evaluate(expression)):
            assert time.monotonic() < until, (expression, self.evaluate("document.body.innerText"), self.problems)
            time.sleep(0.05)
        return found

    def sees(self, text: str) -> None:
        """Wait for a text on the page."""
        self.until(f"document.body.innerText.includes({json.dumps(text)})")

    def text(self) -> str:
        """Return the text of the page."""
        return str(self.evaluate("document.body.innerText"))

    def click(self, name: str) -> None:
        """Press the button or link of this name."""
        words = json.dumps(name)
        self.until(
            "(() => { const one = [...document.querySelectorAll('button, a')].filter((e) => e.checkVisibility())"
            f".findLast((e) => e.textContent.trim() === {words}); one?.click(); return Boolean(one); }})()"
        )

    def key(self, key: str) -> None:
        """Press a key, as ``KeyboardEvent.key`` names it."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27}[key]
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def control(self, letter: str) -> None:
        """Press Control and a letter."""
        about = {"key": letter, "code": f"Key{letter.upper()}", "windowsVirtualKeyCode": ord(letter.upper())}
        self.send("Input.dispatchKeyEvent", type="rawKeyDown", modifiers=2, **about)
        self.send("Input.dispatchKeyEvent", type="keyUp", modifiers=2, **about)

    def type(self, text: str) -> None:
        """Press the keys of a text."""
        for letter in text:
            self.send("Input.dispatchKeyEvent", type="keyDown", key=letter, text=letter)
            self.send("Input.dispatchKeyEvent", type="keyUp", key=letter)

    def violations(self) -> list[str]:
        """Return the rules of axe-core that the page breaks, each with the elements."""
        if not self.evaluate("'axe' in window"):
            self.evaluate(f"{axe()}; null")
        script = """axe.run(document, {resultTypes: ['violations']}).then((found) => found.violations.map(
            (one) => `${one.id}: ${one.nodes.map((node) => node.html + ' ' + node.failureSummary).join(' | ')}`))"""
        return list(self.evaluate(script))

    def look(self, size: str, scheme: str) -> None:
        """Set the size of the window (``SIZES``), and light or dark."""
        width, height = SIZES[size]
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=size == "phone",
        )
        self.send("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def picture(self, path: Path) -> None:
        """Write a picture of the whole page."""
        found = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(found["data"]))


def _pipe(theirs: int) -> tuple[int, int]:
    """Return a pipe, and move the browser's end away from the numbers that the shell gives it."""
    ends = list(os.pipe())
    moved = fcntl.fcntl(ends[theirs], fcntl.F_DUPFD_CLOEXEC, 10)
    os.close(ends[theirs])
    ends[theirs] = moved
    return ends[0], ends[1]


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A browser with one tab and an empty profile; it ends with the block."""
    path, environment = program()
    with tempfile.TemporaryDirectory(prefix="covenant-browser-", ignore_cleanup_errors=True) as profile:
        (their_in, our_out), (our_in, their_out) = _pipe(0), _pipe(1)
        # Chromium reads descriptor 3 and writes descriptor 4.
        shell = f'exec "$@" 3<&{their_in} 4>&{their_out}'
        process = subprocess.Popen(
            ["/bin/bash", "-c", shell, "bash", path, *OPTIONS, f"--user-data-dir={profile}", "about:blank"],
            pass_fds=(their_in, their_out),
            env=environment | {"HOME": profile},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(their_in)
        os.close(their_out)
        page = Page(process, our_out, our_in)
        try:
            page.open()
            yield page
        finally:
            os.close(our_out)
            os.close(our_in)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
