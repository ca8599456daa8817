"""The bundled demo pair, and the hybrid beside it: they load offline, are small, share one
tokenizer, and what learnt from the base agrees with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).resolve().parents[2] / "edgespec" / "models"
HYBRID = MODELS / "toy-hybrid"
LARGEST_PAIR_BYTES = 30 * 1000 * 1000

ROUND_TRIP_TEXTS = [
    "",
    " ",
    "plain words, and punctuation : kept !",
    "a  b   c\n\n\n\td\r\n  e  ",
    "    def f(x):\n\treturn  x ** 2  # trailing \n",
    "naïve café — “quotes” … ½ €",
    "日本語のテキスト, Ελληνικά, русский, עברית",
    "👩‍👩‍👧‍👦 emoji 🎉 and combining é",
    "1234567890 3.14159 0x1F -42 10,000",
    "\x00\x01\x7f\ufeff\u200b",
    "don 't n't . , ? 's",
]

# Written for this test; in none of the texts the pair was trained on.
UNSEEN_TEXTS = [
    "Question: Petra picks 14 baskets of plums on Monday and twice as many on Tuesday. If each "
    "basket holds 9 plums, how many plums did she pick in all?\nAnswer: On Tuesday she picks "
    "14 * 2 = 28 baskets.\nIn total she picks 14 + 28 = 42 baskets.\nSo she picks 42 * 9 = 378 "
    "plums.\n#### 378\n",
    "Question: A ferry carries 30 cars per trip and makes 6 trips a day. A ticket costs $8 per "
    "car. How much money does the ferry make in 5 days?\nAnswer: The ferry carries 30 * 6 = 180 "
    "cars a day.\nIt makes 180 * $8 = $1440 a day.\nIn 5 days it makes $1440 * 5 = $7200.\n"
    "#### 7200\n",
    "# ledgerctl\n\n> Manage ledgers from the command line.\n> More information: "
    "<https://example.org/ledgerctl>.\n\n- List all ledgers:\n\n`ledgerctl list`\n\n- Create a "
    "new ledger with a specific name:\n\n`ledgerctl create {{name}}`\n\n- Delete a ledger:\n\n"
    "`ledgerctl delete {{name}}`\n\n- Display help:\n\n`ledgerctl --help`\n",
    'def merge_counts(left, right):\n    """Return the sum of two dictionaries of counts."""'
    "\n    result = dict(left)\n    for key, value in right.items():\n        if key in result:\n"
    "            result[key] += value\n        else:\n            result[key] = value\n"
    "    return result\n",
]


@pytest.fixture(scope="module")
def pair() -> dict[str, Any]:
    loaded: dict[str, Any] = {}
    for who, folder in {"base": "base", "draft": "draft", "hybrid": HYBRID.name}.items():
        model = AutoModelForCausalLM.from_pretrained(
            MODELS / folder, dtype=torch.float32, local_files_only=True
        )
        loaded[who] = model.eval()
    loaded["tokenizer"] = AutoTokenizer.from_pretrained(MODELS / "base", local_files_only=True)
    return loaded


@pytest.fixture(scope="module")
def metrics() -> dict[str, Any]:
    return json.loads((MODELS / "metrics.json").read_text())


def test_the_pair_is_small() -> None:
    files = [path for path in MODELS.rglob("*") if path.is_file() and path.suffix != ".py"]
    of_smollm2 = {path for path in files if MODELS / "smollm2-135m-dspark" in path.parents}
    of_hybrid = {path for path in files if HYBRID in path.parents}
    of_pair = set(files) - of_smollm2 - of_hybrid
    assert sum(path.stat().st_size for path in of_pair) <= LARGEST_PAIR_BYTES
    assert sum(path.stat().st_size for path in of_smollm2) <= 12_000_000
    assert sum(path.stat().st_size for path in of_hybrid) <= 6_000_000


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_all_folders_hold_the_same_tokenizer(name: str) -> None:
    held = {(folder / name).read_bytes() for folder in (MODELS / "base", MODELS / "draft", HYBRID)}
    assert len(held) == 1


@pytest.mark.parametrize("who", ["base", "draft", "toy-hybrid"])
def test_tied_embeddings_are_stored_once_in_bfloat16(who: str) -> None:
    with safe_open(MODELS / who / "model.safetensors", framework="pt") as tensors:
        names = list(tensors.keys())
        assert "lm_head.weight" not in names
        assert all(tensors.get_tensor(name).dtype == torch.bfloat16 for name in names)


def test_models_have_the_promised_shape(pair: dict[str, Any]) -> None:
    assert pair["base"].config.num_hidden_layers >= 8
    assert pair["draft"].num_parameters() < pair["base"].num_parameters() / 3
    for who in ("base", "draft"):
        model = pair[who]
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert model.config.vocab_size == len(pair["tokenizer"])
        assert model.config.max_position_embeddings == 1024
        assert model.generation_config.do_sample is False
        assert model.generation_config.eos_token_id == pair["tokenizer"].eos_token_id


@pytest.mark.parametrize("text", ROUND_TRIP_TEXTS)
def test_text_comes_back_byte_for_byte(pair: dict[str, Any], text: str) -> None:
    tokenizer = pair["tokenizer"]
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_digits_are_single_tokens(pair: dict[str, Any]) -> None:
    assert len(pair["tokenizer"].encode("90210", add_special_tokens=False)) == 5


def test_recorded_figures_reach_the_goals(metrics: dict[str, Any]) -> None:
    held_out = metrics["held_out"]
    assert held_out["all"]["agreement"]["top1"] >= 0.55
    assert held_out["all"]["agreement"]["top8"] >= 0.85
    for source in ("gsm8k", "tldr", "code"):
        row = held_out[source]
        assert row["base"]["perplexity"] < row["unigram"]["perplexity"] / 10


@pytest.mark.parametrize("folder", [MODELS, HYBRID])
def test_card_names_sources_and_licences(folder: Path) -> None:
    card = (folder / "MODEL_CARD.md").read_text()
    for phrase in ("grade-school-math", "MIT", "tldr-pages", "CC BY 4.0", "PSF"):
        assert phrase in card


@pytest.mark.parametrize(("who", "right", "near"), [("draft", 0.50, 0.80), ("hybrid", 0.60, 0.85)])
@torch.inference_mode()
def test_what_learnt_from_the_base_agrees_with_it_on_unseen_text(
    pair: dict[str, Any], who: str, right: float, near: float
) -> None:
    first = eighth = total = 0
    for text in UNSEEN_TEXTS:
        ids = torch.tensor([pair["tokenizer"].encode(text)])
        wanted = pair["base"](ids).logits[0].argmax(-1)
        ranked = pair[who](ids).logits[0].topk(8, dim=-1).indices
        found = ranked == wanted[:, None]
        first += int(found[:, 0].sum())
        eighth += int(found.any(-1).sum())
        total += ids.shape[1]
    assert total > 300
    assert first / total >= right
    assert eighth / total >= near


@torch.inference_mode()
def test_base_answers_in_the_form_of_its_training_text(pair: dict[str, Any]) -> None:
    tokenizer = pair["tokenizer"]
    ids = torch.tensor([tokenizer.encode("# ledgerctl\n\n>")])
    out = pair["base"].generate(ids, max_new_tokens=64)[0, ids.shape[1] :]
    text = tokenizer.decode(out, skip_special_tokens=True)
    assert "- " in text
    assert len(set(out.tolist())) > 12
