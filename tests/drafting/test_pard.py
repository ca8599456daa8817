"""Small models with masks: what follows from one pass, as transformers computes it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoints import plain_logits, reference
from support.distribution import guess_log_scores
from support.masked_models import MASK, with_masks
from support.passes import rows_of

from edgespec.drafting import pard
from edgespec.drafting.grower import Further, TreeGrower
from edgespec.drafting.pard import SLOTS, PardGuesser
from edgespec.errors import ModelError
from edgespec.model.loader import Checkpoint
from edgespec.types.draft_pass import RankedRows
from edgespec.verify.sampling import Sampling

pytestmark = pytest.mark.usefixtures("usual_draft_temperature")

TEXT = np.random.default_rng(5).integers(0, 96, 30).tolist()
ROOM = 48  # the model's own context (see conftest.py)


def draft_of(folder: Path, tmp_path: Path) -> TreeGrower:
    return TreeGrower(PardGuesser(Checkpoint(with_masks(folder, tmp_path)), "float64"))


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=11)])
def test_guesses_are_those_of_masks_behind_the_context(
    sampling: Sampling, folder: Path, tmp_path: Path
) -> None:
    """Every level of every context, however much of it was read before, and whatever lies between:
    the row of transformers behind so many masks."""
    draft, model = draft_of(folder, tmp_path), reference(folder)
    draft.open(1, sampling)
    for end in (4, 5, 9, 30):
        context = TEXT[:end]
        for between in (7, 9):
            paths = [[between] * length for length in range(SLOTS)]
            found = draft.expand(1, context, paths, 5)
            for depth in range(SLOTS):
                logits = plain_logits(model, [*context, *[MASK] * depth])[None].numpy()
                where = np.array([end + depth])
                scores = np.minimum(guess_log_scores(logits, where, sampling)[0], 0.0)
                best = np.lexsort((np.arange(len(scores)), -scores))[:5]
                own = found.parents == depth
                assert found.tokens[own].tolist() == best.tolist()
                np.testing.assert_allclose(found.scores[own], scores[best], rtol=0, atol=1e-9)


def test_one_pass_and_one_product_serve_all_levels_until_the_text_grows(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pard, "PASS_ROWS", 8)
    draft = draft_of(folder, tmp_path)
    draft.open(1, Sampling())
    found = draft.expand(1, TEXT[:20], [()], 3, further=Further([0.0], 9, -99.0))
    assert len(found) == 9 * 3, "below the best of them, too"
    work = draft.take_work()
    assert [one.rows for one in work if not isinstance(one, RankedRows)] == [8, 8, 4 + SLOTS - 1]
    assert [one.product for one in work if isinstance(one, RankedRows)] == [SLOTS, 0, 0]
    draft.expand(1, TEXT[:20], [[8, 8]], 3)
    assert rows_of(draft) == ()
    draft.expand(1, TEXT[:22], [()], 3)
    assert rows_of(draft) == (2 + SLOTS - 1,)


def test_nothing_follows_the_masks_or_the_end_of_the_models_context(
    folder: Path, tmp_path: Path
) -> None:
    draft = draft_of(folder, tmp_path)
    paths = [[8] * length for length in range(SLOTS + 3)]
    text = (TEXT * 2)[:ROOM]
    for request, (length, levels) in enumerate([(30, SLOTS), (ROOM - 2, 3), (ROOM, 1)]):
        draft.open(request, Sampling())
        found = draft.expand(request, text[:length], paths, 2)
        assert set(found.parents.tolist()) == set(range(levels))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"pard_token": None}, "has no pard_token.* give it as independent:FOLDER"),
        ({"pard_token": 96}, "pard_token .* is 96, and the model reads tokens 0 to 95"),
        ({"pard_token": -1}, "pard_token .* is -1"),
        ({"pard_token": True}, "pard_token .* is True"),
        ({"pard_token": "<mask>"}, "pard_token .* is '<mask>'"),
        ({"pard2": True}, "of PARD-2, whose model reads rows of the base"),
        ({"spd_type": "pard2"}, "of PARD-2"),
    ],
)
def test_misfits_are_refused_by_name(
    settings: dict[str, Any], said: str, folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match=said):
        PardGuesser(Checkpoint(with_masks(folder, tmp_path, **settings)))
