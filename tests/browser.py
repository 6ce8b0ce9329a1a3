"""The system's Chromium, driven over the DevTools protocol on two pipes: no driver and no package beside the browser.

`python -m tests.browser LINK FILE.png` takes a picture of a view in the MLflow UI, such as docs/dashboard.png.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from select import select
from typing import Any
from urllib.parse import urlsplit

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-background-networking", "--no-first-run"),
    *("--disable-component-update", "--disable-sync", "--disable-default-apps", "--window-size=1400,1000"),
    # as on a desk: a mouse that hovers, without which Plotly lays its buttons over the charts
    "--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4",
    # whatever a page may ask for, nothing leaves this machine
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)


def executable() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page. `requests` holds every address that it asked for."""

    def __init__(self, profile: Path) -> None:
        command = executable()
        assert command is not None, "no Chromium on this machine"
        to_browser, self._out = os.pipe()
        self._in, from_browser = os.pipe()
        self._process = subprocess.Popen(
            # the protocol's pipes are the numbers 3 and 4, so a shell-less helper moves ours there
            [command, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"],
            preexec_fn=lambda: _move(to_browser, from_browser),
            close_fds=False,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Network", "Page", "Runtime"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._out)
        os.close(self._in)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + 120
        while time.monotonic() < until:
            answer = self._read(until)
            if answer is not None and answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
        raise TimeoutError(method)

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def evaluate(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def wait_for(self, expression: str, seconds: float = 180) -> bool:
        """True as soon as the expression holds on the page."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self.evaluate(f"Boolean({expression})"):
                return True
            time.sleep(0.3)
        return False

    @property
    def text(self) -> str:
        return self.evaluate("document.body.innerText")

    @property
    def hosts(self) -> set[str]:
        """Every host, with its port, that the page asked for something."""
        return {urlsplit(address).netloc for address in self.requests if urlsplit(address).scheme not in ("data", "blob", "about")}

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _read(self, until: float) -> dict[str, Any] | None:
        """The next message; requests are noted."""
        while b"\0" not in self._buffer:
            if not select([self._in], [], [], max(0.0, until - time.monotonic()))[0]:
                return None
            chunk = os.read(self._in, 1 << 20)
            assert chunk, "the browser is gone"
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\0")
        message = json.loads(line)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        elif message.get("method") == "Network.webSocketCreated":
            self.requests.append(message["params"]["url"])
        return message


def _move(to_browser: int, from_browser: int) -> None:
    """In the child: our pipes as 3 and 4, whatever numbers they had."""
    high = os.dup(to_browser), os.dup(from_browser)
    while min(high) < 5:
        high = os.dup(high[0]), os.dup(high[1])
    os.dup2(high[0], 3)
    os.dup2(high[1], 4)


PLOTS = "document.querySelectorAll('.js-plotly-plot svg.main-svg').length >= 6 && document.querySelector('.parcoords canvas') !== null"
"""of the four charts of a view three are Plotly's, with two layers each"""
SEEN_BEFORE = "localStorage.setItem('mlflow.assistant.fab.autoOpenedOnFirstLoad_v1', 'true')"
"""on a first visit the UI opens its assistant over a quarter of the page"""


def picture(link: str, file: Path, width: int = 1440, height: int = 1150) -> None:
    """A view as it is on every visit but the first, once its four charts are drawn."""
    with tempfile.TemporaryDirectory() as profile, Browser(Path(profile)) as browser:
        browser.resize(width, height)
        browser.call("Page.addScriptToEvaluateOnNewDocument", source=SEEN_BEFORE)
        browser.open(link)
        drawn = browser.wait_for(PLOTS)
        time.sleep(5)  # the charts grow to their places
        browser.screenshot(file)
        print(f"{file}: {file.stat().st_size:,} bytes, {'all charts' if drawn else 'NOT all charts: ' + browser.text}")


if __name__ == "__main__":
    picture(sys.argv[1], Path(sys.argv[2]), *map(int, sys.argv[3:]))
