"""The /commands of a chat: they change the conversation and the settings of its requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from edgespec.cli.answering import described
from edgespec.cli.conversation import Conversation
from edgespec.cli.notes import Notes
from edgespec.door.asking import GREEDY, RequestSettings
from edgespec.errors import ConfigError
from edgespec.types.usual_sampling import NAMES as OWN
from edgespec.types.usual_sampling import UsualSampling
from edgespec.wire.client_messages import Finished

_HELP = [
    ("/help", "this list"),
    ("/new", "begin a new conversation; the system message and the settings stay"),
    ("/system TEXT", "what the model is told before all else; without TEXT: nothing"),
    ("/retry", "answer the last question again; above temperature 0 with the next seed"),
    ("/undo", "take back the last question and its answer"),
    ("/save FILE", "write the conversation into a file"),
    ("/load FILE", "go on with a conversation from a file"),
    ("/set NAME VALUE", "change a setting of the answers; without NAME: show them"),
    ("/stats", "figures of the last answer, and of the conversation"),
    ("/quit", "leave; so does Ctrl-D"),
]
WORDS = [usage.split()[0] for usage, _ in _HELP]

_MORE_HELP = [
    ("", ""),
    ("several lines", 'end a line with \\ to go on below it, or put lines between two """'),
    ("Ctrl-C", "cancels an answer"),
]

_NAMES = [field.name for field in fields(RequestSettings)]


class ChatState:
    """What the commands change. `last`: the newest answer."""

    def __init__(self, settings: RequestSettings, system: str, usual: UsualSampling) -> None:
        """`usual`: how the model samples where the settings do not say."""
        self.settings, self.usual = settings, usual
        self.conversation = Conversation(system)
        self.last: Finished | None = None
        self.answers = self.tokens = 0
        self.seconds = 0.0

    def count(self, finished: Finished) -> None:
        self.last = finished
        self.answers += 1
        self.tokens += finished.new_tokens
        self.seconds += finished.seconds


class Commands:
    """Runs lines that begin with a slash."""

    def __init__(self, state: ChatState, notes: Notes, ask: Callable[[str], None]) -> None:
        """`ask(question)` answers a question and adds both to the conversation."""
        self._state, self._notes, self._ask = state, notes, ask
        self.is_over = False

    def run(self, line: str) -> None:
        """Raises ConfigError, with a text for the user, for a line that is wrong."""
        word, _, rest = line.partition(" ")
        if word not in WORDS:
            raise ConfigError(
                f"there is no command {word}; /help lists them (put a blank in front of a text "
                "that begins with a slash)"
            )
        argument = rest.strip()
        if argument and word in ("/help", "/new", "/retry", "/undo", "/stats", "/quit"):
            raise ConfigError(f"{word} takes nothing behind it")
        getattr(self, f"_{word[1:]}")(*([argument] if word in _TAKE_ARGUMENT else []))

    def _help(self) -> None:
        self._notes.table([*_HELP, *_MORE_HELP])

    def _new(self) -> None:
        self._state.conversation = Conversation(self._state.conversation.system)
        self._notes.say("a new conversation")

    def _system(self, text: str) -> None:
        self._state.conversation.system = text
        self._notes.say("the system message counts from now on" if text else "no system message")

    def _retry(self) -> None:
        question = self._state.conversation.take_back()
        if not question:
            raise ConfigError("there is no question to answer again")
        settings, own = self._state.settings, self._state.usual.temperature
        if (own if settings.temperature is None else settings.temperature) > 0:
            seed = (settings.seed + 1) % 2**64
            self._state.settings = replace(settings, seed=seed)
            self._notes.say(f"with seed {seed}")
        else:
            self._notes.say("at temperature 0 the same text comes again; try /set temperature 0.7")
        self._ask(question)

    def _undo(self) -> None:
        question = self._state.conversation.take_back()
        if not question:
            raise ConfigError("there is nothing to take back")
        left = len(self._state.conversation.turns)
        self._notes.say(f"taken back: {_short(question)} ({left} turn(s) left)")

    def _save(self, name: str) -> None:
        path = _path(name, "/save")
        self._state.conversation.save(path)
        self._notes.say(f"saved {len(self._state.conversation.turns)} turn(s) in {path}")

    def _load(self, name: str) -> None:
        path = _path(name, "/load")
        self._state.conversation = Conversation.load(path)
        self._notes.say(f"{len(self._state.conversation.turns)} turn(s) from {path}")
        for turn in self._state.conversation.turns[-1:]:
            self._notes.say(f"the last one: {_short(turn.question)}")

    def _set(self, argument: str) -> None:
        if argument:
            name, _, value = argument.replace("=", " ", 1).partition(" ")
            name = name.replace("-", "_")
            self._state.settings = changed(self._state.settings, name, value.strip())
        settings = self._state.settings
        self._notes.table([(name, self._spelt(settings, name)) for name in _NAMES])

    def _spelt(self, settings: RequestSettings, name: str) -> str:
        value = getattr(settings, name)
        if value is None and name in OWN:
            return f"{getattr(self._state.usual, name):g}, the model's own"
        return _spelt(value)

    def _stats(self) -> None:
        state = self._state
        if state.last is None:
            raise ConfigError("nothing was answered yet")
        speed = state.tokens / state.seconds if state.seconds > 0 else 0.0
        total = (
            f"{state.answers} answer(s), {state.tokens} tokens in {state.seconds:.1f} s, "
            f"{speed:.1f} tokens/s"
        )
        left_out = state.conversation.left_out
        turns = f"{len(state.conversation.turns)} turn(s), {left_out} of them left out by now"
        self._notes.table([*described(state.last), ("in all", total), ("conversation", turns)])

    def _quit(self) -> None:
        self.is_over = True


_TAKE_ARGUMENT = ("/system", "/save", "/load", "/set")


def changed(settings: RequestSettings, name: str, value: str) -> RequestSettings:
    """The settings with one value, given as text, changed; "" leaves it to the model.

    Raises ConfigError for an unknown name and for a wrong value.
    """
    if name not in _NAMES:
        raise ConfigError(f"there is no setting {name!r}; there are: {', '.join(_NAMES)}")
    if name == "stop":
        return replace(settings, stop=[value] if value else [])
    kind = type(getattr(GREEDY, name))
    try:
        given: Any = None if not value and name in OWN else kind(value)
    except ValueError:
        what = "a whole number" if kind is int else "a number"
        raise ConfigError(f"{name} must be {what}, not {value!r}") from None
    return replace(settings, **{name: given})


def _spelt(value: object) -> str:
    if value is None or isinstance(value, list):
        return ", ".join(map(repr, value or ())) or "none"
    return str(value) if value != "" else "as the coordinator chooses"


def _path(name: str, command: str) -> Path:
    if not name or "\0" in name:
        raise ConfigError(f"{command} takes the name of a file")
    try:
        return Path(name).expanduser()
    except RuntimeError as problem:
        raise ConfigError(f"{name!r} is no file: {problem}") from None


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= 60 else line[:59] + "…"
