"""A headless Chromium, driven over a pipe by its own DevTools protocol: nothing to install beside the browser."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=f"none of {', '.join(NAMES)} is installed")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars"),
)
PATIENCE_S = 60.0


class Page:
    """One tab. Mouse, fingers and keys are the browser's own events, not calls of the page's functions."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._out, self._in = to_browser, from_browser
        self._numbers = 0
        self._rest = b""
        self._session: str | None = None
        self.errors: list[str] = []
        """what went wrong in the page: exceptions, and requests that left it"""

    def attach(self) -> None:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._numbers += 1
        message: dict[str, Any] = {"id": self._numbers, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._numbers:
                assert "error" not in answer, (method, answer["error"])
                return answer["result"]
            self._note(answer)

    def open(self, path: Path, *, width: int, height: int = 900, dark: bool = False, touch: bool = False) -> None:
        """Open a file and wait until it says that it is drawn."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=touch)
        self.call("Emulation.setTouchEmulationEnabled", enabled=touch, maxTouchPoints=2)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.run("delete document.documentElement.dataset.ready")  # of the page before
        self.call("Page.navigate", url=path.as_uri())
        until_s = time.monotonic() + PATIENCE_S
        while not self.run("document.documentElement?.dataset.ready === 'true'"):
            assert time.monotonic() < until_s, f"the page was not drawn within {PATIENCE_S:g} s: {self.errors}"
            assert not self.errors, self.errors
            time.sleep(0.02)
        self.settle()

    def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def settle(self) -> None:
        """Wait until what was asked for is drawn."""
        self.run("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => done(true))))")

    def place(self, selector: str) -> tuple[float, float, float, float]:
        """Left, top, width and height of an element, scrolled into view."""
        self.run(f"document.querySelector({selector!r}).scrollIntoView({{block: 'center'}})")
        time.sleep(0.3)  # a wheel that turns while the page still scrolls belongs to the page
        box = f"document.querySelector({selector!r}).getBoundingClientRect()"
        left, top, width, height = self.run(f"(({{x, y, width, height}}) => [x, y, width, height])({box})")
        return left, top, width, height

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def click(self, x: float, y: float) -> None:
        for kind in ("mousePressed", "mouseReleased"):
            self.mouse(kind, x, y, button="left", clickCount=1)
        self.settle()

    def wheel(self, x: float, y: float, delta: float) -> None:
        self.mouse("mouseWheel", x, y, deltaX=0, deltaY=delta)
        self.settle()

    def drag(self, x: float, y: float, to_x: float) -> None:
        self.mouse("mousePressed", x, y, button="left", clickCount=1)
        for share in (0.5, 1.0):
            self.mouse("mouseMoved", x + share * (to_x - x), y, button="left", buttons=1)
        self.mouse("mouseReleased", to_x, y, button="left")
        self.settle()

    def touch(self, kind: str, *points: tuple[float, float]) -> None:
        where = [{"x": x, "y": y, "id": number} for number, (x, y) in enumerate(points)]
        self.call("Input.dispatchTouchEvent", type=kind, touchPoints=where)
        self.settle()

    def key(self, key: str, *, shift: bool = False) -> None:
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, modifiers=8 if shift else 0)
        self.settle()

    def picture(self, path: Path) -> None:
        """Of the whole page."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        found = self.call("Page.captureScreenshot", format="png", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def _receive(self, method: str) -> Any:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], PATIENCE_S)
            assert ready, f"the browser did not answer {method} within {PATIENCE_S:g} s"
            added = os.read(self._in, 2**20)
            assert added, f"the browser ended before it answered {method}"
            self._rest += added
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"]))
        elif event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.startswith(("file:", "about:")):
                self.errors.append(f"asked for {url}")


@contextmanager
def chromium(directory: Path) -> Iterator[Page]:
    """A browser with a profile of its own in ``directory``, ended whatever happens."""
    assert CHROMIUM is not None
    read_commands, write_commands = os.pipe()
    read_answers, write_answers = os.pipe()
    # the browser looks for its ends at 3 and 4, which may be anything here
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (read_commands, write_answers)]
    silent = [(os.POSIX_SPAWN_OPEN, out, os.devnull, os.O_WRONLY, 0) for out in (1, 2)]
    ends = [(os.POSIX_SPAWN_DUP2, end, at) for at, end in enumerate(theirs, start=3)]
    command = [CHROMIUM, *FLAGS, "--remote-debugging-pipe", f"--user-data-dir={directory / 'chromium'}"]
    browser = os.posix_spawn(CHROMIUM, command, os.environ, file_actions=[*silent, *ends])
    for end in (read_commands, write_answers, *theirs):
        os.close(end)
    try:
        page = Page(write_commands, read_answers)
        page.attach()
        yield page
    finally:
        os.kill(browser, signal.SIGKILL)
        os.waitpid(browser, 0)
        os.close(write_commands)
        os.close(read_answers)
