"""A llama-server and an rpc-server that compute nothing: the first streams as llama-server does."""

from __future__ import annotations

import sys
from pathlib import Path

SERVER = """
import json, sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

class Handler(BaseHTTPRequestHandler):
    def answer(self, status, kind):
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Connection", "close")
        self.end_headers()

    def do_GET(self):
        self.answer(200 if self.path == "/health" else 404, "application/json")

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        right = (body["stream"], body["temperature"], body["ignore_eos"]) == (True, 0, True)
        self.answer(200 if right and self.path == "/v1/completions" else 400, "text/event-stream")
        count = body["max_tokens"]
        for number in range(count + 1):
            last = number == count
            choice = {"text": "" if last else " x", "index": 0, "logprobs": None}
            choice["finish_reason"] = "length" if last else None
            event = {"choices": [choice], "created": 1, "model": "m", "object": "text_completion"}
            event |= {"system_fingerprint": "b1", "id": "chatcmpl-1"}
            if last:
                event["usage"] = {"completion_tokens": count, "prompt_tokens": 9}
                event["timings"] = {"predicted_n": count}
            self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.write(b"data: [DONE]\\n\\n")

    def log_message(self, *_):
        pass

port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
WORKER = """
import socket, sys
with socket.create_server(("127.0.0.1", int(sys.argv[sys.argv.index("-p") + 1]))) as server:
    while True:
        server.accept()[0].close()
"""


def fake(folder: Path, name: str, source: str) -> list[str]:
    """The words of such a command."""
    (folder / name).write_text(source, encoding="utf-8")
    return [sys.executable, "-ES", str(folder / name)]
