"""The chat page in headless Chromium, with a server whose answers are scripted."""

import asyncio
import json
from typing import Any

import pytest

from patience import HANGS_S
from serving.fake_server import Answer, FakeServer
from serving.page.conftest import Page
from serving.page.prometheus_text import Metrics
from stream.browser.chromium import PROGRAM, Chromium

pytestmark = [
    pytest.mark.timeout(2 * HANGS_S),
    pytest.mark.skipif(PROGRAM is None, reason="Chromium is not installed"),
]
ANSWERED = "document.getElementById('stop').hidden && document.querySelectorAll('.message.assistant').length === {}"
LAST = "[...document.querySelectorAll('.message.assistant')].at(-1)"
OUTSIDE = """[...document.querySelectorAll("button, input, textarea, .card, .tiles > div, .bubble, .answer > *")]
  .filter((one) => one.offsetParent && !one.closest("#sidebar:not(.open), .hidden-label"))
  .map((one) => [one, one.getBoundingClientRect()])
  .filter(([, box]) => box.width && (box.left < 0 || box.right > innerWidth))
  .map(([one]) => one.outerHTML.slice(0, 90))"""
UNNAMED = """[...document.querySelectorAll("input, select, textarea, button")]
  .filter((one) => !one.labels?.length && !one.textContent.trim() && !one.ariaLabel).map((one) => one.outerHTML)"""


async def press(browser: Chromium, key: str, text: str = "", **more: object) -> None:
    for kind in ("keyDown", "keyUp"):
        typed = {"text": text} if text and kind == "keyDown" else {}
        await browser.do("Input.dispatchKeyEvent", type=kind, key=key, code=key, **typed, **more)


async def type_question(browser: Chromium, text: str) -> None:
    await browser.run("document.getElementById('question').focus()")
    await browser.do("Input.insertText", text=text)
    await press(browser, "Enter", "\r")


async def click(browser: Chromium, selector: str) -> None:
    await browser.run(f"document.querySelector({json.dumps(selector)}).click()")


async def press_button(browser: Chromium, label: str, scope: str = LAST) -> None:
    found = f"[...({scope}).querySelectorAll('button')].find((one) => one.textContent === {json.dumps(label)})"
    await browser.run(f"{found}.click()")


async def text_of(browser: Chromium, expression: str) -> str:
    return str(await browser.run(f"({expression}).textContent"))


def test_a_conversation(page: Page) -> None:
    def answer(body: dict[str, Any]) -> Answer:
        number = len(server.seen)
        if number == 2:
            return Answer(("word ",) * 400, gap_s=0.01)
        return Answer(("Hello ", "**there**", f" {number}"), first_s=0.12, gap_s=0.02)

    server = FakeServer(answer)

    async def test(browser: Chromium) -> None:
        await type_question(browser, "A <b>question</b>")
        await browser.wait_for(ANSWERED.format(1))
        assert await text_of(browser, f"{LAST}.querySelector('.answer')") == "Hello there 1"
        assert await text_of(browser, f"{LAST}.querySelector('strong')") == "there"
        assert await text_of(browser, "document.querySelector('.bubble')") == "A <b>question</b>"
        stats = await text_of(browser, f"{LAST}.querySelector('.stats')")
        tokens, speed, first = stats.split(" · ")
        assert tokens == "3 tokens" and 5 < float(speed.removesuffix(" tokens/s")) < 60, stats
        assert 115 <= float(first.removeprefix("first after ").removesuffix(" ms")) < 800, stats
        assert await text_of(browser, "document.getElementById('title')") == "A <b>question</b>"

        # Escape stops an answer, which stays as far as it is.
        await type_question(browser, "Second")
        await browser.wait_for(f"{LAST}.querySelector('.answer').textContent.length > 20")
        await press(browser, "Escape")
        await browser.wait_for(ANSWERED.format(2))
        assert (await text_of(browser, f"{LAST}.querySelector('.stats')")).endswith("stopped")
        while server.disconnects != 1:
            await asyncio.sleep(0.01)

        await press_button(browser, "Retry")
        await browser.wait_for(f"{ANSWERED.format(2)} && {LAST}.querySelector('.answer').textContent.endsWith('3')")
        assert [message["role"] for message in server.seen[2]["messages"]] == ["user", "assistant", "user"]

        # An edited question replaces what follows it.
        question = "document.querySelector('.message.user')"
        await press_button(browser, "Edit", question)
        await browser.run(f"{question}.querySelector('textarea').value = 'Another'")
        await press_button(browser, "Send", question)
        await browser.wait_for(ANSWERED.format(1))
        assert server.seen[3]["messages"] == [{"role": "user", "content": "Another"}]

        # Two lines, system prompt and sampling; unset options are left to the server.
        await browser.run(
            """for (const [id, value] of [["set-system", "Be brief."], ["set-temperature", "0.5"], ["set-seed", "7"]]) {
              document.getElementById(id).value = value;
              document.getElementById(id).onchange();
            }"""
        )
        await browser.run("document.getElementById('question').focus()")
        await browser.do("Input.insertText", text="One\ntwo")
        await click(browser, "#send")
        await browser.wait_for(ANSWERED.format(2))
        body = server.seen[4]
        assert body["messages"][0] == {"role": "system", "content": "Be brief."}
        assert body["messages"][-1]["content"] == "One\ntwo" and body["model"] == "tiny"
        assert (body["temperature"], body["seed"]) == (0.5, 7) and "top_p" not in body
        assert browser.console == []

    page.run(test, server)


def test_conversations_are_kept_renamed_and_deleted(page: Page) -> None:
    server = FakeServer()
    titles = "[...document.querySelectorAll('#conversations .name')].map((one) => one.textContent)"

    async def test(browser: Chromium) -> None:
        await type_question(browser, "First question")
        await browser.wait_for(ANSWERED.format(1))
        await click(browser, "#new-chat")
        await type_question(browser, "Second question")
        await browser.wait_for(ANSWERED.format(1))
        await browser.open(f"{server.url}/")
        assert await browser.run(titles) == ["Second question", "First question"]
        assert await text_of(browser, "document.querySelector('.bubble')") == "Second question"
        await browser.run("document.querySelectorAll('#conversations .name')[1].click()")
        assert await text_of(browser, "document.querySelector('.bubble')") == "First question"
        assert await text_of(browser, f"{LAST}.querySelector('.answer')") == "Hello there"

        await click(browser, "#conversations li.current .icon[title=Rename]")
        await browser.do("Input.insertText", text="Renamed <i>")
        await press(browser, "Enter", "\r")
        assert await browser.run(titles) == ["Second question", "Renamed <i>"]
        assert await text_of(browser, "document.getElementById('title')") == "Renamed <i>"
        await type_question(browser, "More")
        await browser.wait_for(ANSWERED.format(2))
        assert await browser.run(titles) == ["Renamed <i>", "Second question"], "the title stays, the latest is first"

        await click(browser, "#conversations li.current .icon[title=Delete]")
        assert await browser.run(titles) == ["Second question"]
        assert await browser.run("document.querySelectorAll('.message').length") == 0
        await click(browser, "#toast button")
        assert await browser.run(titles) == ["Renamed <i>", "Second question"]
        # A conversation that is deleted while it is answered does not come back.
        server.answer = lambda _: Answer(("word ",) * 400, gap_s=0.01)
        await browser.run("document.querySelectorAll('#conversations .name')[0].click()")
        await type_question(browser, "Long")
        await browser.wait_for("!document.getElementById('stop').hidden")
        await click(browser, "#conversations li.current .icon[title=Delete]")
        while server.disconnects != 1:
            await asyncio.sleep(0.01)
        assert await browser.run(titles) == ["Second question"]
        await click(browser, "#toast button")
        assert await browser.run(titles) == ["Renamed <i>", "Second question"]
        # Damaged entries do not hide the others.
        await browser.run("localStorage.setItem('redline.chat.x', '{'), localStorage.setItem('redline.chat.y', '{}')")
        await browser.open(f"{server.url}/")
        assert await browser.run(titles) == ["Renamed <i>", "Second question"]
        assert browser.console == []

    page.run(test, server)


def test_errors_are_sentences_with_a_way_on(page: Page) -> None:
    answers = [
        Answer(status=429, message="the queue is full", headers={"Retry-After": "7"}),
        Answer(status=503, message="draining"),
        Answer(("Half an ", "answer"), gap_s=0.1, cut=True),
        Answer(("Half",), error="the engine ended"),
        Answer(status=400, message="the context is full"),
        Answer(("At last",)),
        Answer(("Again",)),
    ]
    server = FakeServer(lambda _: answers[len(server.seen) - 1])
    trouble = f"{LAST}.querySelector('.trouble')"

    async def test(browser: Chromium) -> None:
        async def said() -> str:
            await browser.wait_for(f"{ANSWERED.format(1)} && !{trouble}.hidden")
            return await text_of(browser, trouble)

        await type_question(browser, "Question")
        assert await said() == "The server is busy (429). Try again in 7 s. The server says: the queue is full"
        await press_button(browser, "Retry")
        await browser.wait_for(f"{trouble}.textContent.includes('503')")
        await press_button(browser, "Retry")
        await browser.wait_for(f"{trouble}.textContent === 'The connection was lost before the answer was complete.'")
        assert await text_of(browser, f"{LAST}.querySelector('.answer')") == "Half an answer"
        await press_button(browser, "Retry")
        await browser.wait_for(f"{trouble}.textContent === 'the engine ended'")
        await press_button(browser, "Retry")
        await browser.wait_for(f"{trouble}.textContent === 'the context is full (400)'")
        # A question without an answer is not sent again with the next one.
        await type_question(browser, "Other question")
        await browser.wait_for(ANSWERED.format(2))
        assert [message["content"] for message in server.seen[-1]["messages"]] == ["Other question"]

        server.key = "the key"
        await press_button(browser, "Retry")
        await browser.wait_for(f"{trouble}.textContent.includes('API key')")
        await press_button(browser, "Open settings")
        assert await browser.run("document.activeElement.id") == "set-key"
        await browser.do("Input.insertText", text="the key")
        await press(browser, "Escape", windowsVirtualKeyCode=27)
        await browser.wait_for("!document.getElementById('settings').open")
        await press_button(browser, "Retry")
        await browser.wait_for(f"{ANSWERED.format(2)} && {LAST}.querySelector('.answer').textContent === 'Again'")
        assert await browser.run("localStorage.getItem('redline.key')") is None, "only for this tab"

    page.run(test, server)


def test_the_engine_view_draws_the_metrics(page: Page) -> None:
    metrics = Metrics(running=3, waiting=1, cache=0.25, tokens=100)
    server = FakeServer(metrics=metrics.text)

    async def test(browser: Chromium) -> None:
        await click(browser, "#show-engine")
        await browser.wait_for("document.getElementById('tile-running').textContent === '3'")
        metrics.running, metrics.tokens, metrics.first_s = 5, 400, [0.02] * 50 + [0.3] * 50
        await browser.wait_for("document.getElementById('tile-running').textContent === '5'")
        rate = float((await text_of(browser, "document.getElementById('tile-tokens')")).replace(",", ""))
        assert 100 < rate < 400, "300 tokens in one to two seconds"
        # Ranks 51 to 100 lie evenly between 0.1 and 0.5: the 95th is 0.1 + 0.4 × 45 / 50.
        assert await text_of(browser, "document.getElementById('tile-first')") == "460 ms"
        assert await text_of(browser, "document.getElementById('tile-cache')") == "25%"
        assert await text_of(browser, "document.getElementById('tile-hits')") == "25%"
        assert "p50 50 ms" in await text_of(browser, "document.getElementById('chart-first')")
        assert "Requests ended: stop12" in await text_of(browser, "document.getElementById('totals')")
        assert await browser.run("document.querySelectorAll('.chart path[d]').length") >= 9
        await check_layout(browser)
        await browser.size(1400, 900)
        server.key = "other"
        await browser.wait_for("!document.getElementById('engine-trouble').hidden")
        await click(browser, "#show-engine")
        assert not await browser.run("document.getElementById('chat').hidden")

    page.run(test, server)


async def check_layout(browser: Chromium) -> None:
    """From phone to desktop widths, nothing overflows and every control has an accessible name."""
    for width in (390, 1280):
        await browser.size(width, 844)
        await asyncio.sleep(0.2)
        assert await browser.run("document.documentElement.scrollWidth") <= width
        assert await browser.run(OUTSIDE) == []
    assert await browser.run(UNNAMED) == []


def test_a_phone_and_the_keyboard(page: Page) -> None:
    server = FakeServer(
        lambda _: Answer(("```\n" + "long " * 100 + "\n```\n\n", "| a | b |\n|-|-|\n| 1 |" + "x" * 300 + " |"))
    )

    async def test(browser: Chromium) -> None:
        await type_question(browser, "wide" * 50)
        await browser.wait_for(ANSWERED.format(1))
        await check_layout(browser)
        await browser.size(390, 844)
        await browser.run("document.getElementById('menu').focus()")
        await press(browser, "Enter", "\r")
        await browser.wait_for("document.activeElement.id === 'new-chat'")
        order = []
        for _ in range(5):
            await press(browser, "Tab", windowsVirtualKeyCode=9)
            order.append(await browser.run("document.activeElement.id || document.activeElement.title"))
        assert order == ["wide" * 14 + "wid…", "Rename", "Delete", "show-engine", "show-settings"]
        await asyncio.sleep(0.3)
        assert await browser.run(OUTSIDE) == []
        await press(browser, "Escape")
        assert await browser.run("document.activeElement.id") == "menu"
        await browser.wait_for("getComputedStyle(document.getElementById('sidebar')).visibility === 'hidden'")
        for theme, ink in (("dark", "rgb(236, 235, 232)"), ("light", "rgb(28, 27, 26)")):
            await browser.run(f"document.documentElement.dataset.theme = '{theme}'")
            assert await browser.run("getComputedStyle(document.body).color") == ink
        assert browser.console == []

    page.run(test, server)
