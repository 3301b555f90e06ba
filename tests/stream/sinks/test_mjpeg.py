"""MJPEG over HTTP: several viewers up to a limit, none of which delays the stream."""

import http.client
import io
import socket
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from PIL import Image

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.stream.sinks.mjpeg import MjpegSink
from redline.stream.sources.synthetic import SyntheticClip
from redline.web.server import MAX_PENDING_PER_ADDRESS

pytestmark = pytest.mark.timeout(HANGS_S)
FRAMES = list(SyntheticClip(24, 40, count=5).frames())


def connected(
    sink: MjpegSink, path: str = "/stream.mjpeg", method: str = "GET", host: str = "127.0.0.1", **headers: str
) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection(host, sink.port, timeout=PATIENCE_S)
    connection.request(method, path, headers=headers)
    return connection.getresponse()


def picture(response: http.client.HTTPResponse) -> np.ndarray:
    assert response.fp.readline() == b"--redline-frame\r\n"
    assert response.fp.readline() == b"Content-Type: image/jpeg\r\n"
    length = int(response.fp.readline().split()[1])
    assert response.fp.readline() == b"\r\n"
    data = response.fp.read(length)
    assert response.fp.readline() == b"\r\n"
    return np.asarray(Image.open(io.BytesIO(data)))


def until_watched(sink: MjpegSink, viewers: int = 1) -> None:
    for _ in range(500):
        if len(sink._viewers) == viewers:
            return
        time.sleep(0.01)
    raise AssertionError("nobody looks")


def test_a_viewer_sees_the_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    sink = MjpegSink(port=0)
    monkeypatch.setattr("redline.stream.sinks.mjpeg.as_square_pixels", None)
    sink.write(FRAMES[0])  # nothing is encoded while nobody looks
    monkeypatch.undo()
    response = connected(sink)
    assert response.status == 200 and "multipart/x-mixed-replace" in response.headers["Content-Type"]
    until_watched(sink)
    for frame in FRAMES:
        sink.write(frame)
        assert np.abs(picture(response).astype(int) - frame.pixels.numpy()).mean() < 8
    sink.close()
    assert response.fp.read() == b"", "the end of the stream is the end for the viewer"
    response.close()


@pytest.mark.parametrize(("aspect", "size"), [(Fraction(4, 3), (24, 53)), (Fraction(8, 9), (27, 40)), (0, (24, 40))])
def test_pixels_are_seen_as_wide_as_they_are(aspect: Fraction, size: tuple[int, int]) -> None:
    sink = MjpegSink(port=0)
    response = connected(sink)
    until_watched(sink)
    sink.write(replace(FRAMES[0], pixel_aspect=aspect))
    seen = picture(response)
    assert seen.shape == (*size, 3)
    assert np.abs(seen.mean((0, 1)) - FRAMES[0].pixels.numpy().mean((0, 1))).max() < 3
    sink.close()


def test_whoever_comes_sees_the_next_frame_first() -> None:
    """Nothing is encoded without viewers, so a new viewer must not get an old frame."""
    sink = MjpegSink(port=0)
    before = connected(sink)
    until_watched(sink)
    sink.write(FRAMES[0])
    picture(before)
    late = connected(sink)
    until_watched(sink, 2)
    time.sleep(0.2)  # long enough to be given what there is
    sink.write(FRAMES[4])
    seen = picture(late).astype(int)
    errors = [np.abs(seen - FRAMES[place].pixels.numpy()).mean() for place in (0, 4)]
    assert errors[1] < 8 < errors[0]
    sink.close()


def test_the_last_frame_is_seen_before_the_end() -> None:
    for _ in range(5):  # whichever thread is first
        sink = MjpegSink(port=0)
        response = connected(sink)
        until_watched(sink)
        sink.write(FRAMES[0])
        sink.close()
        assert picture(response).shape == (24, 40, 3) and response.fp.read() == b""
        response.close()


def test_the_page_shows_the_stream() -> None:
    sink = MjpegSink(port=0)
    assert b"/stream.mjpeg" in connected(sink, "/").read()
    assert connected(sink, "/other").status == 404
    sink.close()


def test_what_it_is_can_be_asked_without_a_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.sinks.mjpeg.MAX_VIEWERS", 0)
    sink = MjpegSink(port=0)
    asked = connected(sink, method="HEAD")
    assert asked.status == 200 and "multipart/x-mixed-replace" in asked.headers["Content-Type"] and not asked.read()
    page = connected(sink, "/", method="HEAD")
    assert page.status == 200 and int(page.headers["Content-Length"]) > 100 and not page.read()
    assert connected(sink, "/other", method="HEAD").status == 404 and connected(sink).status == 503
    sink.close()


def test_viewers_are_few_and_a_place_is_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.sinks.mjpeg.MAX_VIEWERS", 2)
    sink = MjpegSink(port=0)
    first, second = connected(sink), connected(sink)
    until_watched(sink, 2)
    assert connected(sink).status == 503
    first.close()
    for _ in range(200):
        sink.write(FRAMES[0])
        if len(sink._viewers) == 1:
            break
        time.sleep(0.01)
    assert connected(sink).status == 200
    sink.close()
    second.close()


def test_viewers_who_leave_while_nothing_comes_give_their_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.sinks.mjpeg.MAX_VIEWERS", 2)
    sink = MjpegSink(port=0)
    for _ in range(2):
        with socket.create_connection(("127.0.0.1", sink.port)) as viewer:
            viewer.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            assert b"200" in viewer.recv(100)
    until_watched(sink, 0)  # no frame was needed to see that they are gone
    response = connected(sink)
    assert response.status == 200
    time.sleep(1.2)
    sink.write(FRAMES[0])
    assert picture(response).shape == (24, 40, 3), "whoever waits is not given up"
    response.close()
    sink.close()


def test_a_viewer_that_takes_nothing_slows_nothing() -> None:
    sink = MjpegSink(port=0)
    port = sink.port
    with socket.create_connection(("127.0.0.1", port)) as dead:
        dead.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        dead.sendall(f"GET /stream.mjpeg HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n\r\n".encode())
        until_watched(sink)
        large = next(SyntheticClip(300, 400, count=1).frames())
        slowest = 0.0
        for _ in range(60):
            began = time.monotonic()
            sink.write(large)
            slowest = max(slowest, time.monotonic() - began)
        # Who waited for it would do so until it is given up, 10 s later.
        assert slowest < 5
        began = time.monotonic()
        sink.close()
        assert time.monotonic() - began < 8


def test_a_key_is_asked_for_and_other_names_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RedlineError, match=r"^'0\.0\.0\.0' can be reached from other machines: give a --key, "):
        MjpegSink("0.0.0.0", 0)
    for short in ("", "a"):  # an empty one is what a variable that is not set gives
        with pytest.raises(RedlineError, match="the key must have at least 12 characters"):
            MjpegSink("0.0.0.0", 0, key=short)
    sink = MjpegSink("0.0.0.0", 0, key="a b&c, and more")
    assert sink.url.endswith("/stream.mjpeg?key=a%20b%26c%2C%20and%20more")
    assert connected(sink).status == 403 and connected(sink, "/?key=wrong").status == 403
    with monkeypatch.context() as patch:  # the key comes before the number of viewers
        patch.setattr("redline.stream.sinks.mjpeg.MAX_VIEWERS", 0)
        assert connected(sink).status == 403
    assert connected(sink, "/?key=a%20b%26c%2C%20and%20more").status == 200
    sink.close()
    own = MjpegSink(port=0)
    assert connected(own, "/", Host="evil.example").status == 403
    own.close()


def test_the_addresses_are_those_of_the_stream_and_of_its_page_that_others_can_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("redline.web.access.reachable_hosts", lambda host: ("192.168.1.7", "10.0.0.3"))
    sink = MjpegSink("0.0.0.0", 0, key="a long enough key")
    query = "?key=a%20long%20enough%20key"
    assert sink.urls == tuple(
        f"http://{host}:{sink.port}/{path}{query}"
        for path in ("stream.mjpeg", "")
        for host in ("192.168.1.7", "10.0.0.3")
    )
    sink.close()


def test_silent_connections_do_not_keep_a_viewer_out() -> None:
    sink = MjpegSink(port=0)
    with ExitStack() as held:
        silent = [held.enter_context(socket.create_connection(("127.0.0.1", sink.port))) for _ in range(80)]
        response = connected(sink)
        assert response.status == 200
        until_watched(sink)
        sink.write(FRAMES[0])
        assert picture(response).shape == (24, 40, 3)
        # Whoever has waited longest was closed; a viewer that was let in is none of those who wait.
        silent[0].settimeout(PATIENCE_S)
        assert silent[0].recv(1) == b""
        for _ in range(MAX_PENDING_PER_ADDRESS):
            held.enter_context(socket.create_connection(("127.0.0.1", sink.port)))
        assert connected(sink, "/").status == 200
        sink.write(FRAMES[1])
        assert picture(response).shape == (24, 40, 3)
        response.close()
    sink.close()


def test_an_address_that_cannot_be_parsed_is_a_bad_request() -> None:
    sink = MjpegSink(port=0)
    with socket.create_connection(("127.0.0.1", sink.port), PATIENCE_S) as viewer:
        viewer.sendall(b"GET http://[::1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        assert viewer.recv(100).split()[1] == b"400"
    sink.close()


def test_a_request_has_one_deadline_however_it_trickles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.web.server.ANSWERED_S", 0.3)
    sink = MjpegSink(port=0)
    with socket.create_connection(("127.0.0.1", sink.port)) as slow:
        slow.settimeout(0.05)
        slow.sendall(b"GET /stream.mjpeg HTTP/1.1\r\nX-Slow: ")
        end_s = time.monotonic() + 5
        while time.monotonic() < end_s:
            try:
                slow.sendall(b"x")
                if slow.recv(100) == b"":
                    break
            except TimeoutError:
                continue
            except ConnectionError:
                break
        else:
            raise AssertionError("the connection stays open for as long as bytes come")
    sink.close()


def test_the_newer_kind_of_address() -> None:
    with socket.socket(socket.AF_INET6) as trial:
        try:
            trial.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    sink = MjpegSink("::1", 0)
    assert sink.url.startswith("http://[::1]:") and connected(sink, "/", host="::1").status == 200
    sink.close()


def test_other_web_sites_cannot_embed_the_stream() -> None:
    sink = MjpegSink(port=0)
    assert connected(sink, **{"Sec-Fetch-Site": "cross-site"}).status == 403
    own = connected(sink, "/", **{"Sec-Fetch-Site": "same-origin"})
    assert own.status == 200 and own.headers["Cross-Origin-Resource-Policy"] == "same-origin"
    sink.close()


def test_a_port_that_is_taken_is_reported() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(RedlineError, match=rf"^cannot listen on 127\.0\.0\.1:{port}: .*\.$"):
            MjpegSink(port=port)
    with pytest.raises(RedlineError, match=r"invalid port"):
        MjpegSink(port=70_000)


def test_many_viewers_at_once() -> None:
    sink, seen = MjpegSink(port=0), []

    def look() -> None:
        response = connected(sink)
        seen.append(picture(response).shape)
        response.close()

    viewers = [threading.Thread(target=look) for _ in range(6)]
    for viewer in viewers:
        viewer.start()
    for _ in range(500):
        sink.write(FRAMES[0])
        if len(seen) == 6:
            break
        time.sleep(0.01)
    for viewer in viewers:
        viewer.join()
    sink.close()
    assert seen == [(24, 40, 3)] * 6
