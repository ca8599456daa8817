"""Classes of somebody's own: how they are named, what is refused, and what they are charged."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from support.cases import case
from support.growers import SoloGrower
from support.rings import submit
from support.wires import Wire

from edgespec import plugins
from edgespec.daemon.settings import chosen_draft
from edgespec.drafting.choice import SourceChoice, parse_draft
from edgespec.drafting.own import DraftSource, OwnGuesser, say_measured
from edgespec.errors import ConfigError
from edgespec.plugins import OWN_POLICIES, known_policies, own_policy_options
from edgespec.policy.registry import POLICIES
from edgespec.types.draft_pass import SpentSeconds
from edgespec.verify.sampling import Sampling
from edgespec.wire.client_messages import Failed

GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)
MODULE = """
from edgespec import DraftSource, Policy, Send

class Mine(Policy):
    def decide(self, view):
        return [Send((view.tree.root,))] if not view.tree[view.tree.root].sent else []

class FlowSpec(Mine):
    pass

class Needy(Mine):
    def __init__(self, what):
        pass

class Nothing:
    pass
"""


@pytest.fixture(autouse=True)
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A module `mine_for_tests` in the current folder; a package that has entry points for it."""
    (tmp_path / "mine_for_tests.py").write_text(MODULE)
    told = tmp_path / "mine-1.0.dist-info"
    told.mkdir()
    (told / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (told / "entry_points.txt").write_text(
        "[edgespec.policies]\nmine = mine_for_tests:Mine\n"
        "[edgespec.drafts]\nours = mine_for_tests:Nothing\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins.entry_names.cache_clear()
    before = dict(POLICIES)
    yield
    plugins.entry_names.cache_clear()
    POLICIES.clear()
    POLICIES.update(before)
    OWN_POLICIES.clear()
    sys.modules.pop("mine_for_tests", None)


def test_a_policy_is_known_by_its_own_name_and_told_to_children() -> None:
    assert own_policy_options() == []
    assert known_policies(["flowspec", "mine_for_tests:Mine"]) == ["flowspec", "mine"]
    assert POLICIES["mine"].window(3) == 4
    assert known_policies(["mine_for_tests:Mine", "mine"]) == ["mine", "mine"]
    assert own_policy_options() == ["--policy", "mine_for_tests:Mine"]


def test_entry_points_are_known_by_their_names() -> None:
    assert known_policies(["mine"]) == ["mine"]
    assert type(POLICIES["mine"]).__name__ == "Mine"
    assert parse_draft("hybrid:ngram+ours:x").members[1] == SourceChoice("ours", "x")


def test_what_cannot_be_used_is_refused_with_its_cause() -> None:
    for text, cause in {
        "nowhere:Mine": "No module named 'nowhere'",
        "mine_for_tests:Absent": "no attribute 'Absent'",
        "mine_for_tests:Nothing": "is no Policy: derive",
        "mine_for_tests:Needy": "cannot be made",
        "mine_for_tests:FlowSpec": "called 'flowspec', as another one is",
    }.items():
        with case("policy", text), pytest.raises(ConfigError, match=cause):
            known_policies([text])
    for draft in ("ours", "nowhere:Mine"):
        with case("draft", draft), pytest.raises(ConfigError, match=r"is no DraftSource|nowhere"):
            chosen_draft(draft, "")


def test_no_module_is_imported_because_a_client_names_it() -> None:
    for name in ("mine_for_tests:Mine", "mine"):
        wire = Wire()
        wire.submit(submit(1, "hello", 5, name))
        (failed,) = wire.replies
        assert isinstance(failed, Failed)
        assert "unknown policy" in failed.reason
    assert "mine_for_tests" not in sys.modules


class Parrot(DraftSource):
    """Says again what it is told to, and notes what it is asked."""

    def __init__(self, *says: tuple[int, float], paths: int = 1) -> None:
        self.says, self.paths, self.heard = says, paths, list[object]()

    def read(self, request: int, tokens: Sequence[int]) -> None:
        self.heard.append(tuple(tokens))

    def guess(
        self, request: int, paths: Sequence[Sequence[int]], width: int
    ) -> Sequence[Sequence[tuple[int, float]]]:
        return [self.says] * self.paths

    def close(self, request: int) -> None:
        self.heard.append("closed")

    def seconds(self, tokens: int, paths: int) -> float | None:
        return 1e-3 * tokens + 1.0 * paths


def test_a_source_reads_each_token_once_and_is_charged_what_it_declares() -> None:
    source = Parrot((7, -2.0), (5, -0.1), (6, -0.2))
    grower = SoloGrower(OwnGuesser(source, 10))
    grower.open(1, GREEDY)
    tree = grower.refresh(1, [1, 2, 3], 1, 2)
    assert (tree.tokens.tolist(), tree.scores.tolist()) == ([5, 6], [-0.1, -0.2])
    grower.refresh(1, [1, 2, 3, 4], 1, 2)
    grower.close(1)
    grower.close(1)
    assert source.heard == [(1, 2, 3), (4,), "closed"]
    assert [one.seconds for one in grower.take_work()] == pytest.approx([3e-3, 1.0, 1e-3, 1.0])  # type: ignore[union-attr]


def test_one_that_declares_nothing_is_charged_what_it_takes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Parrot, "seconds", DraftSource.seconds)
    guesser = OwnGuesser(Parrot(), 10)
    guesser.open(1, GREEDY)
    assert guesser.read(1, [1, 2], None)  # type: ignore[arg-type]
    (spent,) = guesser.take_work()
    assert isinstance(spent, SpentSeconds)
    assert spent.seconds > 0


def test_it_is_told_whose_time_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    choice = parse_draft(f"hybrid:ngram+{__name__}:Parrot")
    say_measured(choice, said.append)
    assert said == []
    monkeypatch.setattr(Parrot, "seconds", DraftSource.seconds)
    say_measured(choice, said.append)
    assert len(said) == 1
    assert "declares no time" in said[0]


def test_guesses_that_are_none_are_an_error_that_says_whose() -> None:
    for source, cause in (
        (Parrot(paths=0), "guesses after 0 of 1 paths"),
        (Parrot((10, -1.0)), "guesses token 10 with"),
        (Parrot((-1, -1.0)), "guesses token -1 with"),
        (Parrot((5, 0.5)), "log-probability 0.5"),
        (Parrot((5, float("nan"))), "log-probability nan"),
    ):
        guesser = OwnGuesser(source, 10)
        guesser.open(1, GREEDY)
        with case("cause", cause), pytest.raises(ValueError, match=f"draft parrot .*{cause}"):
            guesser.guess(1, [()], 3)


def test_a_script_without_a_guard_is_told_so(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from math import factorial\n"
        "from edgespec.bench.processes import map_in_processes\n"
        "map_in_processes(factorial, [1, 2], 2)\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True)
    last = done.stderr.splitlines()[-1]
    assert 'below `if __name__ == "__main__":`' in last
