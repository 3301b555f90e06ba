"""A minimal RTSP camera: H.264 over one connection, one frame per call."""

import socket
import struct
import threading
from contextlib import suppress
from fractions import Fraction
from types import TracebackType
from typing import BinaryIO

import av
import numpy as np
from av.video.frame import VideoFrame

_CLOCK, _RATE = 90_000, 25
_SDP = (
    "v=0\r\no=- 0 0 IN IP4 127.0.0.1\r\ns=camera\r\nt=0 0\r\n"
    "m=video 0 RTP/AVP 96\r\na=rtpmap:96 H264/90000\r\na=control:0\r\n"
)


class RtspCamera:
    """Each frame has one shade of grey, to identify it; `playing` is set while a client plays."""

    def __init__(self, height: int = 48, width: int = 64) -> None:
        self._size = (height, width)
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"rtsp://127.0.0.1:{self._server.getsockname()[1]}/live"
        self.playing = threading.Event()
        self.connections = 0
        self._viewer: socket.socket | None = None
        self._encoder = self._new_encoder()
        self._shown = self._packets = 0
        self._thread = threading.Thread(target=self._serve)

    def __enter__(self) -> "RtspCamera":
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self.hang_up()
        self._thread.join()
        self._server.close()

    def hang_up(self) -> None:
        if self._viewer is not None:
            with suppress(OSError):  # the other end may have been quicker
                self._viewer.shutdown(socket.SHUT_RDWR)

    def show(self, grey: int) -> None:
        """Sends one frame at once; timestamps are 1/25 s apart."""
        picture = VideoFrame.from_ndarray(np.full((*self._size, 3), grey, np.uint8), format="rgb24")
        picture.pts, picture.time_base = self._shown, Fraction(1, _RATE)
        for packet in self._encoder.encode(picture):
            units = [unit for unit in bytes(packet).replace(b"\0\0\0\1", b"\0\0\1").split(b"\0\0\1") if unit]
            for unit in units:
                self._send(unit, is_last=unit is units[-1])
        self._shown += 1

    def _send(self, unit: bytes, is_last: bool) -> None:
        time = self._shown * _CLOCK // _RATE
        head = struct.pack(">BBHII", 0x80, 96 | (0x80 if is_last else 0), self._packets & 0xFFFF, time, 1)
        self._packets += 1
        assert self._viewer is not None
        self._viewer.sendall(struct.pack(">BBH", 0x24, 0, len(head + unit)) + head + unit)

    def _new_encoder(self) -> av.VideoCodecContext:
        encoder = av.CodecContext.create("libx264", "w")
        encoder.height, encoder.width, encoder.pix_fmt = *self._size, "yuv420p"
        encoder.time_base, encoder.framerate = Fraction(1, _RATE), Fraction(_RATE)
        encoder.options = {"preset": "ultrafast", "tune": "zerolatency", "g": "5", "x264-params": "repeat-headers=1"}
        return encoder

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            self._viewer = connection
            with connection, connection.makefile("rb") as asked:
                self._answer(connection, asked)
            self.playing.clear()

    def _answer(self, connection: socket.socket, asked: BinaryIO) -> None:
        try:
            while line := asked.readline():
                method, headers = line.split()[0].decode(), {}
                while header := asked.readline().strip():
                    name, _, value = header.decode().partition(":")
                    headers[name.lower()] = value.strip()
                more, body = "", ""
                if method == "DESCRIBE":
                    more, body = "Content-Type: application/sdp\r\n", _SDP
                elif method == "SETUP":
                    more = "Transport: RTP/AVP/TCP;unicast;interleaved=0-1\r\n"
                elif method == "OPTIONS":
                    more = "Public: DESCRIBE, SETUP, PLAY, TEARDOWN\r\n"
                head = f"RTSP/1.0 200 OK\r\nCSeq: {headers['cseq']}\r\nSession: 1\r\n{more}"
                connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
                if method == "PLAY":
                    self.playing.set()
        except OSError:
            return
