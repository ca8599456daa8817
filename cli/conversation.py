"""A conversation: its turns, the part of them that the model is given, and its file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from edgespec.errors import ConfigError
from edgespec.files import write_whole

CUT_SHARE = 2
"""When turns are left out, the rest fills at most one part in so many of the room. So it does not
happen at every turn, and the stages can reuse the cached prefix."""

_MOST_BYTES = 16 << 20
_ROLES = ("user", "assistant")


@dataclass(frozen=True, slots=True)
class Turn:
    """A question and its answer. `cut`: why the answer is incomplete ("cancelled"), or ""."""

    question: str
    answer: str
    cut: str = ""


@dataclass
class Conversation:
    """A system message ("": none) and turns.

    `left_out`: how many of the oldest turns the model is no longer given. `unanswered`: a question
    without an answer, or "".
    """

    system: str = ""
    turns: list[Turn] = field(default_factory=list)
    left_out: int = 0
    unanswered: str = ""
    tokens_per_character: float = 0.0  # measured at the last answer; 0: unknown

    def messages(self, question: str) -> list[dict[str, str]]:
        """The messages that the model is given for a question."""
        said = [_message("system", self.system)] if self.system else []
        for turn in self.turns[self.left_out :]:
            said += [_message("user", turn.question), _message("assistant", turn.answer)]
        return [*said, _message("user", question)]

    def add(self, turn: Turn) -> None:
        self.turns.append(turn)
        self.unanswered = ""

    def take_back(self) -> str:
        """Remove and return the last question, with its answer; "" if there is none."""
        question, self.unanswered = self.unanswered, ""
        if not question and self.turns:
            question = self.turns.pop().question
            self.left_out = min(self.left_out, len(self.turns))
        return question

    def learn(self, question: str, prompt_tokens: int) -> None:
        """Estimate tokens per character from the prompt of the last answer."""
        self.tokens_per_character = prompt_tokens / self._characters(question)

    def make_room(self, question: str, room: int) -> None:
        """Leave out the oldest turns if the estimate of all exceeds `room` tokens."""
        if self._estimate(question) > room:
            while self.has_more_to_leave_out and self._estimate(question) > room / CUT_SHARE:
                self.left_out += 1

    def leave_out_half(self) -> None:
        """Leave out the older half of the turns that the model is given, at least one."""
        self.left_out += (len(self.turns) - self.left_out + 1) // 2

    @property
    def has_more_to_leave_out(self) -> bool:
        return self.left_out < len(self.turns)

    def _estimate(self, question: str) -> float:
        return self.tokens_per_character * self._characters(question)

    def _characters(self, question: str) -> int:
        return sum(len(message["content"]) for message in self.messages(question)) or 1

    def to_json(self) -> str:
        """The whole conversation; `messages` is in the form of OpenAI's API."""
        messages: list[dict[str, str]] = []
        if self.system:
            messages.append(_message("system", self.system))
        for turn in self.turns:
            cut = {"cut": turn.cut} if turn.cut else {}
            messages.append(_message("user", turn.question))
            messages.append(_message("assistant", turn.answer) | cut)
        if self.unanswered:
            messages.append(_message("user", self.unanswered))
        return json.dumps({"messages": messages}, ensure_ascii=False, indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write it to a file that only its owner can read. Replaces a saved conversation only.

        Raises ConfigError if that fails, or for another kind of file.
        """
        if path.exists():
            try:
                Conversation.load(path)
            except ConfigError:
                raise ConfigError(
                    f"{path} is there already and is no saved conversation; choose another name"
                ) from None
        try:
            write_whole(path, self.to_json(), 0o600)
        except OSError as problem:
            raise ConfigError(f"cannot write {path}: {problem.strerror or problem}") from None

    @staticmethod
    def load(path: Path) -> Conversation:
        """Read what `save` wrote, or a list of messages in the form of OpenAI's API.

        Raises ConfigError, naming the file, for other content.
        """
        try:
            with path.open("rb") as file:
                raw = file.read(_MOST_BYTES + 1)
        except OSError as problem:
            raise ConfigError(f"cannot read {path}: {problem.strerror or problem}") from None
        if len(raw) > _MOST_BYTES:
            raise ConfigError(f"{path} is longer than {_MOST_BYTES} bytes; no conversation is")
        try:
            content = json.loads(raw)
        except (ValueError, RecursionError):
            raise ConfigError(f"{path} is no saved conversation: it is not JSON") from None
        messages = content.get("messages") if isinstance(content, dict) else content
        try:
            return _conversation(messages)
        except ConfigError as problem:
            raise ConfigError(f"{path} is no saved conversation: {problem}") from None


def _message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _conversation(messages: Any) -> Conversation:
    said = list(_checked(messages))
    made = Conversation()
    if said and said[0]["role"] == "system":
        made.system = said.pop(0)["content"]
    for number, message in enumerate(said):
        if message["role"] != _ROLES[number % 2]:
            raise ConfigError("user and assistant must take turns, behind one system message")
    for question, answer in zip(said[::2], said[1::2], strict=False):
        made.turns.append(Turn(question["content"], answer["content"], answer.get("cut", "")))
    if len(said) % 2:
        made.unanswered = said[-1]["content"]
    return made


def _checked(messages: Any) -> Iterator[dict[str, str]]:
    if not isinstance(messages, list):
        raise ConfigError("it has no list of messages")
    for message in messages:
        texts = isinstance(message, dict) and all(isinstance(v, str) for v in message.values())
        if not texts or not {"role", "content"} <= message.keys():
            raise ConfigError('each message must have "role" and "content", both texts')
        yield message
