"""Tool forms: how a family of models is told of tools, calls them, and is told what came of it.

Which one is a model's is seen in its chat template. A template that takes tools writes them, calls
and results itself; for one that does not, the form has words of its own. A call is read where its
form lets it stand, and a grammar holds a call that has to be made to the tool's own schema.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from edgespec.types.grammar_spec import LAYOUT, schema_text, spec
from edgespec.types.record import Record, Text

Message = Mapping[str, Any]
"""As OpenAI's chats have it: "role", "content", and "tool_calls" or "tool_call_id"."""

IS_OF_TOOL = " // tool "
"""Stands before a tool's name, a comment behind what a grammar has for it: errors name it."""

_WORD = re.compile(r'\{|"[^"]*"|: |, |.', re.DOTALL)
_B = r"[ \t\r\n]{0,16}"  # blanks, of which there is a bound: no long text is held back


DEEPEST = 128
"""Levels of values within each other in a tool's schema."""


class Tool(Record, frozen=True):
    """A function; `parameters`: the JSON schema of its arguments. Raises ValueError if that is
    nested too deep."""

    name: Text
    description: Text
    parameters: dict[str, Any]

    def __post_init__(self) -> None:
        level: list[Any] = [self.parameters]
        for _ in range(DEEPEST):
            values = [one.values() if isinstance(one, dict) else one for one in level]
            level = [each for all_ in values for each in all_ if isinstance(each, dict | list)]
        if level:
            raise ValueError("are nested too deep")

    def as_json(self) -> dict[str, Any]:
        """As OpenAI's chats have it."""
        told = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": told}


class ToolForm:
    """A call is `begin`, its head, the arguments, `tail`; several have `joint` between them, and
    all of them have `first` before and `last` behind."""

    name = ""
    first = begin = tail = joint = last = ""
    key = "arguments"
    anywhere = False
    """Whether a call may stand behind text; else an answer with calls begins with one."""
    writes_tools = True
    """Whether templates of this form that know calls write the tools too."""
    opening = another = closing = _B
    """Regular expressions: what stands before the first call's and any other's JSON, and what
    stands behind the arguments of one."""
    free = r"(.|\n)*"
    """A regular expression for an answer without a call, for a grammar."""
    words = """# Tools

You may call functions to help the user. These are there, a line of JSON each:

{tools}

To call one, answer with nothing but {example}, its name and its arguments filled in."""

    def head(self, name: str) -> str:
        """What stands between `begin` and the arguments of a call."""
        return f'{{"name": {json.dumps(name)}, "{self.key}": '

    def calls(self, made: Sequence[tuple[str, str]]) -> str:
        """Calls, by name and arguments in JSON, as the model writes them."""
        return self.first + self.joint.join(self._call(*one) for one in made) + self.last

    def _call(self, name: str, arguments: str) -> str:
        return f"{self.begin}{self.head(name)}{arguments}{self.tail}"

    def result(self, content: str) -> str:
        """What a call gave, as a user's message."""
        return json.dumps({"output": content}, ensure_ascii=False)

    def told(self, tools: Sequence[Tool]) -> str:
        """What the model is told of them."""
        lines = [json.dumps(tool.as_json(), ensure_ascii=False) for tool in tools]
        example = self.calls([("...", "{...}")])
        return self.words.format(tools="\n".join(lines), example=example)

    def as_text(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[dict[str, str]]:
        """A conversation for a template that knows no tools: roles and texts alone."""
        return self.with_words([self._text(one) for one in messages], tools)

    def with_words(
        self, found: list[dict[str, str]], tools: Sequence[Tool]
    ) -> list[dict[str, str]]:
        """These messages, and what the model is told of tools, in the system message."""
        if not tools:
            return found
        words = self.told(tools)
        if found[0]["role"] != "system":
            return [{"role": "system", "content": words}, *found]
        first = {"role": "system", "content": f"{found[0]['content']}\n\n{words}"}
        return [first, *found[1:]]

    def _text(self, message: Message) -> dict[str, str]:
        role, text = message["role"], message["content"]
        if role == "tool":
            return {"role": "user", "content": self.result(text)}
        if made := message.get("tool_calls"):
            functions = [one["function"] for one in made]
            calls = self.calls([(one["name"], one["arguments"]) for one in functions])
            text = f"{text}\n{calls}" if text else calls
        return {"role": role, "content": text}

    def for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """A conversation for a template that knows tools: arguments are JSON there, not text."""
        return [_with_arguments(one) for one in messages]

    def pattern(self, names: Sequence[str], *, another: bool) -> str:
        """A regular expression for what stands before the arguments of a call of these tools, with
        their own first brace if they are JSON; its group 1 is the name."""
        kind = rf'(?:"type"{_B}:{_B}"function"{_B},{_B})?'
        head = rf'"name"{_B}:{_B}"{_any_of(names)}"{_B},{_B}"(?:arguments|parameters)"{_B}:{_B}\{{'
        return (self.another if another else self.opening) + rf"\{{{_B}{kind}{head}"

    def grammar(
        self,
        tools: Sequence[Tool],
        *,
        must: bool,
        several: bool,
        answer: Mapping[str, Any] | None = None,
    ) -> str:
        """Of an answer whose calls are of these tools, with valid arguments (see
        types.grammar_spec). With `must` it is a call, or `several`; else it may be a text too, or
        JSON by the schema `answer`."""
        lines = [f"one_call: {' | '.join(f'tool_{n}' for n in range(len(tools)))}"]
        for number, tool in enumerate(tools):
            schema = {"type": "object", **tool.parameters, "x-guidance": LAYOUT}
            # Beside JSON, a head that is JSON has its words: no longer one begins with theirs.
            words = _WORD.findall(self.head(tool.name)) if answer is not None else []
            words = words if words[:1] == ["{"] else [self.head(tool.name)]
            head, tail = " ".join(map(json.dumps, words)), json.dumps(self.tail)
            held = f"{head} %json {schema_text(schema)} {tail}"
            lines.append(f"tool_{number}: {held}{IS_OF_TOOL}{json.dumps(tool.name)}")
        first = json.dumps(begin) if (begin := self.first + self.begin) else ""
        last = json.dumps(self.last) if self.last else ""
        more = f"({json.dumps(self.joint + self.begin)} one_call)*" if several else ""
        lines.append(f"calls: {first} one_call {more} {last}")
        names = [tool.name for tool in tools]
        if must:
            lines.append("start: calls")
        elif answer is not None:
            held = schema_text({**answer, "x-guidance": LAYOUT})
            lines += ["start: calls | answer", f"answer: %json {held}"]
        else:
            lines += self._start(names, several)
        return spec("lark", "%llguidance {}\n" + "\n".join(lines) + "\n")

    def _start(self, names: Sequence[str], several: bool) -> list[str]:
        """Rules for an answer that may be a text too."""
        return ["start: calls | FREE", f"FREE: /{self.free}/"]


class Hermes(ToolForm):
    """Of Hermes and Qwen: each call within tags, anywhere in a text."""

    name = "hermes"
    begin = "<tool_call>"
    joint, tail, anywhere = "\n", "}\n</tool_call>", True
    opening = another = rf"{_B}<tool_call>{_B}"
    closing = rf"{_B}\}}{_B}</tool_call>"
    words = """# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{tools}
</tools>

For each function call, return a json object with function name and arguments within \
<tool_call></tool_call> XML tags:
<tool_call>
{{"name": <function-name>, "arguments": <args-json-object>}}
</tool_call>"""

    def head(self, name: str) -> str:
        return f"\n{super().head(name)}"

    def result(self, content: str) -> str:
        return f"<tool_response>\n{content}\n</tool_response>"

    def _start(self, names: Sequence[str], several: bool) -> list[str]:
        calls = "(begun one_call)*" if several else "(begun one_call)?"
        begun = f"begun[lazy]: FREE {json.dumps(self.begin)}"
        return [f"start: {calls} rest", begun, "rest: FREE", f"FREE: /{self.free}/"]


class Llama(ToolForm):
    """Of Llama from 3.1 on: the call is the answer. Its templates take one call in a message."""

    name, key, joint, tail = "llama", "parameters", "; ", "}"
    opening = rf"{_B}(?:<\|python_tag\|>)?{_B}"
    another = rf"{_B};?{_B}"
    closing = rf"{_B}\}}"
    free = r"([ \t\r\n]*([^{< \t\r\n]|<[^|])(.|\n)*)?"

    def for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found = []
        for one in super().for_template(messages):
            for number, call in enumerate(one.get("tool_calls") or [None]):
                text = one["content"] if number == 0 else ""
                found.append({**one, "content": text, "tool_calls": [call]} if call else one)
        return found


class Mistral(ToolForm):
    """Of Mistral, before its calls had [ARGS]: a list of calls is the answer. The control token
    before it is not in its text. Its templates want ids of nine letters and digits."""

    name, first, joint, tail, last = "mistral", "[", ", ", "}", "]"
    opening = rf"{_B}(?:\[TOOL_CALLS\])?{_B}\[{_B}"
    another = rf"{_B},{_B}"
    closing = rf'{_B}(?:,{_B}"id"{_B}:{_B}"[^"]{{0,64}}"{_B})?\}}{_B}(?:\]|(?=,))'
    free = r"([ \t\r\n]*([^\[ \t\r\n]|\[[^{T \t\r\n])(.|\n)*)?"

    def for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        found = super().for_template(messages)
        for one in found:
            if "tool_call_id" in one:
                one["tool_call_id"] = _nine(one["tool_call_id"])
            if "tool_calls" in one:
                one["tool_calls"] = [
                    {**call, "id": _nine(call["id"])} for call in one["tool_calls"]
                ]
        return found


class MistralArgs(Mistral):
    """Of Mistral since its calls have [ARGS]: name and arguments, the answer begins with a call.
    None of its control tokens is in its text; an id, which some write behind the name, is."""

    name, first, joint, tail, last = "mistral-args", "", "", "", ""
    closing = ""

    def head(self, name: str) -> str:
        return name

    def pattern(self, names: Sequence[str], *, another: bool) -> str:
        id = r"(?:(?:\[CALL_ID\])?[a-zA-Z0-9]{9})?"
        return rf"{_B}(?:\[TOOL_CALLS\])?{_any_of(names)}{id}(?:\[ARGS\])?{_B}\{{"

    def _start(self, names: Sequence[str], several: bool) -> list[str]:
        calls = rf"[ \t\r\n]*{_any_of(names)}[ \t\r\n]*\{{"
        return ["start: calls | FREE", f"FREE: /{self.free}/ & ~/{calls}{self.free}/"]


class Xml(Hermes):
    """Of Qwen3-Coder: within the tags each argument has tags of its own, and texts are bare there.
    Calls that have to be valid are JSON as Hermes has it, for which schemas are made."""

    name = "xml"
    closing = rf"{_B}(?:\}}{_B})?</tool_call>"

    def pattern(self, names: Sequence[str], *, another: bool) -> str:
        bare = rf"{_B}(?:<tool_call>{_B})?<function={_any_of(names)}>"
        return f"(?|{super().pattern(names, another=another)}|{bare})"


def _mark(words: str) -> str:
    """One of DeepSeek's, which has a wide bar, and a low block for each blank."""
    return "<\uff5c" + words.replace(" ", "\u2581") + "\uff5c>"


_SEP = _mark("tool sep")


class DeepSeek(ToolForm):
    """Of DeepSeek V3.1: each call within marks, behind a text or without one. Its templates write
    calls and results, but no tools, and add to the arguments as to a text."""

    name, anywhere = "deepseek", True
    first, last = _mark("tool calls begin"), _mark("tool calls end")
    begin, tail = _mark("tool call begin"), _mark("tool call end")
    closing = rf"{_B}(?:```)?{_B}{tail}{_B}(?:{last})?"
    writes_tools = False
    words = """## Tools
You have access to the following tools:

{tools}

IMPORTANT: ALWAYS adhere to this exact format for tool use, its name and its arguments filled in:
{example}"""

    def head(self, name: str) -> str:
        return f"{name}{_SEP}"

    def pattern(self, names: Sequence[str], *, another: bool) -> str:
        first = "" if another else self.first
        head = rf"(?:function{_SEP})?{_any_of(names)}(?:{_SEP})?"
        return rf"{_B}{first}{_B}{self.begin}{head}{_B}(?:```json)?{_B}\{{"

    def for_template(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        return [
            {**one, "content": one["content"] or None} if one.get("tool_calls") else dict(one)
            for one in messages
        ]

    def _start(self, names: Sequence[str], several: bool) -> list[str]:
        begun = f"begun[lazy]: FREE {json.dumps(self.first + self.begin)}"
        more = f"({json.dumps(self.joint + self.begin)} one_call)*" if several else ""
        called = f"called: begun one_call {more} {json.dumps(self.last)}"
        return ["start: FREE | called", called, begun, f"FREE: /{self.free}/"]


class DeepSeekFenced(DeepSeek):
    """Of DeepSeek V3 and R1: the arguments stand in a fence."""

    name, joint, tail = "deepseek-fenced", "\n", f"\n```{DeepSeek.tail}"

    def head(self, name: str) -> str:
        return f"function{_SEP}{name}\n```json\n"


HERMES = Hermes()
_FORMS = {
    form.name: form
    for form in (
        HERMES,
        Llama(),
        Mistral(),
        MistralArgs(),
        Xml(),
        DeepSeek(),
        DeepSeekFenced(),
    )
}


def form_named(name: str) -> ToolForm:
    """The one of that name; Hermes' for any other."""
    return _FORMS.get(name, HERMES)


def form_in(template: str) -> str:
    """The name of the form that a chat template is written for; "" for none of these."""
    if "[TOOL_CALLS]" in template:
        return "mistral-args" if "[ARGS]" in template else "mistral"
    if "<tool_call>" in template:
        if "<function=" in template and "<parameter=" in template:
            return "xml"
        return "" if "<function=" in template or "<arg_key>" in template else "hermes"
    if DeepSeek.begin in template:
        return "deepseek-fenced" if "```json" in template else "deepseek"
    has_header = "<|start_header_id|>" in template
    return "llama" if has_header and '"parameters": ' in template else ""


def _any_of(names: Sequence[str]) -> str:
    """A group that is one of these names, the longest one that it can be."""
    longest_first = sorted(names, key=len, reverse=True)
    return f"({'|'.join(re.escape(name) for name in longest_first)})"


def _with_arguments(message: Message) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return dict(message)
    calls = []
    for call in message["tool_calls"]:
        function = call["function"]
        try:
            arguments = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            arguments = function["arguments"]
        calls.append({**call, "function": {**function, "arguments": arguments}})
    return {**message, "tool_calls": calls}


def _nine(id: str) -> str:
    return hashlib.sha256(id.encode()).hexdigest()[:9]
