"""A headless Chromium, controlled through its debugging pipe without a driver or a package."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

PATIENCE_S = 60  # long enough for a busy machine, but ends a hang
KEYS = {"Enter": 13, "Escape": 27, "ArrowUp": 38, "Tab": 9}


def find_chromium() -> str | None:
    """Return the path of the installed browser, if there is one."""
    return next((path for name in ("chromium", "chromium-browser", "google-chrome", "chrome") if (path := shutil.which(name))), None)


class Tab:
    """One page. `requested` and `errors` grow during every wait."""

    def __init__(self, write_to: int, read_from: int) -> None:
        self._write_to, self._read_from = write_to, read_from
        self._read = b""
        self._number = 0
        self._session: str | None = None
        self.requested: list[str] = []
        self.errors: list[str] = []
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self._call(f"{domain}.enable")

    def open(self, address: str) -> None:
        self._call("Page.navigate", url=address)
        self.until(f"document.readyState === 'complete' && location.href.startsWith({json.dumps(address)})")

    def look(self, *, width: int = 1000, height: int = 800, dark: bool = False, mobile: bool = False) -> None:
        """Set the size of the page and the preferred colour scheme."""
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def value(self, expression: str) -> Any:
        """Return the value of an expression."""
        found = self._call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, expression: str) -> Any:
        """Wait until an expression is true."""
        deadline = time.monotonic() + PATIENCE_S
        while not (found := self.value(expression)):
            assert time.monotonic() < deadline, (
                f"{expression} did not become true; the page shows {self.value('document.body.innerText')!r}"
            )
            time.sleep(0.02)
        return found

    def type(self, text: str) -> None:
        self._call("Input.insertText", text=text)

    def press(self, key: str, *, shift: bool = False) -> None:
        text = {"text": "\r"} if key == "Enter" else {}
        about = {"key": key, "code": key, "windowsVirtualKeyCode": KEYS[key], "modifiers": 8 if shift else 0}
        self._call("Input.dispatchKeyEvent", type="keyDown", **about, **text)
        self._call("Input.dispatchKeyEvent", type="keyUp", **about)

    def picture(self) -> bytes:
        return base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"])

    def _call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write_to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + PATIENCE_S
        while True:
            reply = self._message(deadline)
            if reply.get("id") == self._number:
                assert "error" not in reply, (method, reply["error"])
                return reply["result"]
            self._note(reply)

    def _note(self, event: dict[str, Any]) -> None:
        method, about = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requested.append(about["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(json.dumps(about["exceptionDetails"]))
        elif method == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.errors.append(about["entry"]["text"])

    def _message(self, deadline: float) -> Any:
        while b"\0" not in self._read:
            ready, _, _ = select.select([self._read_from], [], [], max(0.0, deadline - time.monotonic()))
            piece = os.read(self._read_from, 1 << 16) if ready else b""
            assert piece, "the browser does not answer"
            self._read += piece
        message, _, self._read = self._read.partition(b"\0")
        return json.loads(message)


@contextmanager
def browsing(chromium: str) -> Iterator[Tab]:
    """Open a tab of a browser with a profile of its own during the body."""
    to_browser, our_writes = os.pipe()
    our_reads, from_browser = os.pipe()
    # The browser takes commands at descriptor 3 and answers at 4.
    command = ["bash", "-c", f'exec "$@" 3<&{to_browser} 4>&{from_browser}', "bash", chromium, "--headless", "--remote-debugging-pipe"]
    options = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        running = subprocess.Popen(
            [*command, *options, f"--user-data-dir={profile}"],
            pass_fds=(to_browser, from_browser),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": profile},
        )
        os.close(to_browser)
        os.close(from_browser)
        try:
            yield Tab(our_writes, our_reads)
        finally:
            running.terminate()
            try:
                running.wait(10)
            except subprocess.TimeoutExpired:
                running.kill()
                running.wait()
            os.close(our_writes)
            os.close(our_reads)
