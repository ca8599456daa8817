"""Tokens: /tokenize, /detokenize and /apply-template, as vLLM's and llama-server's clients ask."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, to_builtins
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from edgespec.serving.problems import ApiProblem
from edgespec.serving.reply_bodies import PromptReply, TokensReply
from edgespec.serving.request_bodies import ChatRequest, TextRequest, TokenId
from edgespec.serving.request_parts import RequestPart, only

if TYPE_CHECKING:
    from edgespec.serving.app import Service

_NO_PIECES = "ask /detokenize for the text of one"
_AS_ANSWERED = "a conversation is read as it is before an answer"


class TokenizeRequest(RequestPart, kw_only=True):
    model: str = ""
    prompt: Annotated[str | None, Meta(description="The text.")] = None
    content: Annotated[str | None, Meta(description="The same, as llama-server has it.")] = None
    messages: Annotated[
        list[dict[str, Any]] | None, Meta(description="A conversation, in the place of a text.")
    ] = None
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="A text has what the tokenizer puts around one.")
    ] = None
    add_special: Annotated[bool | None, Meta(description="The same, as llama-server has it.")] = (
        None
    )
    add_generation_prompt: Annotated[Any, only(_AS_ANSWERED, True)] = None
    return_token_strs: Annotated[Any, only(_NO_PIECES, False)] = None
    with_pieces: Annotated[Any, only(_NO_PIECES, False)] = None


class DetokenizeRequest(RequestPart, kw_only=True):
    model: str = ""
    tokens: Annotated[list[TokenId], Meta(min_length=1)]


class TokensApi:
    """Its routes, over the service that answers them."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[BaseRoute]:
        """Of all three."""
        template = partial(self._tokenize, as_text=True)
        return [
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/apply-template", template, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]

    async def _tokenize(self, request: Request, as_text: bool = False) -> Response:
        """The tokens of a text or a conversation, or its text."""
        asked = await self._service.asked(request, TokenizeRequest)
        if asked.messages is not None:
            names = ("model", "messages", "tools", "chat_template_kwargs")
            chat = ChatRequest, {name: getattr(asked, name) for name in names}
            prompt, most = await self._service.prompt_of(request, *chat)
        else:
            text = asked.content if asked.prompt is None else asked.prompt
            if text is None or as_text:
                name = "messages" if as_text else "prompt"
                code = "missing_required_parameter"
                raise ApiProblem(400, f"{name} is missing", param=name, code=code)
            # vLLM puts them in front unless told otherwise, llama-server if it is told so.
            given = asked.add_special_tokens if asked.prompt is not None else asked.add_special
            special = asked.prompt is not None if given is None else given
            body = {"model": asked.model, "prompt": text, "add_special_tokens": special}
            prompt, most = await self._service.prompt_of(request, TextRequest, body)
        if as_text:
            return _told(PromptReply(prompt.text, prompt.text))
        return _told(TokensReply([*prompt.token_ids], len(prompt.token_ids), most))

    async def _detokenize(self, request: Request) -> Response:
        """The text of tokens."""
        asked = await self._service.asked(request, DetokenizeRequest)
        body = {"model": asked.model, "prompt": asked.tokens}
        prompt, _ = await self._service.prompt_of(request, TextRequest, body)
        return _told(PromptReply(prompt.text, prompt.text))


def _told(body: TokensReply | PromptReply) -> Response:
    return JSONResponse(to_builtins(body))
