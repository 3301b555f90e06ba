"""A stand-in for vLLM's server: `python fake_upstream.py PORT`, with the key in VLLM_API_KEY.

It answers every request with its prompt in three pieces. The prompt "crash" ends the process, "sick" ends its
health, and "slow" waits.
"""

import json
import os
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    is_sick = False

    def do_GET(self) -> None:
        self._answer(500 if Handler.is_sick else 200, {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {os.environ['VLLM_API_KEY']}":
            self._answer(401, {"error": {"message": "wrong key"}})
        elif body.get("prompt") == "crash":
            os._exit(3)
        elif body.get("prompt") == "sick":
            Handler.is_sick = True
            self._answer(500, {"error": {"message": "the engine is dead"}})
        elif "prompt" not in body:
            self._answer(400, {"error": {"message": "no prompt", "code": "upstream"}})
        elif body.get("stream"):
            self._stream(body)
        else:
            choice = {"index": 0, "text": body["prompt"], "finish_reason": "stop"}
            self._answer(200, {"model": body["model"], "choices": [choice]})

    def _stream(self, body: dict[str, str]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for _ in range(3):
            choice = {"index": 0, "text": body["prompt"], "finish_reason": None}
            self._chunk(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")
            if body["prompt"] == "crash later":
                time.sleep(0.1)
                os._exit(3)
            if body["prompt"] == "slow":
                time.sleep(60)
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _answer(self, status: int, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
    server.daemon_threads = True
    server.serve_forever()
