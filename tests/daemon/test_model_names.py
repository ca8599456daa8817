"""Short names: what they stand for, what comes before them, and what is said of unknown ones."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from edgespec.daemon.bundled_models import HYBRID, bundled
from edgespec.daemon.model_names import (
    known_name,
    names_of,
    packaged,
    published_sampling,
    resolved,
    spoken,
)
from edgespec.daemon.settings import chosen_draft
from edgespec.errors import ConfigError, ModelError
from edgespec.planning.catalogue import MODELS, REFUSED

QWEN = MODELS["qwen3-8b"].hub


def test_a_name_becomes_what_it_stands_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert resolved("qwen3-8b") == resolved("Qwen3-8B") == QWEN
    for other in ("", "org/name", "./qwen3-8b", "/none/x.gguf", bundled("base")):
        assert resolved(other) == other
    assert (spoken(QWEN), spoken("org/name"), known_name("")) == ("qwen3-8b", "org/name", "")
    assert resolved(HYBRID) == resolved("Toy-Hybrid") == bundled(HYBRID)
    assert names_of(resolved(HYBRID))[0] == spoken(resolved(HYBRID)) == HYBRID
    for name in ("qwen3-8b", HYBRID):
        (tmp_path / name).mkdir()  # a folder comes first
        assert (resolved(name), known_name(name)) == (name, "")


def test_other_spellings_stand_for_the_same() -> None:
    for typed, name in {
        "qwen3:8b": "qwen3-8b",
        "qwen3:latest": "qwen3-8b",
        "gemma3:4b": "gemma-3-4b",
        "llama3.2:3b": "llama-3.2-3b",
        "Llama-3.2-3B-Instruct": "llama-3.2-3b",
        "deepseek-r1:7b": "r1-qwen-7b",
        "gpt-oss:20b": "gpt-oss-20b",
        "Qwen3-4B-Instruct-2507": "qwen3-4b-2507",
        "Ministral-3-8B-Instruct-2512": "ministral-3-8b",
        "granite-4.0-micro": "granite-4-micro",
        "phi4": "phi-4",
        "qwen2.5-coder:7b-instruct": "qwen2.5-coder-7b",
    }.items():
        assert resolved(typed) == MODELS[name].hub, typed
    assert resolved("gemma3:12b.gguf") == MODELS["gemma-3-12b"].gguf


def test_what_is_known_not_to_run_says_why_and_names_another(tmp_path: Path) -> None:
    for name, refused in REFUSED.items():
        for typed in (name, refused.hub, f"maker/{refused.hub.partition('/')[2]}-GGUF"):
            with pytest.raises(ModelError, match=re.escape(f"{typed} does not run: it")) as told:
                resolved(typed)
            assert f"; use {refused.instead} (docs/families.md)" in str(told.value)
    with pytest.raises(ModelError, match=r"recurrent state.*use qwen3-30b-a3b-2507"):
        resolved("unsloth/AI21-Jamba-Mini-1.6-GGUF/AI21-Jamba-Mini-1.6-UD-Q4_K_XL.gguf")
    here = tmp_path / "jamba-mini"
    here.mkdir()  # what is here is judged by its files
    assert resolved(str(here)) == str(here)


def test_a_served_model_answers_to_all_its_names() -> None:
    file = MODELS["qwen3-8b"].gguf
    assert names_of(file)[0] == "qwen3-8b"
    assert {QWEN, "Qwen3-8B", "qwen3", "Qwen3-8B-Q4_K_M.gguf"} <= set(names_of(file))
    assert names_of("/models/mine") == ("mine",)


def test_a_file_has_the_published_settings_of_its_name() -> None:
    known = MODELS["qwen3-8b"].sampling
    assert known == {"temperature": 0.6, "top_p": 0.95, "top_k": 20}
    for model in (QWEN, "/here/Qwen3-8B-Q4_K_M.gguf", "/here/qwen3-8b-UD-Q5_K_XL.gguf"):
        assert published_sampling(model) == known, model
    assert published_sampling("/here/Qwen3-9B-Q4_K_M.gguf") == {}
    assert published_sampling(MODELS["phi-4"].hub) == {}


def test_an_installed_package_holds_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = MODELS["smollm2-135m"]
    module, _, name = known.package.partition("/")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, module, raising=False)
    assert (packaged(known), resolved("smollm2-135m")) == ("", known.hub)
    (tmp_path / module).mkdir()
    (tmp_path / module / "__init__.py").touch()
    assert resolved("smollm2-135m") == known.hub  # the package without its file
    file = tmp_path / module / name
    file.touch()
    assert resolved("smollm2-135m") == str(file)
    assert spoken(str(file)) == "smollm2-135m"


def test_an_unknown_name_gets_suggestions() -> None:
    for typed, meant in {"llama3.1:9b": "llama-3.1-8b", "tinyllama-1b": "tinyllama-1.1b"}.items():
        with pytest.raises(
            ModelError, match=rf"no model folder or file {typed}, .*did you mean .*{meant}"
        ):
            resolved(typed)
    for typed in ("0", "0.gguf"):
        with pytest.raises(ModelError, match=r"is called so; `edgespec models` lists the names"):
            resolved(typed)


def test_a_name_with_gguf_stands_for_the_packed_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    file = MODELS["llama-3.1-8b"].gguf
    assert resolved("Llama-3.1-8B.gguf") == file
    assert (known_name(file), spoken(file)) == ("llama-3.1-8b", "llama-3.1-8b.gguf")
    assert str(chosen_draft("independent", file)) == MODELS["llama-3.2-1b"].gguf
    (tmp_path / "llama-3.1-8b.gguf").touch()  # what is here comes first
    assert resolved("llama-3.1-8b.gguf") == "llama-3.1-8b.gguf"
    with pytest.raises(ModelError, match=r"or file phi-4.gguf, "):
        resolved("phi-4.gguf")


def test_a_draft_is_found_by_its_name_and_by_that_of_its_base() -> None:
    head, small = MODELS["qwen3-8b"].draft_of("eagle3"), MODELS["qwen3-0.6b"].hub
    for typed, meant in {
        "": "",
        "none": "",
        "ngram": "ngram",
        "eagle3": f"eagle3:{head}",
        "independent": small,
        "qwen3-0.6b": small,
        "easyspec": f"easyspec:{small}",
        "hybrid:ngram+eagle3": f"hybrid:ngram+eagle3:{head}",
        "eagle3:org/head": "eagle3:org/head",
    }.items():
        chosen = chosen_draft(typed, QWEN)
        assert str(chosen) == meant, typed
        assert str(chosen_draft(str(chosen), QWEN)) == meant, "again, as settings keep it"
    with pytest.raises(ConfigError, match=r"Give eagle:FOLDER; `edgespec models` lists"):
        chosen_draft("eagle", QWEN)
    with pytest.raises(
        ConfigError, match=r"did you mean qwen3-8b .*or name a draft source: none, "
    ):
        chosen_draft("eagle3:qwen3-8", QWEN)
    assert chosen_draft("", "").folders == (bundled("draft"),)


def test_a_bundled_head_of_a_known_base_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folders = {"qwen3-8b-dspark": "/package/head"}
    monkeypatch.setattr(
        "edgespec.daemon.model_names.bundled_weights", lambda part: folders.get(part, "")
    )
    assert str(chosen_draft("dspark", QWEN)) == "dspark:/package/head"
    assert str(chosen_draft("eagle3", QWEN)).startswith("eagle3:"), "the catalogue's"
    assert str(chosen_draft("", QWEN)) == ""
