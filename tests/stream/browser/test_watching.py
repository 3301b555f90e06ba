"""Other pages watch while one page sends its camera."""

import asyncio
from collections.abc import Callable

import numpy as np
import pytest

from patience import HANGS_S
from stream.browser.clients import ColourTrack, open_page, picture_of
from stream.browser.conftest import Running

pytestmark = pytest.mark.timeout(HANGS_S)


def test_a_second_page_watches_what_the_camera_of_the_first_becomes(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(size=(48, 64))
    grey = np.full((48, 64, 3), 40, np.uint8)

    async def main() -> None:
        async with open_page(stream.page.url) as sender, open_page(stream.page.url) as before:
            assert (await before.hear("hello"))["camera_taken"] is False
            sent = await sender.offer(["camera", "output"], ColourTrack(grey))
            await picture_of(sent["output"])
            async with open_page(stream.page.url) as viewer:
                assert (await viewer.hear("hello"))["camera_taken"] is True
                seen = await viewer.offer(["output", "input"])
                assert np.abs((await picture_of(seen["output"])).astype(int) - 215).mean() < 10
                assert np.abs((await picture_of(seen["input"])).astype(int) - 40).mean() < 10

    asyncio.run(main())
