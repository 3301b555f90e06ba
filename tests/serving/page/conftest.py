"""One Chromium for all tests of the page, because starting it takes seconds."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack
from typing import Any

import pytest

from serving.fake_server import FakeServer
from serving.page.page_files import HEADERS, page_files
from stream.browser.chromium import Chromium


class Page:
    """A browser with the page of a fake server. `console` has the errors that the browser printed."""

    def __init__(self, browser: Chromium, runner: asyncio.Runner) -> None:
        self.browser, self._runner = browser, runner

    def run(self, test: Callable[..., Coroutine[Any, Any, None]], server: FakeServer) -> None:
        """Runs `test(browser)` on the page of `server`, which starts without stored conversations."""

        async def main() -> None:
            self.browser.console.clear()
            await self.browser.size(1400, 900)
            # An animation would be drawn by the CPU, sixty times a second.
            still = {"name": "prefers-reduced-motion", "value": "reduce"}
            await self.browser.do("Emulation.setEmulatedMedia", features=[still])
            async with server.running():
                await self.browser.open(f"{server.url}/")
                await self.browser.wait_for("document.getElementById('model').options.length > 0")
                try:
                    await test(self.browser)
                finally:
                    # Ends what the page is still doing, before the server is closed.
                    await self.browser.open("about:blank")

        server.files, server.file_headers = page_files(), HEADERS
        self._runner.run(main())


@pytest.fixture(scope="session")
def page() -> Iterator[Page]:
    with asyncio.Runner() as runner:
        stack = AsyncExitStack()
        browser = runner.run(stack.enter_async_context(Chromium()))
        try:
            yield Page(browser, runner)
        finally:
            runner.run(stack.aclose())
