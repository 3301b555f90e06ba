"""The page in headless Chromium, which sends its fake camera and shows the output."""

import asyncio
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from patience import HANGS_S, PATIENCE_S
from redline.stream.frame_model import ModelControls
from redline.stream.settings import LiveSettings, Settings
from redline.stream.sources.synthetic import SyntheticClip
from redline.stream.sources.video_file import VideoFile
from redline.stream.sources.wrappers import Paced
from stream.browser.chromium import PROGRAM, Chromium
from stream.browser.conftest import Running
from upscale.video.clips import make_clip

pytestmark = [
    pytest.mark.timeout(2 * HANGS_S),
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
]
# Camera → VP8 → inverted → VP8 → page: what two codecs at live bit rates do to flat colours.
NEAR = 25
WHERE = [(0.5, 0.9), (0.3, 0.8), (0.7, 0.8), (0.1, 0.5), (0.9, 0.5)]
COLOURS = """(id) => {
  const video = document.querySelector(`#${id} video`), canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [video.videoWidth, video.videoHeight];
  const drawing = canvas.getContext("2d");
  drawing.drawImage(video, 0, 0);
  const at = (x, y) => drawing.getImageData(x * canvas.width | 0, y * canvas.height | 0, 1, 1).data;
  return WHERE.map(([x, y]) => [...at(x, y)].slice(0, 3));
}""".replace("WHERE", str([list(at) for at in WHERE]))


async def colours(browser: Chromium, id_: str) -> np.ndarray:
    return np.array(await browser.run(f"({COLOURS})('{id_}')"), float)


def number(id_: str) -> str:
    return f"parseFloat(document.getElementById('{id_}').textContent.replace(',', ''))"


OUTSIDE = """[...document.querySelectorAll("button, input, video, .card, .tiles > div")]
  .filter((element) => element.offsetParent).map((element) => element.getBoundingClientRect())
  .filter((box) => box.left < 0 || box.right > innerWidth || !box.width).length"""
UNNAMED = """[...document.querySelectorAll("input, select, button")]
  .filter((element) => !element.labels?.length && !element.textContent.trim()).length"""
P50 = "[...document.querySelectorAll('#stages tr')].map((row) => row.querySelector('.n').textContent)"
SLIDE = """(id, to) => {
  const slider = document.getElementById(id);
  slider.value = to;
  slider.dispatchEvent(new Event("input"));
}"""


async def check_layout(browser: Chromium) -> None:
    """From phone to desktop widths, nothing overflows and every control has an accessible name."""
    for width in (390, 768, 1280):
        await browser.size(width, 900)
        await asyncio.sleep(0.3)
        assert await browser.run("document.documentElement.scrollWidth") <= width
        assert await browser.run(OUTSIDE) == 0
    assert await browser.run(UNNAMED) == 0


def test_the_camera_goes_in_and_comes_back_inverted(run_stream: Callable[..., Running]) -> None:
    settings = LiveSettings(Settings(control=(0.0,)))
    shown = {"controls": ModelControls(8, ("Warmth",)), "busy_share": lambda: 0.374}
    stream = run_stream(size=(240, 320), settings=settings, key="a key for this test", **shown)

    async def main() -> None:
        async with Chromium() as browser:
            await browser.open(stream.page.url)
            await browser.wait_for("!document.getElementById('start').disabled")
            assert "key" not in str(await browser.run("location.href")), "the key leaves the address bar"
            await browser.run("document.getElementById('start').focus()")
            for kind in ("keyDown", "keyUp"):
                await browser.do("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r")
            await browser.wait_for(f"{number('shown')} > 10")
            sent, shown = await colours(browser, "input"), await colours(browser, "output")
            assert np.abs(sent + shown - 255).max() < NEAR
            assert np.abs(sent - shown).max() > 60, "what is shown is not what was sent"

            await browser.wait_for(
                f"{number('tile-rate')} > 1 && {number('tile-p99')} > 0 && {number('tile-trip')} > 0"
            )
            assert await browser.run("document.getElementById('tile-busy').textContent") == "37 %"
            assert await browser.run("document.getElementById('busy-title').textContent") == "CPU utilization"
            title = str(await browser.wait_for("document.getElementById('title').textContent"))
            assert title.startswith("Live at ") and title.endswith(" frames per second")
            # Six stages and their sum; from there three to this screen, and all of it.
            await browser.wait_for("document.querySelectorAll('#stages tr').length === 11")
            p50 = [float(one) for one in await browser.run(P50)]
            assert p50[-1] >= p50[6] and all(one >= 0 for one in p50) and p50[7] > 0 < p50[9]
            assert await browser.run("document.querySelectorAll('.chart path[d]').length") >= 5
            await browser.wait_for(f"{number('decoding')} > 0 && {number('age')} > 0")

            for id_, to in (("set-strength", 0.9), ("set-steps", 3), ("set-seed", 1234), ("set-control-0", -0.25)):
                await browser.run(f"({SLIDE})('{id_}', {to})")
            async with asyncio.timeout(PATIENCE_S):
                while settings.now() != Settings(0.9, 3, 1234, (-0.25,)):
                    await asyncio.sleep(0.05)
            await check_layout(browser)

            await browser.run("document.getElementById('start').click()")
            await browser.wait_for("document.getElementById('start').textContent === 'Start'")
            async with asyncio.timeout(PATIENCE_S):
                while not stream.told:
                    await asyncio.sleep(0.05)
            frames = stream.pipeline.latency.report().frames
            await browser.run("document.getElementById('start').click()")
            async with asyncio.timeout(PATIENCE_S):
                while stream.pipeline.latency.report().frames < frames + 5:
                    await asyncio.sleep(0.05)
            assert browser.console == []

    asyncio.run(main())
    assert stream.is_alive and stream.told[0].startswith("the browser stopped sending.")


def test_a_second_browser_watches(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(size=(240, 320))
    button = "document.getElementById('{}')"

    async def main() -> None:
        async with Chromium() as sender, Chromium() as viewer:
            for browser in (sender, viewer):
                await browser.open(stream.page.url)
                await browser.wait_for(f"!{button.format('start')}.disabled && !{button.format('watch')}.hidden")
            await sender.run(f"{button.format('start')}.click()")
            await sender.wait_for(f"{number('shown')} > 10")
            await viewer.run(f"{button.format('watch')}.click()")
            await viewer.wait_for(f"{number('shown')} > 5 && document.querySelector('#input video').videoWidth === 320")
            sent, shown = await colours(viewer, "input"), await colours(viewer, "output")
            assert np.abs(sent + shown - 255).max() < NEAR
            # Who comes while another page sends watches without being asked.
            await viewer.open(stream.page.url)
            await viewer.wait_for(f"{number('shown')} > 5 && {button.format('watch')}.hidden")
            assert sender.console == viewer.console == []

    asyncio.run(main())


def test_a_prompt_is_sent_when_it_is_finished(run_stream: Callable[..., Running]) -> None:
    settings = LiveSettings(Settings(prompt="a bridge"))
    clip = Paced(SyntheticClip(96, 128, count=600, rate=10, motion=(0, 0)))
    stream = run_stream(source=clip, settings=settings, controls=ModelControls(takes_prompt=True))

    async def main() -> None:
        async with Chromium() as browser:
            await browser.open(stream.page.url)
            field = "document.getElementById('set-prompt')"
            await browser.wait_for(f"{field} && {field}.value === 'a bridge'")
            await browser.run(f"{field}.focus(), {field}.select()")
            await browser.do("Input.insertText", text="a <b>bridge</b> at night")
            await asyncio.sleep(0.5)
            assert settings.now().prompt == "a bridge", "not while it is written"
            for kind in ("keyDown", "keyUp"):
                await browser.do("Input.dispatchKeyEvent", type=kind, key="Enter", code="Enter", text="\r")
            async with asyncio.timeout(PATIENCE_S):
                while settings.now().prompt != "a <b>bridge</b> at night":
                    await asyncio.sleep(0.05)
            settings.change(prompt="by another page")
            await browser.run(f"({SLIDE})('set-strength', 0.7)")
            await browser.wait_for(f"{field}.value === 'by another page'")
            await check_layout(browser)
            assert browser.console == []

    asyncio.run(main())


def test_a_page_without_a_camera_shows_input_and_output_and_the_end(run_stream: Callable[..., Running]) -> None:
    stream = run_stream(source=Paced(SyntheticClip(120, 161, count=600, rate=30, motion=(0, 0))))

    async def main() -> None:
        async with Chromium() as browser:
            await browser.open(stream.page.url)
            both = [f"document.querySelector('#{id_} video').videoWidth === 162" for id_ in ("input", "output")]
            await browser.wait_for(" && ".join(both))
            await browser.wait_for(f"{number('shown')} > 5")
            sent, shown = await colours(browser, "input"), await colours(browser, "output")
            assert np.abs(sent + shown - 255).max() < NEAR
            stream.pipeline.stop()
            await browser.wait_for("document.getElementById('title').textContent === 'The stream has ended.'")
            assert browser.console == []

    asyncio.run(main())


SEEN = """(id) => {
  const video = document.querySelector(`#${id} video`), box = video.getBoundingClientRect();
  return [video.videoWidth, video.videoHeight, box.width / box.height];
}"""


def test_a_video_with_wide_pixels_is_seen_in_its_own_shape(run_stream: Callable[..., Running], tmp_path: Path) -> None:
    make_clip(tmp_path / "wide.mp4", frames=400, size=(144, 116), pixel_aspect=Fraction(16, 9))
    stream = run_stream(source=Paced(VideoFile(tmp_path / "wide.mp4")))

    async def main() -> None:
        async with Chromium() as browser:
            await browser.open(stream.page.url)
            await browser.wait_for(f"{number('shown')} > 5")
            await browser.wait_for("document.querySelector('#output .detail').textContent")
            for width in (390, 1280):
                await browser.size(width, 900)
                await asyncio.sleep(0.3)
                for id_ in ("input", "output"):
                    across, down, shape = await browser.run(f"({SEEN})('{id_}')")
                    assert (across, down) == (256, 116) and abs(shape - 256 / 116) < 0.02
            detail = await browser.run("document.querySelector('#input .detail').textContent")
            assert detail == "144 × 116, shown at 256 × 116"
            await browser.shot(tmp_path / "page.png")

    asyncio.run(main())
