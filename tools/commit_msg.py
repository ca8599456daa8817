#!/usr/bin/env python3
"""Git's commit-msg hook: refuses a message that breaks the rules of CONTRIBUTING.md.

`make hooks` links it into a clone; by hand: python tools/commit_msg.py FILE
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

LONGEST = 72
MADE_BY_GIT = re.compile(r"(Merge|Revert|Reapply) |(fixup|squash|amend)! ")
ROOM = re.compile(r"[a-z][\w.,/ -]*: +\S")
UNFINISHED = re.compile(r"\bwip\b|\bwork in progress\b", re.IGNORECASE)


def problems(message: str) -> Iterator[str]:
    """What is wrong with a message, each with what to do."""
    kept = message.partition("# ------------------------ >8 ------------------------")[0]
    lines = [line.rstrip() for line in kept.splitlines() if not line.startswith("#")]
    subject, *body = "\n".join(lines).strip().split("\n")
    if not subject or MADE_BY_GIT.match(subject):
        return
    if len(subject) > LONGEST:
        yield f"it has {len(subject)} characters, of at most {LONGEST}: move details to the body"
    if not ROOM.match(subject):
        yield "it does not begin with the room: write `tree: keep ...`, `docs: say ...`"
    if ";" in subject:
        yield "`;` joins two changes: make two commits, or name what they have in common"
    if UNFINISHED.search(subject):
        yield "it says that the work is not finished: commit what is, and say what that does"
    if body and body[0]:
        yield "the line below it is not empty, so that git takes both for the subject"


def main() -> int:
    """Say what is wrong with the message in the file that git names."""
    message = Path(sys.argv[1]).read_text(encoding="utf-8")
    found = list(problems(message))
    if found:
        print("The subject of the commit breaks a rule of CONTRIBUTING.md:", file=sys.stderr)
        for problem in found:
            print(f"  {problem}", file=sys.stderr)
        print(f"Your text is kept: git commit -e -F {sys.argv[1]}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
