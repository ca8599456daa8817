"""EAGLE heads: what they guess, against the papers' arithmetic written out once more in float64."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.cases import case
from support.checkpoints import write_checkpoint
from support.eagle_heads import DIM, FORMS, HEADS, HIDDEN, VOCAB, Form, write_eagle
from support.passes import rows_of

from edgespec.config import Quantisation
from edgespec.drafting.eagle.format import read_head
from edgespec.drafting.eagle.guesser import EagleGuesser, load_eagle
from edgespec.drafting.eagle.shape import Kind
from edgespec.errors import ModelError, RemoteProtocolError
from edgespec.model.aux_hidden import packed, unpacked
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.quantised.linear import dequantised, pack
from edgespec.model.tensors import from_torch
from edgespec.types.features import Features
from edgespec.types.tensor import Layers
from edgespec.verify.sampling import Sampling

CONTEXT = [5, 9, 90, 33, 7, 61, 2]
PATHS = [[], [4], [8], [4, 77], [8, 8, 50], [4, 77, 3]]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("base"), seed=3, num_hidden_layers=8)


def guesser(base: Path, head: Path, form: Form) -> EagleGuesser:
    source = Checkpoint(base)
    kind: Kind = "eagle3" if form.third else "eagle"
    return load_eagle(head, kind, source, OutputHead(source, "float64"), "float64")


class Reference:
    """One chain of pairs, row after row, by the formulas of EAGLE §4.1 and EAGLE-3 §3.1."""

    def __init__(self, form: Form, tensors: dict[str, torch.Tensor], base: Path) -> None:
        self.form = form
        self.t = {name: tensor.double() for name, tensor in tensors.items()}
        weights = Checkpoint(base)
        self.lm_head = self.t.get("lm_head.weight", weights.tensor("lm_head.weight").double())
        own = form.embedding and not (form.third and form.width == HIDDEN)
        table = self.t["embed_tokens.weight"] if own else None
        self.embedding = weights.tensor("model.embed_tokens.weight").double()
        self.embedding = self.embedding if table is None else table
        self.theta = form.settings.get("rope_theta", 1e4)
        self.factor = form.settings.get("rope_scaling", {}).get("factor", 1.0)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / torch.sqrt((x * x).mean() + 1e-5) * self.t[name]

    def project(self, name: str, x: torch.Tensor) -> torch.Tensor:
        out = self.t[f"L.self_attn.{name}_proj.weight"] @ x
        return out + self.t.get(f"L.self_attn.{name}_proj.bias", torch.zeros(()))

    def turn(self, x: torch.Tensor, position: int) -> torch.Tensor:
        half = DIM // 2
        for i in range(half):
            angle = position / self.factor / self.theta ** (2 * i / DIM)
            angle = torch.tensor(angle, dtype=torch.float64)
            a, b = x[:, i].clone(), x[:, i + half].clone()
            x[:, i] = a * angle.cos() - b * angle.sin()
            x[:, i + half] = b * angle.cos() + a * angle.sin()
        return x

    def row(self, features: torch.Tensor, token: int) -> torch.Tensor:
        position = len(self.keys)
        e = self.embedding[token]
        if self.form.third:
            h = self.norm(features, "L.hidden_norm.weight")
            x = h if self.form.settings.get("norm_before_residual") else features
            a = torch.cat([self.norm(e, "L.input_layernorm.weight"), h])
        else:
            x = a = self.t["fc.weight"] @ torch.cat([e, features]) + self.t.get(
                "fc.bias", torch.zeros(())
            )
        q = self.turn(self.project("q", a).reshape(HEADS, DIM), position)
        kv = self.form.kv_heads
        self.keys.append(self.turn(self.project("k", a).reshape(kv, DIM), position))
        self.values.append(self.project("v", a).reshape(kv, DIM))
        heads = []
        for head in range(HEADS):
            shared = head // (HEADS // kv)
            weights = torch.stack([q[head] @ k[shared] for k in self.keys]) / DIM**0.5
            weights = weights.softmax(0)
            heads.append(sum(w * v[shared] for w, v in zip(weights, self.values, strict=True)))
        x = x + self.project("o", torch.cat(heads))
        n = self.norm(x, "L.post_attention_layernorm.weight")
        gate = self.t["L.mlp.gate_proj.weight"] @ n
        up = self.t["L.mlp.up_proj.weight"] @ n
        return x + self.t["L.mlp.down_proj.weight"] @ (gate * torch.sigmoid(gate) * up)

    def log_probs(self, given: torch.Tensor, context: list[int], path: list[int]) -> torch.Tensor:
        """Over the head's vocabulary, of what follows `path` behind `context`."""
        self.keys, self.values = [], []
        known = [self.t["fc.weight"] @ row for row in given] if self.form.third else list(given)
        out = known[0]
        for token in [*context[1:], *path]:
            features = known.pop(0) if known else out
            out = self.row(features, token)
        self.out = out
        return self.guesses(out)

    def guesses(self, out: torch.Tensor) -> torch.Tensor:
        """Log-probabilities by what a row gave out."""
        normed = self.norm(out, "norm.weight") if self.form.third else out
        return (self.lm_head @ normed).log_softmax(0)


def given_rows(form: Form, count: int, seed: int = 1) -> tuple[torch.Tensor, Features]:
    """Features of `count` committed rows, as the reference and as the guesser take them."""
    random = torch.Generator().manual_seed(seed)
    rows = [torch.randn((count, HIDDEN), generator=random) for _ in range(3)]
    if not form.third:
        return rows[0].double(), Features(from_torch(rows[0].double()))
    aux_hidden = packed(rows)
    said = form.settings.get("eagle_aux_hidden_state_layer_ids")
    layers = (2, 4, 5) if said is None else tuple(layer + 1 for layer in said)
    # They come from the ring in the order of the layers, and with others behind them.
    aux_layers = Layers((*sorted(layers), 7))
    aux_hidden = packed([*(rows[layers.index(layer)] for layer in aux_layers[:3]), rows[0]])
    at = [aux_layers.index(layer) for layer in layers]
    return unpacked(aux_hidden, 4, HIDDEN)[:, at].flatten(1).double(), Features(
        aux_hidden=aux_hidden, aux_layers=aux_layers
    )


@pytest.mark.parametrize("name", FORMS)
def test_guesses_are_those_of_the_papers_arithmetic(name: str, base: Path, tmp_path: Path) -> None:
    form = FORMS[name]
    tensors = write_eagle(tmp_path, form)
    draft = guesser(base, tmp_path, form)
    rows, features = given_rows(form, len(CONTEXT) - 1)
    draft.open(1, Sampling())
    assert draft.read(1, CONTEXT, features)
    children = draft.guess(1, PATHS, 5)
    reference = Reference(form, tensors, base)
    token_of = torch.arange(form.draft_vocab) + tensors.get("d2t", 0)
    for index, path in enumerate(PATHS):
        wanted = reference.log_probs(rows, CONTEXT, path)
        best = wanted.argsort(descending=True, stable=True)[:5]
        mine = children.parents == index
        assert children.tokens[mine].tolist() == token_of[best].tolist()
        np.testing.assert_allclose(children.scores[mine], wanted[best], rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["eagle-llama3", "eagle3-official"])
def test_how_the_rows_came_makes_no_difference(name: str, base: Path, tmp_path: Path) -> None:
    """One by one with guesses in between, or all at once."""
    write_eagle(tmp_path, FORMS[name])
    _, features = given_rows(FORMS[name], len(CONTEXT) - 1)
    draft = guesser(base, tmp_path, FORMS[name])
    draft.open(1, Sampling())
    draft.open(2, Sampling())
    draft.read(1, CONTEXT, features)
    assert not draft.read(2, CONTEXT[:1], Features())
    whole = features.final or features.aux_hidden
    assert whole is not None
    for end in range(2, len(CONTEXT) + 1):
        one = whole.take(np.array([end - 2]))
        part = replace(features, **{"final" if features.final else "aux_hidden": one})
        assert draft.read(2, CONTEXT[:end], part)
        draft.guess(2, PATHS, 4)
    np.testing.assert_allclose(
        draft.guess(2, PATHS, 4).scores, draft.guess(1, PATHS, 4).scores, rtol=0, atol=1e-9
    )


def test_rows_of_another_base_are_the_rings_fault(base: Path, tmp_path: Path) -> None:
    plain = torch.zeros((6, HIDDEN - 4))
    for name, features in {
        "eagle-llama3": Features(from_torch(plain.double())),
        "eagle3-official": Features(
            aux_hidden=packed([plain] * 4), aux_layers=Layers((2, 4, 5, 7))
        ),
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        write_eagle(folder, FORMS[name])
        draft = guesser(base, folder, FORMS[name])
        draft.open(1, Sampling())
        with case(name), pytest.raises(RemoteProtocolError, match="the same model"):
            draft.read(1, CONTEXT, features)


def test_nothing_is_guessed_while_features_of_the_prompt_are_missing(
    base: Path, tmp_path: Path
) -> None:
    """To imitate them would take a pass for every one of them."""
    form = FORMS["eagle-llama3"]
    tensors = write_eagle(tmp_path, form)
    draft = guesser(base, tmp_path, form)
    rows, features = given_rows(form, 6)
    whole = features.final
    assert whole is not None
    draft.open(1, Sampling())
    assert not draft.read(1, CONTEXT, Features(whole.take(np.arange(4))))
    assert rows_of(draft) == (4,), "what is here is read meanwhile"
    assert draft.read(1, CONTEXT, Features(whole.take(np.arange(4, 6))))
    children = draft.guess(1, [[]], 1)
    assert rows_of(draft) == (2,)
    wanted = Reference(form, tensors, base).log_probs(rows, CONTEXT, [])
    assert children.scores[0] == pytest.approx(float(wanted.max()), abs=1e-9)


def test_a_guess_runs_once_and_all_of_a_level_together(base: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    draft = guesser(base, tmp_path, FORMS["eagle-llama3"])
    _, features = given_rows(FORMS["eagle-llama3"], len(CONTEXT) - 1)
    draft.open(1, Sampling())
    draft.read(1, CONTEXT, features)
    assert rows_of(draft) == (6,)
    draft.guess(1, PATHS, 4)
    assert rows_of(draft) == (2, 2, 2)
    draft.guess(1, [[4, 77, 3], [4, 77]], 4)
    assert rows_of(draft) == ()


def test_all_that_has_a_parent_runs_in_one_pass(base: Path, tmp_path: Path) -> None:
    """Whatever level it is on: levels are not waited for."""
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    draft = guesser(base, tmp_path, FORMS["eagle-llama3"])
    draft.open(1, Sampling())
    draft.read(1, CONTEXT, given_rows(FORMS["eagle-llama3"], 6)[1])
    draft.guess(1, [[4, 77]], 4)
    rows_of(draft)
    draft.guess(1, [[8], [4, 9], [4, 77, 3], [4, 77, 5]], 4)
    assert rows_of(draft) == (4,)


def test_what_was_run_below_a_guess_that_came_true_stays(base: Path, tmp_path: Path) -> None:
    form = FORMS["eagle-llama3"]
    tensors = write_eagle(tmp_path, form)
    draft = guesser(base, tmp_path, form)
    rows, features = given_rows(form, len(CONTEXT) + 2)
    whole = features.final
    assert whole is not None
    draft.open(1, Sampling())
    draft.read(1, CONTEXT, Features(whole.take(np.arange(6))))
    before = draft.guess(1, PATHS, 4)
    rows_of(draft)
    assert draft.read(1, [*CONTEXT, 4], Features(whole.take(np.array([6]))))
    after = draft.guess(1, [[77], [77, 3]], 4)
    assert rows_of(draft) == ()
    for index, path in enumerate((3, 5)):
        mine, old = after.parents == index, before.parents == path
        assert after.tokens[mine].tolist() == before.tokens[old].tolist()
    # The next guess runs with the pair that is committed now: it sees that one's true row, but goes
    # on from what its parent gave out before.
    asked = draft.guess(1, [[77, 50]], 1)
    assert rows_of(draft) == (2,)
    imitated = Reference(form, tensors, base)
    _, out = imitated.log_probs(rows[:6], CONTEXT, [4, 77]), imitated.out
    reference = Reference(form, tensors, base)
    reference.log_probs(rows[:7], [*CONTEXT, 4], [])
    reference.keys.append(imitated.keys[-1])
    reference.values.append(imitated.values[-1])
    wanted = reference.guesses(reference.row(out, 50))
    assert asked.scores[0] == pytest.approx(float(wanted.max()), abs=1e-9)
    # The new root itself, and what is run directly below it, have the true features.
    now = draft.guess(1, [[], [50]], 1)
    for index, path in enumerate(([], [50])):
        wanted = reference.log_probs(rows[:7], [*CONTEXT, 4], path)
        assert now.scores[index] == pytest.approx(float(wanted.max()), abs=1e-9)
    # One that was guessed, and one that nobody guessed.
    for end, token in ((8, 77), (9, 9)):
        context = [*CONTEXT, 4, 77, 9][: end + 1]
        assert context[-1] == token
        assert draft.read(1, context, Features(whole.take(np.array([end - 1]))))
        wanted = reference.log_probs(rows[:end], context, [])
        assert draft.guess(1, [[]], 1).scores[0] == pytest.approx(float(wanted.max()), abs=1e-9)


def test_the_truth_moves_down_with_the_passes_that_are_made(
    base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A guess runs again, beside the next one below it, once its parent is nearer to the truth."""
    monkeypatch.setattr("edgespec.drafting.eagle.rows._FAITHFUL", 0)
    form = FORMS["eagle3-official"]
    tensors = write_eagle(tmp_path, form)
    draft = guesser(base, tmp_path, form)
    rows, features = given_rows(form, len(CONTEXT))
    whole = features.aux_hidden
    assert whole is not None
    draft.open(1, Sampling())
    assert draft.read(1, CONTEXT, replace(features, aux_hidden=whole.take(np.arange(6))))
    draft.guess(1, [[4, 77, 3, 8]], 1)
    context, path = [*CONTEXT, 4], [77, 3, 8]
    assert draft.read(1, context, replace(features, aux_hidden=whole.take(np.array([6]))))
    reference = Reference(form, tensors, base)
    rows_of(draft)
    far = []
    for leaf in (10, 11, 12, 13, 14):
        guess = draft.guess(1, [[*path, leaf]], 1)
        wanted = reference.log_probs(rows, context, [*path, leaf])
        far.append(abs(guess.scores[0] - float(wanted.max())))
    assert rows_of(draft) == (2, 2, 2, 2, 1), "the pair first, then one level with each pass"
    assert min(far[:4]) > 1e-4
    assert far[4] < 1e-9


def test_without_all_features_of_the_turn_before_nothing_is_guessed(
    base: Path, tmp_path: Path
) -> None:
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    draft = guesser(base, tmp_path, FORMS["eagle-llama3"])
    whole = given_rows(FORMS["eagle-llama3"], 6)[1].final
    assert whole is not None
    for rows, can in ((4, True), (5, False)):
        draft.open(1, Sampling())
        draft.read(1, CONTEXT, Features(whole.take(np.arange(4))))
        draft.open(2, Sampling())
        draft.fork(2, 1, rows, ends=True)
        draft.close(1)
        assert draft.read(2, CONTEXT, Features(whole.take(np.arange(rows, 6)))) == can
        draft.close(2)


def test_a_token_that_the_base_lacks_has_no_children(base: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    draft = guesser(base, tmp_path, FORMS["eagle-llama3"])
    draft.open(1, Sampling())
    draft.read(1, CONTEXT, given_rows(FORMS["eagle-llama3"], 6)[1])
    assert set(draft.guess(1, [[VOCAB], [3]], 2).parents.tolist()) == {1}


def test_settings_in_doubt_are_tried(
    base: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The text is made by the head itself at the usual theta; config.json says another one."""
    form = FORMS["eagle-llama3"]
    tensors = write_eagle(tmp_path, form)
    draft = guesser(base, tmp_path, form)
    rows, features = given_rows(form, 220)
    reference = Reference(form, tensors, base)
    reference.theta = 1e4
    tokens = [5, 9]
    for row in rows:
        out = reference.row(row, tokens[-1])
        tokens.append(int((reference.lm_head @ out).argmax()))
    draft.open(1, Sampling())
    with caplog.at_level("INFO"):
        draft.read(1, tokens[:221], features)
    assert "rope theta 10000: 100%" in caplog.text
    best = draft.guess(1, [[]], 1).tokens.tolist()
    assert best == [tokens[221]]


@pytest.mark.parametrize("name", ["eagle-vicuna", "eagle3-official"])
def test_a_quantised_head_guesses_as_one_with_the_rounded_matrices(
    name: str, base: Path, tmp_path: Path
) -> None:
    form, int8 = FORMS[name], Quantisation.parse("int8")
    write_eagle(tmp_path, form)
    files = read_head(tmp_path, HIDDEN, VOCAB, 8)

    def held(weight: torch.Tensor) -> torch.Tensor:
        return dequantised(pack(weight, int8), weight.shape, int8, torch.float64)

    rounded = {
        key: held(weight) if weight.ndim == 2 else weight for key, weight in files.weights.items()
    }
    matrix = None if files.matrix is None else held(files.matrix)
    source = Checkpoint(base)
    head = OutputHead(source, "float64")
    drafts = [
        EagleGuesser(files, head, source, "float64", "cpu", int8, int8),
        EagleGuesser(replace(files, weights=rounded, matrix=matrix), head, source, "float64"),
        EagleGuesser(files, head, source, "float64"),
        EagleGuesser(files, head, source, "float64", "cpu", int8),
    ]
    scores = []
    for draft in drafts:
        draft.open(1, Sampling())
        draft.read(1, CONTEXT, given_rows(form, len(CONTEXT) - 1)[1])
        scores.append(draft.guess(1, PATHS, VOCAB).scores)
    np.testing.assert_allclose(scores[0], scores[1], rtol=0, atol=1e-9)
    assert np.abs(scores[0] - scores[2]).max() > 1e-5
    assert np.array_equal(scores[0], scores[3]) == (matrix is None)


def test_a_head_that_cannot_be_quantised_so(base: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle-vicuna"])
    source = Checkpoint(base)
    with pytest.raises(ModelError, match=r"q_proj of the eagle head as int4: .* choose a group"):
        load_eagle(
            tmp_path, "eagle", source, OutputHead(source), quantisation=Quantisation.parse("int4")
        )


def test_the_other_kind_of_head(base: Path, tmp_path: Path) -> None:
    write_eagle(tmp_path, FORMS["eagle-llama3"])
    source = Checkpoint(base)
    with pytest.raises(ModelError, match="is an eagle head; say eagle:"):
        load_eagle(tmp_path, "eagle3", source, OutputHead(source, "float64"), "float64")
