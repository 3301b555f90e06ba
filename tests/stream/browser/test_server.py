"""The page over HTTP: files, access control, and invalid requests and messages."""

import asyncio
import logging
import re
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import urlopen

import pytest
import torch
from aiohttp import ClientSession, WSMsgType, WSServerHandshakeError

import redline.stream.browser as browser
from forked_python import ForkedPython
from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.browser import Page, serve
from redline.stream.browser.messages import LONGEST_MESSAGE_BYTES
from redline.stream.browser.page_session import MAX_MESSAGES_PER_SECOND
from redline.stream.browser.server import MAX_PAGES, collect_metrics
from redline.stream.frame_model import ModelControls
from redline.stream.latency import FrameTimes, Latency
from redline.stream.settings import LiveSettings, Settings
from redline.web.access import urls
from redline.web.server import MAX_PENDING_PER_ADDRESS
from stream.browser.clients import open_page

pytestmark = pytest.mark.timeout(HANGS_S)
KEY = "correct+horse/battery staple"
NEEDED = {"settings": LiveSettings(), "latency": Latency(), "as_source": True, "as_sink": True}


async def get(url: str, **headers: str) -> tuple[int, str, dict]:
    async with ClientSession() as http, http.get(url, headers=headers, allow_redirects=False) as answer:
        return answer.status, await answer.text(), dict(answer.headers)


def test_the_page_loads_nothing_from_elsewhere(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server()
        for path, kind in (
            ("", "text/html"),
            ("base.css", "text/css"),
            ("page.css", "text/css"),
            ("page.js", "text/javascript"),
            ("settings.js", ""),
            ("charts.js", ""),
        ):
            status, text, headers = await get(page.url + path)
            assert status == 200 and kind in headers["Content-Type"] and len(text) > 1000
            assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self'")
            assert headers["X-Content-Type-Options"] == "nosniff" and headers["Cache-Control"] == "no-store"
            elsewhere = [url for url in re.findall(r"https?://[^\"'`\s)]+", text) if "www.w3.org/2000/svg" not in url]
            assert elsewhere == [] and "@import" not in text
        for path in ("../conftest.py", "page.py", "static/page.js", "%2e%2e/site.py"):
            assert (await get(page.url + path))[0] == 404

    asyncio.run(main())


def test_a_strange_host_or_origin_gets_nothing(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server()
        status, text, _ = await get(page.url, Host="evil.example")
        assert status == 403 and text == "the Host header 'evil.example' does not name this machine."
        assert (await get(page.url, Origin="http://evil.example"))[0] == 403
        for origin in ("http://evil.example", "null", "http://127.0.0.1:1"):
            with pytest.raises(WSServerHandshakeError, match="403"):
                async with open_page(page.url, Origin=origin):
                    pass
        async with ClientSession() as http:
            with pytest.raises(WSServerHandshakeError, match="403"):
                await http.ws_connect(f"{page.url}socket")

    asyncio.run(main())


def test_every_request_needs_the_key_and_the_address_bar_does_not_keep_it(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server(host="0.0.0.0", key=KEY)
        port = urlsplit(page.url).port
        base, local = f"http://127.0.0.1:{port}/", f"http://127.0.0.1:{port}/?{urlsplit(page.url).query}"
        assert page.urls == urls("http", "0.0.0.0", port, "/", KEY) and KEY not in page.url, "the key is quoted"
        for path in ("", "page.js", "socket", "nothing", "?key=wrong", "?key=", "page.js?key=" + KEY[:-1]):
            status, text, _ = await get(base + path, Origin=base[:-1])
            assert (status, text) == (403, "the key is missing or wrong: open the address that redline printed.")
        status, _, headers = await get(local)
        assert status == 303 and headers["Location"] == "/"
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie and KEY not in cookie
        assert (await get(base, Cookie=cookie.partition(";")[0]))[0] == 200
        assert (await get(base, Cookie=cookie.partition(";")[0][:-1]))[0] == 403
        assert (await get(base, Authorization=f"Bearer {KEY}"))[0] == 200
        async with open_page(local) as client:
            assert (await client.hear("hello"))["sink"] is True

    asyncio.run(main())


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"host": "0.0.0.0"}, r"^'0\.0\.0\.0' can be reached from other machines"),
        ({"port": 70_000}, r"^invalid port 70000: it must be from 0 to 65535\.$"),
        ({"host": "192.0.2.77", "key": KEY}, r"^cannot listen on 192\.0\.2\.77:\d+: .*\.$"),
        ({"as_source": False, "as_sink": False}, r"^a page must be the source of a stream, its output, or both\.$"),
        ({"size": (8, 8)}, r"^invalid size 8×8 for a browser"),
        (
            {"controls": ModelControls(8, ("a",))},
            r"^there are 1 control names, but",
        ),
        ({"certificate": Path("missing.pem")}, r"^'missing\.pem' is not a PEM file with a key and its certificate"),
    ],
)
def test_what_cannot_be_served_is_reported(options: dict, sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        serve(**(NEEDED | {"port": 0} | options))


def test_a_port_in_use_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(RedlineError, match="the port is in use"):
        serve(port=taken.getsockname()[1], **NEEDED)


def test_missing_packages_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(browser, "find_spec", lambda name: None)
    with pytest.raises(RedlineError, match=r"needs aiortc and aiohttp: pip install 'redline\[browser\]'\.$"):
        serve(port=0, **NEEDED)


def test_importing_needs_neither_aiortc_nor_aiohttp(forked_python: ForkedPython) -> None:
    code = "import sys; sys.modules['aiortc'] = sys.modules['aiohttp'] = None; import redline.stream.browser"
    assert forked_python.run(code).returncode == 0


def test_https_with_a_certificate(open_server: Callable[..., Page], tmp_path: Path) -> None:
    pem = tmp_path / "page.pem"
    pem.write_bytes(self_signed())
    page = open_server(certificate=pem)
    assert page.url.startswith("https://127.0.0.1:")
    # Not aiohttp, whose event loop may end before the encrypted connection is closed.
    with urlopen(page.url, context=ssl.create_default_context(cafile=str(pem)), timeout=PATIENCE_S) as answer:
        assert answer.status == 200


def self_signed() -> bytes:
    import datetime
    import ipaddress

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "page")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(1))
        .not_valid_after(now + datetime.timedelta(1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), False)
        .sign(key, hashes.SHA256())
    )
    encoding = serialization.Encoding.PEM
    private = key.private_bytes(encoding, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(encoding)


def test_bad_messages_are_answered_and_the_page_goes_on(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        async with open_page(open_server().url) as client:
            await client.hear("hello")
            for text in ("nonsense", "[" * 50_000, '{"type": "shout"}'):
                await client.socket.send_str(text)
                assert (await client.hear("error"))["text"].endswith(".")
            await client.socket.send_str('{"type": "ping", "sent": 1}'.ljust(LONGEST_MESSAGE_BYTES + 1))
            assert (await client.hear("error"))["text"] == "the message has 65537 bytes; at most 65536 are allowed."
            await client.socket.send_bytes(b"\x00" * 100)
            assert (await client.hear("error"))["text"] == "the message is not text."
            await client.say(type="offer", sdp="v=0\r\nm=video nonsense", lines=["output"])
            assert (await client.hear("error"))["about"] == "offer"
            await client.say(type="ping", sent=7.25)
            assert (await client.hear("pong"))["sent"] == 7.25

    asyncio.run(main())


def test_a_flood_ends_that_page_only(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server()
        async with open_page(page.url) as calm, open_page(page.url) as loud, open_page(page.url) as huge:
            for _ in range(3 * MAX_MESSAGES_PER_SECOND):
                await loud.say(type="ping", sent=1)
            assert "too many messages" in (await loud.hear("error"))["text"]
            with pytest.raises(ConnectionError):
                await loud.hear("never")
            await huge.socket.send_str("x" * (5 * LONGEST_MESSAGE_BYTES))
            with pytest.raises(ConnectionError):
                await huge.hear("never")
            await calm.say(type="ping", sent=2)
            assert (await calm.hear("pong"))["sent"] == 2

    asyncio.run(main())


def test_the_number_of_pages_is_limited(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server()
        async with ClientSession() as http:
            opened = [await http.ws_connect(f"{page.url}socket", origin=page.url[:-1]) for _ in range(MAX_PAGES)]
            async with open_page(page.url) as late:
                assert (await late.hear("error"))["text"] == f"too many open pages: at most {MAX_PAGES} are allowed."
                assert (await late.socket.receive()).type in (WSMsgType.CLOSE, WSMsgType.CLOSED)
            await opened[0].close()
            async with open_page(page.url) as again:
                await again.hear("hello")

    asyncio.run(main())


def test_half_sent_requests_are_few_and_keep_nobody_out(open_server: Callable[..., Page]) -> None:
    page = open_server()
    port = urlsplit(page.url).port
    with ExitStack() as held:
        silent = []
        for _ in range(100):
            connection = held.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Half: ")
            silent.append(connection)
        assert asyncio.run(get(page.url))[0] == 200
        for connection in silent[:-MAX_PENDING_PER_ADDRESS]:
            connection.settimeout(PATIENCE_S)
            with suppress(ConnectionResetError):
                assert connection.recv(1) == b"", "whoever has waited longest is closed"


def test_what_is_not_an_open_page_has_a_deadline(
    open_server: Callable[..., Page], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("redline.web.server.ANSWERED_S", 0.5)
    page = open_server()

    async def main() -> None:
        async with open_page(page.url) as client:
            await client.hear("hello")
            with socket.create_connection(("127.0.0.1", urlsplit(page.url).port)) as silent:
                silent.settimeout(PATIENCE_S)
                with suppress(ConnectionResetError):
                    assert await asyncio.to_thread(silent.recv, 1) == b""
            await client.say(type="ping", sent=1)
            assert (await client.hear("pong"))["sent"] == 1, "an open page has none"

    asyncio.run(main())


def test_malformed_requests_write_one_short_line(
    open_server: Callable[..., Page], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    page = open_server()
    port = urlsplit(page.url).port
    monkeypatch.setattr(logging.getLogger(), "handlers", [])  # as outside of a test, where nothing is set up
    for junk in (b"\x16\x03\x01\x02\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"NONSENSE\r\n\r\n") * 5:
        with socket.create_connection(("127.0.0.1", port)) as connection:
            connection.settimeout(PATIENCE_S)
            connection.sendall(junk)
            with suppress(ConnectionResetError):
                assert connection.recv(100).startswith(b"HTTP/1.")
    logged = capfd.readouterr().err.splitlines()
    assert len(logged) == 1 and logged[0].startswith("refused a malformed HTTP request (") and len(logged[0]) < 100


def test_settings_are_changed_for_all_and_errors_come_back(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        live = LiveSettings(Settings(seed=2**62 + 1, control=(0.0, 0.5)))
        page = open_server(settings=live, controls=ModelControls(4, ("Warm", "Bright")))
        async with open_page(page.url) as one, open_page(page.url) as other:
            hello = await one.hear("hello")
            assert hello["control_names"] == ["Warm", "Bright"] and hello["most_steps"] == 4
            assert hello["settings"]["seed"] == str(2**62 + 1), "not rounded to what a page's number holds"
            await other.hear("hello")
            await one.say(type="settings", settings={"strength": 0.75, "steps": 3, "control": [1, -0.5]})
            for client in (one, other):
                said = (await client.hear("settings"))["settings"]
                assert (said["strength"], said["steps"], said["control"]) == (0.75, 3, [1, -0.5])
            assert live.now() == Settings(0.75, 3, 2**62 + 1, (1.0, -0.5))
            for wrong, sentence in (
                ({"strength": 1.5}, "strength must be a number from 0 to 1, not 1.5."),
                ({"steps": 2.5}, "steps must be a whole number from 1 to 1000, not 2.5."),
                ({"steps": 5}, "settings: a page may set at most 4 steps."),
                ({"mood": 1}, "unknown setting 'mood'"),
                ({"control": [1]}, "settings: the control vector of this model has 2 numbers."),
                ({"control": 1}, "settings: the control vector of this model has 2 numbers."),
            ):
                await one.say(type="settings", settings={"seed": 5} | wrong)
                error = await one.hear("error")
                assert error["about"] == "settings" and error["text"].startswith(sentence)
                assert error["settings"]["steps"] == 3, "what is in force comes with it"
            assert live.now().seed == 2**62 + 1, "nothing of a wrong change is done"

    asyncio.run(main())


def test_what_is_changed_elsewhere_is_seen_by_the_pages_and_can_be_changed_there(
    open_server: Callable[..., Page],
) -> None:
    async def main() -> None:
        live = LiveSettings(Settings(control=(0.0, 0.0, 0.25)))
        page = open_server(settings=live, controls=ModelControls(8, ("Warm", "Bright"), 0.0))
        async with open_page(page.url) as client:
            hello = await client.hear("hello")
            assert hello["control_names"] == ["Warm", "Bright", "Control 3"] and hello["control_least"] == [0, 0, -1]
            for control, told in (((0.5,), [0.5, 0, 0]), ((), [0, 0, 0]), ((1, 2, 3, 4), [1, 2, 3, 4])):
                live.change(control=control, strength=0.125 * (1 + len(control)))
                said = (await client.hear("settings"))["settings"]
                assert said["control"] == told and said["strength"] == live.now().strength
                # A slider sends all of them, with its own changed.
                await client.say(type="settings", settings={"control": [0.75, *told[1:]]})
                assert (await client.hear("settings"))["settings"]["control"] == [0.75, *told[1:]]

    asyncio.run(main())


def test_figures_are_those_of_the_stream(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        latency = Latency()
        latency.record(FrameTimes(0.001, 0.002, 0, 0.03, 0, 0.004, 1.0))
        latency.drop("compute busy", 3)
        shares = iter([None, *[0.25] * 100])
        async with open_page(open_server(latency=latency, busy_share=lambda: next(shares)).url) as client:
            said = await client.hear("figures")
            while said["busy_share"] is None:
                said = await client.hear("figures")
            assert said["busy_share"] == 0.25 and client.said[0]["device"] == "cpu"
        assert said["report"]["stages"]["compute"]["p99_s"] == 0.03 and said["report"]["drops"] == {"compute busy": 3}
        assert said["report"]["latency"]["p50_s"] == pytest.approx(0.037) and said["report"]["frames"] == 1
        assert said["memory"]["process_bytes"] > 2**20 and said["images"] == {"input": None, "output": None}

    asyncio.run(main())


def test_closing_tells_the_pages_and_may_be_done_twice(open_server: Callable[..., Page]) -> None:
    async def main() -> None:
        page = open_server()
        async with open_page(page.url) as client:
            await client.hear("hello")
            closing = asyncio.create_task(asyncio.to_thread(page.close))
            assert (await client.hear("ended"))["text"] == "The stream has ended."
            with pytest.raises(ConnectionError):
                await client.hear("never")
            await closing
        page.close()
        with pytest.raises(OSError, match="Cannot connect"):
            await get(page.url)

    asyncio.run(main())


def test_memory_is_that_of_the_device_of_the_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, held in (("memory_allocated", 100), ("memory_reserved", 200)):
        monkeypatch.setattr(torch.cuda, name, lambda device=None, held=held: held + torch.device(device).index)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    memory = collect_metrics(Latency(), {}, 0.0, torch.device("cuda:1"), None)["memory"]
    assert (memory["gpu_bytes"], memory["gpu_held_bytes"]) == (101, 201)
    assert "gpu_bytes" not in collect_metrics(Latency(), {}, 0.0, torch.device("cpu"), None)["memory"]
