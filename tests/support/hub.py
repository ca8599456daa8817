"""A stand-in for the Hugging Face Hub: the few answers that downloading a model's files takes."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"
PREAMBLE = """
import json, sys
from edgespec.errors import ModelError
from edgespec.model.hub import local_folder
from edgespec.model.loader import Checkpoint, fingerprint

def refused(call):
    try:
        call()
    except ModelError as error:
        return str(error)

"""


class Hub:
    """Serves folders as models on 127.0.0.1, and keeps what was asked of it."""

    def __init__(self, models: dict[str, Path], gated: tuple[str, ...] = ()) -> None:
        self.models, self.gated = models, gated
        self.log: list[tuple[str, str]] = []
        self.ranges: list[str] = []
        """The parts of files that were asked for."""
        self.broken = False
        """Whether every answer is an error."""

    def __enter__(self) -> Hub:
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fetched(self) -> list[str]:
        """Names of the files whose content was sent, in order; and forget what was asked."""
        names = [path.rpartition("/")[2] for method, path in self.log if method == "GET"]
        self.log.clear()
        return names

    def answer(self, method: str, path: str) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and content for a request."""
        self.log.append((method, path))
        parts = path.lstrip("/").split("/")
        name = "/".join(parts[:2])
        if self.broken:
            return 500, {}, b""
        if name in self.gated:
            return 403, {"X-Error-Code": "GatedRepo", "X-Error-Message": "licence"}, b""
        if name not in self.models or len(parts) != 5 or parts[2] != "resolve":
            return 404, {"X-Error-Code": "RepoNotFound"}, b""
        headers = {"X-Repo-Commit": COMMIT}
        file = self.models[name] / parts[4]
        if parts[3] not in ("main", COMMIT) or not file.is_file():
            return 404, {**headers, "X-Error-Code": "EntryNotFound"}, b""
        content = file.read_bytes()
        return 200, {**headers, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}, content

    def run(self, home: Path, code: str, *arguments: str, offline: bool = False) -> Any:
        """What Python code prints as JSON that has this hub and keeps downloads in `home`."""
        environment = {
            **os.environ,
            "HF_ENDPOINT": self.endpoint,
            "HF_HOME": str(home),
            "HF_HUB_OFFLINE": "1" if offline else "0",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
        }
        command = [sys.executable, "-c", PREAMBLE + code, *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub

    def _send(self) -> None:
        status, headers, content = self.hub.answer(self.command, self.path.partition("?")[0])
        if status == 200 and (part := self.headers.get("Range")):
            self.hub.ranges.append(part)
            start = int(part.removeprefix("bytes=").removesuffix("-"))
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            status, content = 206, content[start:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def do_HEAD(self) -> None:
        self._send()

    def do_GET(self) -> None:
        self._send()

    def log_message(self, *_: object) -> None:
        pass
