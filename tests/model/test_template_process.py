"""Chat templates in a process of their own: the same text, and an end of what has none."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from support.memory_limits import memory_limit_holds
from support.starting import at_start
from support.tiers import thorough
from support.torch_rings import BASE, tokenizer
from transformers import AutoTokenizer

from edgespec.errors import ConfigError, ModelError
from edgespec.model import bounded_process
from edgespec.model.template_process import TemplateProcess, render_apart
from edgespec.model.tokenizer import Tokenizer

TALK = [
    {"role": "system", "content": " Be <brief> & kind.\n"},
    {"role": "user", "content": "Hëllo {{ 1 }} 👩‍👧 </s>"},
    {"role": "assistant", "content": ""},
    {"role": "user", "content": "\tbye"},
]
TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
ALL_SORTS = (
    "{{- bos_token }}\n{%- for m in messages %}\n  {% if loop.index0 == 9 %}{% break %}{% endif %}"
    "<|{{ m['role'] | upper }}|>{{ m.content | trim | tojson(indent=2) }}{{ m | tojson }}"
    "{% generation %}{{ m.content.split('l')[-1].strip() }}{% endgeneration %}\n{% endfor %}"
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ dict(a=1) }}{{ tools is none }}{{ strftime_now('%Y') }}{{ eos_token }}"
    "{% if add_generation_prompt %}<|ASSISTANT|>{% endif %}"
)
LOOPS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
ALLOCATES = (
    "{% set ns = namespace(x='a') %}"
    "{% for a in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}"
)


@contextmanager
def rendering(
    template: str, tokens: Mapping[str, str] = TOKENS, seconds: float = 60.0
) -> Iterator[TemplateProcess]:
    made = TemplateProcess(template, tokens, seconds)
    try:
        yield made
    finally:
        made.close()


def if_user(what: str) -> str:
    """A template that does that for what starts with "x" alone."""
    return "{% if messages[0].content[0] == 'x' %}" + what + "{% else %}fine{% endif %}"


def talk(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


@pytest.mark.parametrize("template", [ALL_SORTS, tokenizer().chat_template])
def test_it_writes_what_transformers_writes(template: str) -> None:
    own = AutoTokenizer.from_pretrained(BASE)
    own.chat_template = template
    right = own.apply_chat_template(TALK, tokenize=False, add_generation_prompt=True)
    with rendering(template, tokenizer().special_tokens) as made:
        assert made.render(TALK) == right


@pytest.mark.thorough
def test_it_is_small() -> None:
    with rendering("{{ messages }}") as made:
        made.render(TALK)
        assert made.child is not None
        child = psutil.Process(made.child.pid)
        assert child.memory_info().rss < 100 << 20
        assert not any("torch" in mapped.path for mapped in child.memory_maps())


@pytest.mark.parametrize(
    ("what", "words"),
    [
        (LOOPS, "it took all the time"),
        (ALLOCATES, "needs more than 256 MiB"),
        thorough("{{ 'ab' * 9999999 }}", "writes more than 8388608 characters"),
        thorough("{{ raise_exception('not like that') }}", "refuses this: not like that"),
        ("{{ messages[0].content.__class__.__mro__ }}", "refuses this: "),
    ],
)
def test_what_has_no_end_ends_in_one_clear_error_and_the_next_is_rendered(
    what: str, words: str
) -> None:
    if what == ALLOCATES and not memory_limit_holds():
        pytest.skip("no limit on a process's memory holds here: it is emulated")
    with rendering(if_user(what), seconds=10.0) as made:
        made.render(talk("hello"))
        made.seconds = 0.5 if what == LOOPS else 60.0
        with pytest.raises(ConfigError, match=words) as caught:
            made.render(talk("x"))
        assert "\n" not in str(caught.value)
        made.seconds = 60.0
        assert made.render(talk("hello")) == "fine"


@pytest.mark.thorough
def test_one_that_dies_is_started_again() -> None:
    with rendering("fine") as made:
        made.render(TALK)
        assert made.child is not None
        made.child.kill()
        made.child.wait()
        assert made.render(TALK) == "fine"


def test_a_start_may_take_any_time_in_which_it_does_something(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounded_process, "STILL_S", 10.0)
    for code in (
        "import time\nwhile time.process_time() < 1.5: pass",
        "import time; time.sleep(99)",
    ):
        at_start(monkeypatch, tmp_path, "edgespec.model.template_process", code)
        with rendering("fine") as made:
            if "sleep" not in code:
                assert made.render(TALK) == "fine"
                continue
            with pytest.raises(ModelError, match="the model's chat template does not start"):
                made.render(TALK)


def test_closing_it_ends_it_while_it_renders() -> None:
    with rendering(LOOPS) as made:
        made.start()
        child = made.child
        assert child is not None
    assert child.returncode is not None


def test_it_does_not_outlive_its_parent(tmp_path: Path) -> None:
    """Killed while the template loops, so that the child does not look whether it is alone."""
    script = (
        "import sys, threading\n"
        "from edgespec.model.template_process import TemplateProcess\n"
        f"made = TemplateProcess({if_user(LOOPS)!r}, {{}}, 600.0)\n"
        "made.render([{'role': 'user', 'content': 'a'}])\n"
        "print(made.child.pid, flush=True)\n"
        "made.render([{'role': 'user', 'content': 'x'}])\n"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        limit = time.monotonic() + 20.0
        before = child.cpu_times().user
        while child.cpu_times().user < before + 0.1:  # it renders
            assert time.monotonic() < limit
            time.sleep(0.02)
        os.kill(parent.pid, signal.SIGKILL)
    child.wait(20.0)
    assert not child.is_running()


def test_a_tokenizer_writes_in_a_process_of_its_own(tmp_path: Path) -> None:
    """It starts with the first conversation, and ends with the tokenizer."""
    folder = Path(shutil.copytree(BASE, tmp_path / "model"))
    one = Tokenizer(folder)
    talk = [{"role": "user", "content": "hi"}]
    here = one.encode_chat(talk)
    before = {*psutil.Process().children()}  # of other tests, which may not have ended yet
    render_apart(one)
    assert {*psutil.Process().children()} <= before
    assert one.encode_chat(talk) == here
    (child,) = {*psutil.Process().children()} - before
    del one
    gc.collect()
    child.wait(60)
    bundled = Tokenizer(BASE)
    render_apart(bundled)
    assert bundled.encode_chat(talk) == here
    assert {*psutil.Process().children()} <= before
