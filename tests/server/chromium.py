"""A headless Chromium, driven by its own protocol over two pipes: the standard library is all it takes."""

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome-headless-shell")
PATIENCE = 30.0
"""Seconds after which a browser that does not answer, or a page that does not get there, fails the test."""

# Where each named key is on a keyboard, as the protocol wants to be told.
KEYS = {
    "Tab": {"key": "Tab", "code": "Tab", "windowsVirtualKeyCode": 9},
    "Enter": {"key": "Enter", "code": "Enter", "windowsVirtualKeyCode": 13, "text": "\r"},
    "Escape": {"key": "Escape", "code": "Escape", "windowsVirtualKeyCode": 27},
    "ArrowRight": {"key": "ArrowRight", "code": "ArrowRight", "windowsVirtualKeyCode": 39},
}
CTRL, SHIFT = 2, 8


def find_chromium() -> str:
    """The browser's path; AssertionError with what to do where there is none, for a browser test is never skipped."""
    wanted = (os.environ["CHROMIUM"],) if os.environ.get("CHROMIUM") else NAMES
    found = next(filter(None, map(shutil.which, wanted)), None)
    assert found, (
        "the browser tests need Chromium: install it (Debian: apt install chromium), or set CHROMIUM to its path"
    )
    return found


class Chromium:
    """One browser process; `page` opens tabs that share nothing with each other."""

    def __init__(self, profile: Path) -> None:
        path = find_chromium()
        ours, theirs = os.pipe(), os.pipe()  # it reads from `ours` and writes to `theirs`, as its descriptors 3 and 4
        command = [
            path,
            "--headless",
            "--remote-debugging-pipe",
            f"--user-data-dir={profile}",
            "--disable-gpu",
        ]
        command += [
            "--no-first-run",
            "--disable-dev-shm-usage",
            "--disable-background-networking",
            "--disable-extensions",
        ]
        command += ["--no-sandbox"] if os.geteuid() == 0 else []
        redirect = f'exec "$@" 3<&{ours[0]} 4>&{theirs[1]}'
        self._process = subprocess.Popen(
            ["bash", "-c", redirect, "bash", *command],
            pass_fds=(ours[0], theirs[1]),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        os.close(ours[0])
        os.close(theirs[1])
        self._write, self._read = ours[1], theirs[0]
        self._buffer = b""
        self._last_id = 0
        self.events: list[dict[str, Any]] = []

    def close(self) -> None:
        """End the browser and everything it started."""
        try:
            self.send("Browser.close")
            self._process.wait(10)
        except (AssertionError, OSError, subprocess.TimeoutExpired):
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        os.close(self._write)
        os.close(self._read)

    def send(self, method: str, session: str | None = None, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol and return its result; what happens meanwhile goes to `events`."""
        self._last_id += 1
        message = {"id": self._last_id, "method": method, "params": parameters}
        if session:
            message["sessionId"] = session
        rest = json.dumps(message).encode() + b"\0"
        while rest:
            rest = rest[os.write(self._write, rest) :]
        deadline = time.monotonic() + PATIENCE
        while True:
            answer = self._receive(deadline, method)
            if answer.get("id") == self._last_id:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self, deadline: float, method: str) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"{method}: Chromium did not answer within {PATIENCE} s"
            data = os.read(self._read, 1 << 20)
            assert data, f"{method}: Chromium ended"
            self._buffer += data
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)

    def page(self, url: str, width: int = 1280, height: int = 900, **features: str) -> "Page":
        """A fresh tab at `url`; `features` are media features, with _ for -."""
        context = self.send("Target.createBrowserContext")["browserContextId"]
        target = self.send("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        page = Page(self, context, session)
        for domain in ("Page", "Runtime", "Log"):
            page.send(f"{domain}.enable")
        page.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        media = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
        page.send("Emulation.setEmulatedMedia", features=media)
        page.send("Page.navigate", url=url)
        page.wait("document.readyState === 'complete' && location.href !== 'about:blank'")
        return page


class Page:
    """One tab."""

    def __init__(self, browser: Chromium, context: str, session: str) -> None:
        self._browser, self._context, self._session = browser, context, session

    def close(self) -> None:
        """Close the tab and forget what it stored."""
        self._browser.send("Target.disposeBrowserContext", browserContextId=self._context)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Call a method of the protocol in this tab."""
        return self._browser.send(method, self._session, **parameters)

    def run(self, script: str) -> Any:
        """The value of a JavaScript expression, awaited where it is a promise."""
        done = self.send("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, condition: str) -> Any:
        """The value of the expression once it is truthy; True for an element."""
        deadline = time.monotonic() + PATIENCE
        while not (value := self.run(f"Promise.resolve({condition}).then(value => value instanceof Node || value)")):
            assert time.monotonic() < deadline, f"never true: {condition}\n{self.run('document.body.innerText')}"
            time.sleep(0.01)
        return value

    def text(self, selector: str) -> str:
        """The text of the first element that matches."""
        return self.run(f"document.querySelector({json.dumps(selector)}).textContent")

    def press(self, key: str, modifiers: int = 0) -> None:
        """Press and release a key of `KEYS`."""
        for kind in ("keyDown", "keyUp"):
            self.send("Input.dispatchKeyEvent", type=kind, modifiers=modifiers, **KEYS[key])

    def type(self, selector: str, text: str) -> None:
        """Put `text` into a field in place of what it holds, as pasting does."""
        self.run(f"(field => {{ field.focus(); field.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.send("Input.insertText", text=text)

    def click(self, selector: str, across: float = 0.5) -> None:
        """Click the element that matches, `across` of its width from its left edge."""
        element = f"document.querySelector({json.dumps(selector)})"
        self.run(f"{element}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        # The click goes to what was drawn last: two frames on, that is what was scrolled to.
        self.run("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done())))")
        left, top, width, height = self.run(
            f"(box => [box.left, box.top, box.width, box.height])({element}.getBoundingClientRect())"
        )
        x, y = left + width * across, top + height / 2
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def screenshot(self, path: Path) -> None:
        """The whole page as a PNG."""
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True)["data"]
        path.write_bytes(base64.b64decode(data))

    def complaints(self) -> list[str]:
        """Uncaught exceptions, console output, violations of the content policy; refusals of the server are none."""
        found = []
        for event in self._browser.events:
            if event.get("sessionId") != self._session:
                continue
            details = event.get("params", {})
            if event["method"] in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled"):
                found.append(json.dumps(details))
            elif event["method"] == "Log.entryAdded" and details["entry"]["source"] != "network":
                found.append(details["entry"]["text"])
        return found
