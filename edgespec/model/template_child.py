"""Template child: a small process that renders conversations by a model's chat template.

A template is a program that came with the model: it may loop, or take memory without bound, and a
thread that does so cannot be stopped. This process can: it may take MEMORY beside what it starts
with, and its parent (model/template_process.py) kills it when its time is over. The rendering is
transformers' own, so that the text is what its apply_chat_template writes.

It reads JSON, one line each: first {"parent", "template", "tokens", "seconds"}, to which it answers
{} when it is ready, then conversations; it answers each with {"text"} or {"problem"}.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from typing import Any

MEMORY = 256 << 20
"""Bytes that a template may take."""

MOST_CHARS = 8 << 20
"""Characters that it may write."""

_MOST_WORDS = 300
_PR_SET_PDEATHSIG = 1


def main() -> None:
    asked = json.loads(sys.stdin.buffer.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which ends this
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != asked["parent"]:  # it died before the kernel was asked
        sys.exit(1)
    render = _renderer(asked["template"], asked["tokens"])
    _bound_memory()
    _say({})
    for line in sys.stdin.buffer:
        _bound_time(asked["seconds"])
        _say(_answer(render, line))


def _renderer(template: str, tokens: dict[str, str]) -> Callable[[Any], str]:
    sys.modules["torch"] = None  # type: ignore[assignment]  # transformers then does without it
    from transformers.utils.chat_template_utils import render_jinja_template

    def render(messages: Any) -> str:
        texts, _ = render_jinja_template(
            conversations=[messages], chat_template=template, add_generation_prompt=True, **tokens
        )
        return str(texts[0])

    return render


def _answer(render: Callable[[Any], str], line: bytes) -> dict[str, str]:
    try:
        text = render(json.loads(line))
    except MemoryError:
        return {"problem": f"it needs more than {MEMORY >> 20} MiB of memory for it"}
    except Exception as problem:  # templates raise what they like for what they do not take
        return {"problem": str(problem)[:_MOST_WORDS]}
    if len(text) > MOST_CHARS:
        return {"problem": f"it writes more than {MOST_CHARS} characters for it"}
    return {"text": text}


def _bound_memory() -> None:
    with open("/proc/self/statm", encoding="ascii") as file:
        pages = int(file.read().split()[0])
    most = pages * resource.getpagesize() + MEMORY
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _bound_time(seconds: float) -> None:
    """The kernel ends this process after so much more computing, if its parent does not."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = int(used.ru_utime + used.ru_stime + seconds) + 2
    resource.setrlimit(resource.RLIMIT_CPU, (most, resource.RLIM_INFINITY))


def _say(answer: dict[str, str]) -> None:
    sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
