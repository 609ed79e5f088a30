"""A real Chromium without a window, driven through its pipe, which tells what a page does and how wide it is."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


class Browser:
    """Opens pages. `told` has what the pages complained of and `asked` the addresses that they asked for."""

    def __init__(self, commands: int, answers: int) -> None:
        self._commands, self._answers, self._rest, self._number = commands, answers, b"", 0
        self.told: list[Any] = []
        self.asked: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session: dict[str, str] = {}
        self._session = {"sessionId": self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]}
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        self._number += 1
        session = getattr(self, "_session", {})
        message = {"id": self._number, "method": method, "params": parameters, **session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            pass
        assert "error" not in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            chunk = os.read(self._answers, 1 << 16)
            assert chunk, "the browser ended"
            self._rest += chunk
        message, self._rest = self._rest.split(b"\0", 1)
        found: dict[str, Any] = json.loads(message)
        if found.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.told.append(found["params"])
        if found.get("method") == "Network.requestWillBeSent":
            self.asked.append(found["params"]["request"]["url"])
        return found

    def open(self, page: Path, width: int, scheme: str) -> None:
        media = [{"name": "prefers-color-scheme", "value": scheme}]
        self.call("Emulation.setEmulatedMedia", features=media)
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=page.as_uri())
        while self._next().get("method") != "Page.loadEventFired":
            pass

    def value(self, expression: str) -> Any:
        return self.call("Runtime.evaluate", expression=expression, returnByValue=True)["result"].get("value")

    def picture(self, path: Path) -> None:
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(shot["data"]))


@contextlib.contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        pytest.skip("needs chromium")
    (theirs, commands), (answers, written) = os.pipe(), os.pipe()
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-pipe",
        f"--user-data-dir={profile}",
    ]
    line = f"exec {shlex.join([chromium, *options])} 3<&{theirs} 4>&{written}"
    with subprocess.Popen(
        ["bash", "-c", line], pass_fds=(theirs, written), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as process:
        os.close(theirs)
        os.close(written)
        try:
            started = Browser(commands, answers)
            yield started
            started._session = {}
            started.call("Browser.close")
            process.wait(300)
        finally:
            process.kill()
            os.close(commands)
            os.close(answers)
