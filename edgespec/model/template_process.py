"""Template process: renders conversations in a process that can be stopped, and starts it again."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping

from edgespec.errors import ConfigError, ModelError

RENDER_S = 10.0
"""Seconds that a chat template may take for a conversation; they take milliseconds."""

START_S = 120.0
"""Seconds until the process must be ready: it imports transformers, on a board that is loading."""


class TemplateProcess:
    """One model's chat template in a process of its own (model/template_child.py).

    That process ends with this one, and with the thread that started it.
    """

    def __init__(self, template: str, tokens: Mapping[str, str], seconds: float = RENDER_S) -> None:
        """`tokens`: the control tokens that the template knows by name. `seconds`: its limit."""
        self._template = template
        self._tokens = dict(tokens)
        self._seconds = seconds
        self._child: subprocess.Popen[bytes] | None = None
        self._is_ready = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Start the process, if it does not run; do not wait until it is ready.

        Raises ModelError if it cannot be started.
        """
        if self._child is not None and self._child.poll() is None:
            return
        self._stop()
        quiet = {"TRANSFORMERS_NO_ADVISORY_WARNINGS": "1", "OMP_NUM_THREADS": "1"}
        try:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "edgespec.model.template_child"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, **quiet, "OPENBLAS_NUM_THREADS": "1"},
            )
        except OSError as problem:
            raise ModelError(
                f"cannot start the process of the model's chat template: {problem.strerror}"
            ) from None
        # It gets ready meanwhile: the first conversation need not wait for it.
        first = {"parent": os.getpid(), "template": self._template}
        self._tell({**first, "tokens": self._tokens, "seconds": self._seconds})

    def render(self, messages: list[dict[str, str]]) -> str:
        """The conversation as the template writes it, up to where the model answers.

        Raises ConfigError if the template does not take it, or needs too much time or memory;
        ModelError if its process cannot be started.
        """
        with self._lock:
            self.start()
            if not self._is_ready:
                if self._answer(START_S) is None:
                    raise ModelError("the process of the model's chat template does not start")
                self._is_ready = True
            answer = self._answer(self._seconds, messages)
        if answer is None:
            raise ConfigError(
                "the model's chat template was stopped: it took all the time or memory that it may "
                f"take for one conversation ({self._seconds:g} s)"
            )
        if "problem" in answer:
            raise ConfigError(f"the model's chat template refuses this: {answer['problem']}")
        return answer["text"]

    def close(self) -> None:
        child = self._child
        if child is not None:
            child.kill()  # the thread that waits for it gets an answer
        with self._lock:
            self._stop()

    def _tell(self, what: object) -> None:
        child = self._child
        assert child is not None
        assert child.stdin is not None
        with contextlib.suppress(OSError):  # it has died: there will be no answer
            child.stdin.write(json.dumps(what).encode() + b"\n")
            child.stdin.flush()

    def _answer(self, seconds: float, asked: object = None) -> dict[str, str] | None:
        """Its answer to what is asked now, or was told before; None, and the process is over, if
        there is none in time."""
        child = self._child
        assert child is not None
        assert child.stdout is not None
        late = threading.Timer(seconds, child.kill)
        late.daemon = True
        late.start()
        try:
            if asked is not None:
                self._tell(asked)
            line = child.stdout.readline()
        except OSError:
            line = b""
        finally:
            late.cancel()
        if line.endswith(b"\n"):
            answer: dict[str, str] = json.loads(line)
            return answer
        self._stop()
        return None

    def _stop(self) -> None:
        child, self._child, self._is_ready = self._child, None, False
        if child is None:
            return
        child.kill()
        child.wait()
        for pipe in (child.stdin, child.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not written when it died
                pipe.close()
