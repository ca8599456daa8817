"""Tokenizer of a checkpoint folder, incremental detokenising, and the same-tokenizer check.

`encode` and `encode_chat` take seconds for a long text. They let other threads run meanwhile, since
transformers calls tokenizers' encode_batch, which gives Python's lock back (its `encode` does not).
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol

from edgespec.errors import CapacityError, ConfigError, ModelError
from edgespec.model.chat_text import ChatText
from edgespec.model.grammar import CompiledGrammar, GrammarCompiler, Vocabulary
from edgespec.model.kept_tokenizer import KeptTokenizer, tokenizer_of
from edgespec.model.reading import reading
from edgespec.model.text_bound import BYTES, TextBound, bound_of
from edgespec.types.thinking import tags_of, thinking_in
from edgespec.types.tool_forms import Message, Tool, form_in, form_named

_MOST_TOKENS = 1 << 20
"""The largest known vocabularies have 262,144."""
_REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Text on which tokenizers differ: runs of spaces, digits, accents, other scripts, emoji, newlines.
_PROBE = (
    "Hello  world 12345\n\n\tnaïve don't (x==1); 今日は, мир 👩‍👩‍👧 \u00a0 ﬁ e\u0301 <s> [INST]"
)


class Render(Protocol):
    """Writes a conversation by a chat template. Raises ConfigError if it does not take it."""

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str: ...


class Tokenizer:
    """Text to token ids and back, by the tokenizer files of one model folder."""

    def __init__(self, path: str | Path, *, is_kept: bool = False) -> None:
        """`is_kept`: what transformers makes of it may come from the user's cache, and goes there.
        Raises ModelError if the folder has no tokenizer that can be opened offline."""
        self.path = Path(path)
        if not self.path.is_dir():
            raise ModelError(f"there is no model folder {self.path} to take a tokenizer from")
        self._encoding = threading.Lock()  # transformers' tokenizers change as they encode
        needed = "its tokenizer.json and tokenizer_config.json are needed"
        with reading(f"the tokenizer in {self.path}", needed):
            self.inner = (
                tokenizer_of(self.path, self._of_library, _PROBE) if is_kept else self._of_library()
            )
            """transformers' own tokenizer, or what does the same."""
            highest = max(self.inner.get_vocab().values(), default=0)
            if highest >= _MOST_TOKENS:  # tokenizers counts up to there, and keeps room for it
                raise ValueError(f"a token has the number {highest}")
            self.eos_ids = self._find_eos_ids()
            added = self.inner.added_tokens_decoder.items()
            self._special = {index for index, token in added if token.special}
            self._chat = ChatText(self.inner)
            self._anchor = (self.encode("a") or [0])[-1]
        self.render: Render = self._render
        """Writes a conversation by the chat template: in this process, unless told otherwise."""
        self.try_grammar: Callable[[str], None] = lambda text: None
        """Raises ConfigError for a grammar that may take too much to compile, before it is."""

    def _of_library(self) -> Any:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(
            str(self.path),
            config=_settings(self.path),
            local_files_only=True,
            trust_remote_code=False,
        )

    @property
    def chat_template(self) -> str:
        """The model's chat template; "" if it has none."""
        if not getattr(self.inner, "chat_template", None):
            return ""
        return str(self.inner.get_chat_template())

    @property
    def special_tokens(self) -> dict[str, str]:
        """The control tokens that a chat template knows by name (bos_token)."""
        named = self.inner.special_tokens_map.items()
        return {name: str(token) for name, token in named if not isinstance(token, list)}

    @cached_property
    def bound(self) -> TextBound | None:
        """How many characters a token stands for at most; None if that is not known.

        It is found once, in up to seconds for a large vocabulary.
        """
        inner = self.inner
        return inner.bound if isinstance(inner, KeptTokenizer) else bound_of(_pipeline(self))

    def check_length(self, text: str, most: int) -> None:
        """Raise CapacityError if the text has more characters than `most` tokens can stand for."""
        bound = self.bound
        if bound is None or len(text) <= most * bound.chars:
            return
        if bound.counted(text) > most * bound.chars:
            raise CapacityError(
                f"the prompt has {len(text)} characters; into the {most} tokens that the model's "
                f"context has room for at most {most * bound.chars} can fit; shorten the prompt"
            )

    def encode(self, text: str, *, bare: bool = False) -> list[int]:
        """Token ids of a text prompt, with what the tokenizer itself puts around one (BOS), unless
        it is `bare`."""
        # verbose: transformers would warn of a length that admission refuses anyway.
        with self._encoding:
            return list(self.inner.encode(text, add_special_tokens=not bare, verbose=False))

    def encode_chat(
        self,
        messages: Sequence[Message],
        most: int | None = None,
        tools: Sequence[Tool] = (),
        settings: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation by the model's chat template, up to where it answers; `tools`
        may be called there. `settings`: what else the template is told, by name.

        Control tokens are those that the template writes; one that a message spells is plain text.
        Raises ConfigError if the model has no template, or it does not take this conversation;
        CapacityError if what it wrote is surely too long for `most` tokens. The template writes the
        tools if it knows tools, and their form is one that edgespec reads; else they are told as
        text, and so are calls and results, unless it knows those.
        """
        told = None
        if tools or any(one["role"] == "tool" or "tool_calls" in one for one in messages):
            form = form_named(form_in(self.chat_template))
            if self.takes_tools:
                told = [tool.as_json() for tool in tools] or None
                messages = form.for_template(messages)
            elif form.writes_tools:
                messages = form.as_text(messages, tools)
            else:
                messages = form.with_words(form.for_template(messages), tools)
        return self._encoded([dict(one) for one in messages], told, most, settings)

    @cached_property
    def thought_marks(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The tokens that begin a thought, and those that end one; None: it has no thoughts."""
        tag = thinking_in(self.chat_template)
        if not tag:
            return None
        with self._encoding:
            marks = (self.inner.encode(one, add_special_tokens=False) for one in tags_of(tag))
            opening, closing = map(tuple, marks)
        return opening, closing

    def opens_thought(self, tokens: Sequence[int]) -> bool:
        """Whether a prompt ends within a thought: with the tag that begins one."""
        tag = thinking_in(self.chat_template)
        return bool(tag) and self.decode(tokens[-8:]).rstrip().endswith(f"<{tag}>")

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the chat template writes the tools that it is given, in a form that is known."""
        if not form_in(self.chat_template) or "tools" not in self.chat_template:
            return False
        talk = [{"role": "user", "content": "a"}]
        try:
            with_tools = self.render(talk, [Tool("b", "c", {"type": "object"}).as_json()])
            return with_tools != self.render(talk)
        except ConfigError:
            return False

    def _encoded(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        most: int | None,
        settings: Mapping[str, Any] | None,
    ) -> list[int]:
        template = self.chat_template
        if not template:
            raise ConfigError(
                "this model has no chat template; it completes texts alone (/v1/completions, "
                "`edgespec prompt`)"
            )
        asked: dict[str, Any] = {"messages": messages, "tools": tools}
        if settings:
            asked["settings"] = dict(settings)
        said, marks = self._chat.mark(asked, template)
        # A template says itself where an opening token belongs.
        text = self.render(**said)
        if most is not None:
            self.check_length(text, most)
        with self._encoding:
            return self._chat.encode(text, marks)

    def _render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            # apply_chat_template leaves out what is None, which DeepSeek's templates look for.
            texts, _ = render_jinja_template(
                conversations=[messages],
                tools=tools,
                chat_template=self.chat_template,
                add_generation_prompt=True,
                **{**(settings or {}), **self.special_tokens},
            )
            return str(texts[0])
        except Exception as error:  # templates raise what they like for what they do not take
            raise ConfigError(f"the model's chat template refuses this: {error}") from error

    def grammar(self, text: str) -> CompiledGrammar:
        """What an answer may be, by the `grammar` of a message Submit. Raises ConfigError."""
        self.try_grammar(text)
        return self._grammars.compile(text)

    @cached_property
    def _grammars(self) -> GrammarCompiler:
        return GrammarCompiler(self.vocabulary)

    @property
    def vocabulary(self) -> Vocabulary:
        """What grammars are for. Raises ConfigError for a tokenizer without a fast form."""
        backend = getattr(self.inner, "backend_tokenizer", None)
        if backend is None:
            raise ConfigError("no grammar can be used with this tokenizer, which has no fast form")
        return Vocabulary(backend.to_str(), tuple(sorted(self.eos_ids)))

    def stream(self) -> IncrementalDetokenizer:
        return IncrementalDetokenizer(self)

    def token(self, token: int) -> tuple[str, bytes | None]:
        """The text of one token alone, and its bytes, None where it is part of a character and
        its bytes are not told."""
        name = str(self.inner.convert_ids_to_tokens(token))
        if token in self._special:
            return name, name.encode()
        byte = _BYTE_TOKEN.fullmatch(name)
        if byte is not None:
            raw = bytes([int(name[3:5], 16)])
            return raw.decode("utf-8", "replace"), raw
        text = self._alone(token)
        if _REPLACEMENT not in text:
            return text, text.encode()
        spelt = all(character in BYTES for character in name)  # as byte-level tokenizers spell
        return text, bytes(BYTES[character] for character in name) if spelt else None

    def _alone(self, token: int) -> str:
        """Its text after another one: some decoders drop the blank in front of the first."""
        before = self.inner.decode([self._anchor], clean_up_tokenization_spaces=False)
        both = self.inner.decode([self._anchor, token], clean_up_tokenization_spaces=False)
        return str(both)[len(str(before)) :]

    def spelt(self, tokens: Sequence[int]) -> str:
        """The text of all of these, control tokens by their names."""
        return str(self.inner.decode(list(tokens), clean_up_tokenization_spaces=False))

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids` without special tokens."""
        return str(
            self.inner.decode(
                list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
        )

    def leaves_text_open(self, token: int) -> bool:
        """Whether the token's text depends on those after it, or it has none of its own.

        True for a single byte of a character outside the vocabulary (<0xE2>), as a run of these is
        decoded as one, and for special tokens, which may lie within such a run.
        """
        if token in self._special:
            return True
        name = self.inner.convert_ids_to_tokens(token)
        return isinstance(name, str) and _BYTE_TOKEN.fullmatch(name) is not None

    def _find_eos_ids(self) -> frozenset[int]:
        """Every token that any of the folder's files calls an end: chat models list several."""
        found: set[int] = set()
        for name in ("generation_config.json", "config.json"):
            file = self.path / name
            if file.is_file():
                with reading(file):
                    listed = json.loads(file.read_text(encoding="utf-8")).get("eos_token_id")
                    tokens = listed if isinstance(listed, list) else [listed]
                    found.update(int(token) for token in tokens if token is not None)
        own = self.inner.eos_token_id
        return frozenset(found if own is None else {*found, own})


class IncrementalDetokenizer:
    """Text of a growing sequence of tokens, given out as soon as it is committed.

    All pushes and the flush together give exactly `decode` of all tokens, and none ends inside a
    character. Only a short window of the last tokens is decoded each time.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Tokens whose text is out, kept as the context in which the next ones are decoded (some
        # decoders treat the first token of a text in another way), then those still held back.
        self._shown: list[int] = []
        self._held: list[int] = []

    def push(self, token: int) -> str:
        """Add a token; return the text that is finished by it, often but not always its own."""
        self._held.append(token)
        if self._tokenizer.leaves_text_open(token):
            return ""
        text = self._new_text()
        if not text or text.endswith(_REPLACEMENT):
            return ""
        self._shown, self._held = self._held, []
        return text

    def flush(self) -> str:
        """The sequence has ended: the rest of its text, half characters as U+FFFD."""
        text = self._new_text()
        self._shown, self._held = [], []
        return text

    def _new_text(self) -> str:
        if not self._held:
            return ""
        before = self._tokenizer.decode(self._shown) if self._shown else ""
        after = self._tokenizer.decode(self._shown + self._held)
        return after[len(before) :]


def require_same_tokenizer(base: str | Path, draft: str | Path) -> None:
    """Raise ModelError naming the first difference between two folders' tokenizers.

    Compares what tokens mean, how text is cut into them, and BOS and EOS; not file names or how
    large the models' embeddings are padded.
    """
    one, other = Tokenizer(base, is_kept=True), Tokenizer(draft, is_kept=True)
    for difference in (
        _vocabulary_difference(one, other),
        _specials_difference(one, other),
        _added_difference(one, other),
        _pipeline_difference(one, other),
        _probe_difference(one, other),
    ):
        if difference:
            raise ModelError(
                f"the draft model in {other.path} does not have the tokenizer of the base model in "
                f"{one.path}: {difference}; choose a draft model of the base model's own family"
            )


def _vocabulary_difference(base: Tokenizer, draft: Tokenizer) -> str | None:
    ours = {index: token for token, index in base.inner.get_vocab().items()}
    theirs = {index: token for token, index in draft.inner.get_vocab().items()}
    if ours == theirs:
        return None
    index = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    return (
        f"token {index} is {_named(ours.get(index))} in the base and "
        f"{_named(theirs.get(index))} in the draft "
        f"(vocabularies of {len(ours)} and {len(theirs)} tokens)"
    )


def _added_difference(base: Tokenizer, draft: Tokenizer) -> str | None:
    ours, theirs = base.inner.added_tokens_decoder, draft.inner.added_tokens_decoder
    for index in sorted(ours.keys() | theirs.keys()):
        one, other = repr(ours.get(index)), repr(theirs.get(index))
        if one != other:
            return f"added token {index} is {one} in the base and {other} in the draft"
    return None


def _specials_difference(base: Tokenizer, draft: Tokenizer) -> str | None:
    for kind in ("bos_token", "eos_token"):
        ours, theirs = base.special_tokens.get(kind), draft.special_tokens.get(kind)
        if ours != theirs:
            return f"{kind} is {_named(ours)} in the base and {_named(theirs)} in the draft"
    ours_put, theirs_put = base.encode(""), draft.encode("")
    if ours_put != theirs_put:
        return f"around an empty text the base puts tokens {ours_put} and the draft {theirs_put}"
    return None


def _pipeline_difference(base: Tokenizer, draft: Tokenizer) -> str | None:
    ours, theirs = _pipeline(base), _pipeline(draft)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if ours.get(part) != theirs.get(part):
            return f"their {part} differs ({ours.get(part)} and {theirs.get(part)})"[:300]
    one, other = ours.get("model") or {}, theirs.get("model") or {}
    if one.get("type") != other.get("type"):
        return f"their algorithms differ ({one.get('type')} and {other.get('type')})"
    merges = list(zip(one.get("merges") or (), other.get("merges") or (), strict=False))
    for rank, (mine, yours) in enumerate(merges):
        if mine != yours:
            return f"merge {rank} is {mine} in the base and {yours} in the draft"
    if len(one.get("merges") or ()) != len(other.get("merges") or ()):
        return "one has more merges than the other"
    return None


def _settings(folder: Path) -> SimpleNamespace | None:
    """config.json as it stands, for a tokenizer whose own settings name its class.

    Without it transformers makes a configuration by the model's class, and imports a second of code
    for that. None where it has to.
    """
    try:
        named = json.loads((folder / "tokenizer_config.json").read_bytes())
        model = json.loads((folder / "config.json").read_bytes())
        if named["tokenizer_class"] and "auto_map" not in named:
            return SimpleNamespace(**{"model_type": ""} | model)
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        pass  # transformers has its own words for what is wrong with them
    return None


def _pipeline(tokenizer: Tokenizer) -> dict[str, Any]:
    """The serialised stages of a tokenizer; nothing for the rare one without a fast form."""
    backend = getattr(tokenizer.inner, "backend_tokenizer", None)
    return json.loads(backend.to_str()) if backend is not None else {}


def _probe_difference(base: Tokenizer, draft: Tokenizer) -> str | None:
    ours, theirs = base.encode(_PROBE), draft.encode(_PROBE)
    if ours != theirs:
        at = next(
            (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
            min(len(ours), len(theirs)),
        )
        return f"they cut the text {_PROBE!r} differently from its token {at} on"
    if base.decode(ours) != draft.decode(ours):
        return f"they turn the tokens of {_PROBE!r} back into different texts"
    return None


def _named(value: object) -> str:
    return "missing" if value is None else repr(str(value))
