"""Headless Chromium with a fake camera, driven over the DevTools protocol."""

import asyncio
import base64
import json
import shutil
import subprocess
import tempfile
from pathlib import Path

from aiohttp import ClientSession

from patience import PATIENCE_S

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Chromium:
    """`console` collects the errors of the page, including blocked resources."""

    def __init__(self) -> None:
        self.console: list[str] = []
        self._number = 0
        self._loaded = asyncio.Event()
        self._answers: dict[int, asyncio.Future] = {}

    async def __aenter__(self) -> "Chromium":
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        flags = (
            "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run --mute-audio "
            "--use-fake-device-for-media-stream --use-fake-ui-for-media-stream --remote-debugging-port=0 "
            "--disable-background-networking --disable-component-update --disable-sync --hide-scrollbars"
        )
        command = [PROGRAM, *flags.split(), f"--user-data-dir={self._profile.name}", "about:blank"]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = await self._port()
            self._http = ClientSession()
            async with self._http.get(f"http://127.0.0.1:{port}/json") as answer:
                tab = next(one for one in await answer.json() if one["type"] == "page")
            self._socket = await self._http.ws_connect(tab["webSocketDebuggerUrl"], max_msg_size=2**26)
            self._listener = asyncio.create_task(self._listen())
            for domain in ("Page", "Runtime", "Log"):
                await self.do(f"{domain}.enable")
        except BaseException:
            self._kill()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listener.cancel()
        await self._http.close()
        self._kill()

    async def open(self, url: str) -> None:
        self._loaded = asyncio.Event()
        await self.do("Page.navigate", url=url)
        async with asyncio.timeout(PATIENCE_S):
            await self._loaded.wait()

    async def do(self, method: str, **parameters: object) -> dict:
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_str(json.dumps({"id": self._number, "method": method, "params": parameters}))
        async with asyncio.timeout(PATIENCE_S):
            return await answer

    async def run(self, script: str) -> object:
        said = await self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise RuntimeError(said["exceptionDetails"])
        return said["result"].get("value")

    async def wait_for(self, script: str, timeout_s: float = PATIENCE_S) -> object:
        """Waits until the JavaScript expression is truthy."""
        async with asyncio.timeout(timeout_s):
            while not (value := await self.run(script)):
                await asyncio.sleep(0.1)
        return value

    async def size(self, width: int, height: int) -> None:
        mobile = width < 600
        await self.do(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile
        )

    async def dark(self, is_dark: bool) -> None:
        feature = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        await self.do("Emulation.setEmulatedMedia", features=[feature])

    async def shot(self, path: str | Path) -> None:
        said = await self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(said["data"]))

    async def _port(self) -> int:
        file = Path(self._profile.name) / "DevToolsActivePort"
        async with asyncio.timeout(PATIENCE_S):
            while not (file.exists() and file.read_text().strip()):
                await asyncio.sleep(0.05)
        return int(file.read_text().split()[0])

    async def _listen(self) -> None:
        async for message in self._socket:
            said = json.loads(message.data)
            if "id" in said:
                answer = self._answers.pop(said["id"])
                if not answer.done():
                    answer.set_result(said.get("result", said.get("error")))
            elif said["method"] == "Page.loadEventFired":
                self._loaded.set()
            elif said["method"] == "Runtime.exceptionThrown":
                self.console.append(json.dumps(said["params"]["exceptionDetails"])[:400])
            elif said["method"] == "Log.entryAdded" and said["params"]["entry"]["level"] == "error":
                self.console.append(said["params"]["entry"]["text"])

    def _kill(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._profile.cleanup()
