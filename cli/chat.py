"""edgespec chat: a conversation with a running ring."""

from __future__ import annotations

from collections.abc import Callable

import typer

from edgespec.cli import options
from edgespec.cli.answer_view import AnswerView
from edgespec.cli.answering import cancelling
from edgespec.cli.chat_commands import WORDS, ChatState, Commands
from edgespec.cli.conversation import Turn
from edgespec.cli.line_input import History, LineInput, history_file
from edgespec.cli.notes import Notes
from edgespec.cli.reach import given_token, introduced, reach
from edgespec.config import Address
from edgespec.door.asking import RequestSettings
from edgespec.errors import (
    EXIT_CANCELLED,
    AccessRefused,
    ConfigError,
    EdgespecError,
    OtherVersion,
    RequestFailed,
)
from edgespec.net.keys import Identity
from edgespec.runtime.client import Client
from edgespec.types.shown import shown
from edgespec.wire.client_messages import Finished, Status

ANSWER_SHARE = 4
"""The context keeps one part in so many (or --max-new-tokens, if that is less) for an answer;
turns are left out for that much."""

USUAL_CHAT = RequestSettings(max_new_tokens=512)

Reach = Callable[[], tuple[Address, Identity]]


@options.grouped
def chat(
    system: str = typer.Option("", metavar="TEXT", help="What the model is told before all else."),
    show_speculation: bool = typer.Option(
        False,
        "--show-speculation",
        help="On a terminal, change the text's colour with each result of the ring.",
    ),
    no_history: bool = typer.Option(
        False, "--no-history", help="Neither read nor keep the lines that are typed."
    ),
    coordinator: str | None = options.COORDINATOR,
    settings: RequestSettings = USUAL_CHAT,
    wait: float = options.WAIT,
    token: str = options.CLIENT_TOKEN,
    cluster: str = options.CLUSTER,
) -> None:
    """Talk with the model of the running ring; /help lists what else can be typed.

    Ctrl-C cancels an answer, Ctrl-D leaves. What is piped in is asked line by line.
    """
    notes = Notes()
    introduced(given_token(token), coordinator, cluster, wait, notes)

    def reached() -> tuple[Address, Identity]:
        return reach(coordinator, cluster, wait, notes)

    with Client(*reached(), wait) as client:
        status = client.status()
    session = _Chat(ChatState(settings, system, status.usual), notes, reached, wait)
    session.show_speculation = show_speculation
    session.context = status.context_length
    lines = LineInput(History(None if no_history else history_file()), WORDS)
    if lines.is_interactive:
        _greet(status, notes)
        session.talk(lines)
    else:
        session.answer_all(lines)


def _greet(status: Status, notes: Notes) -> None:
    context = f", context {status.context_length} tokens" if status.context_length else ""
    model = shown(status.model) or "the model"
    notes.say(f"{model} on a ring of {status.stages} stage(s){context}")
    if not status.ready:
        notes.warn("the ring is not up: " + "; ".join(map(shown, status.lines)))
    if own := status.usual.own_words():
        notes.say(f"{own}; /set changes it")
    notes.say("/help lists the commands; Ctrl-C cancels an answer, Ctrl-D leaves")


class _Chat:
    """One conversation. Each turn opens its own connection."""

    def __init__(self, state: ChatState, notes: Notes, reached: Reach, wait: float) -> None:
        self._state, self._notes, self._reached, self._wait = state, notes, reached, wait
        self._commands = Commands(state, notes, self._answer)
        self.show_speculation = False
        self.context = 0  # tokens; 0: not known

    def talk(self, lines: LineInput) -> None:
        """On a terminal: an error is printed, and the conversation goes on."""
        while not self._commands.is_over:
            try:
                line = lines.read()
                if line is None:
                    return
                self._take_patiently(line)
            except KeyboardInterrupt:
                self._notes.say("\nCtrl-D or /quit leaves")

    def _take_patiently(self, line: str) -> None:
        try:
            self._take(line)
        except KeyboardInterrupt:
            self._notes.say("(cancelled; /retry asks it again)")
        except (AccessRefused, OtherVersion):
            raise
        except EdgespecError as problem:
            if _has_no_template(problem):
                raise
            self._notes.warn(f"error: {shown(str(problem))}")

    def answer_all(self, lines: LineInput) -> None:
        """From a pipe: the first error ends the command."""
        while not self._commands.is_over and (line := lines.read()) is not None:
            self._take(line)
            last = self._state.last
            if last is not None and last.finish_reason == "cancelled":
                raise typer.Exit(EXIT_CANCELLED)

    def _take(self, line: str) -> None:
        if line.startswith("/"):
            self._commands.run(line)
        elif line.strip():
            self._answer(line)

    def _answer(self, question: str) -> None:
        """Answer a question; it is kept for /retry if that fails."""
        conversation = self._state.conversation
        self._state.settings.complete(question)  # refuses one that cannot be sent
        conversation.unanswered = question
        before = conversation.left_out
        if self.context:
            answer = min(self._state.settings.max_new_tokens, self.context // ANSWER_SHARE)
            conversation.make_room(question, self.context - answer)
        while True:
            try:
                self._ask(question)
                break
            except RequestFailed as problem:
                if problem.kind != "context":
                    raise
                if not conversation.has_more_to_leave_out:
                    conversation.left_out = before  # the question alone is too long
                    raise
                conversation.leave_out_half()
        self._say_left_out(conversation.left_out - before)

    def _ask(self, question: str) -> None:
        state = self._state
        submit = state.settings.answer(state.conversation.messages(question))
        view = AnswerView(self._notes, speculation=self.show_speculation)
        try:
            with Client(*self._reached(), self._wait) as client, cancelling(client):
                finished = view.follow(client.ask(submit))
        except (EdgespecError, KeyboardInterrupt) as problem:
            if view.text:  # the part that was shown belongs to the conversation
                cut = "cancelled" if isinstance(problem, KeyboardInterrupt) else "failed"
                state.conversation.add(Turn(question, view.text, cut))
            raise
        state.count(finished)
        state.conversation.learn(question, finished.prompt_tokens)
        self._keep(question, finished)
        view.legend()

    def _keep(self, question: str, finished: Finished) -> None:
        reason = finished.finish_reason
        if reason == "cancelled" and not finished.text:
            self._notes.say("(cancelled; /retry asks it again)")
            return
        cut = reason if reason in ("cancelled", "length") else ""
        self._state.conversation.add(Turn(question, finished.text, cut))
        if reason == "cancelled":
            self._notes.say("(cancelled; what there is of the answer stays)")
        elif reason == "length":
            self._notes.say(f"(cut at {finished.new_tokens} tokens: {self._why_cut(finished)})")
        if finished.looped:
            self._notes.say(f"({shown(finished.looped)}: /set)")

    def _why_cut(self, finished: Finished) -> str:
        if finished.new_tokens < self._state.settings.max_new_tokens:
            return "the model's context is full"
        return "/set max_new_tokens allows more"

    def _say_left_out(self, count: int) -> None:
        if count:
            self._notes.say(
                f"(the conversation is too long for the model's context: its {count} oldest "
                "turn(s) were left out, and are from now on)"
            )


def _has_no_template(problem: EdgespecError) -> bool:
    """Whether the model cannot be asked in conversations at all."""
    return isinstance(problem, ConfigError | RequestFailed) and "no chat template" in str(problem)
