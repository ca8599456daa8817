"""The tiers: what `make test` leaves out has a cheaper case in it, so that no promise slips out."""

from __future__ import annotations

from pathlib import Path

import pytest

from edgespec.drafting.choice import HYBRID, SOURCES
from edgespec.policy.registry import POLICIES

HERE = Path(__file__).parent
EXPENSIVE = ("slow", "thorough")
WITHOUT = {  # files without a quick test, and where `make test` has their promise instead
    "cli/test_failures.py": "runtime/test_recovery.py",
    "cli/test_losses.py": "runtime/test_recovery.py",
    "cli/test_notified.py": "daemon/test_notify.py",
    "cli/test_quantised.py": "exactness/test_quantised.py",
    "cli/test_ring.py": "cli/test_demo.py",
    "cli/test_security.py": "runtime/test_strangers.py",
    "cli/test_several_models.py": "serving/test_turns.py",
    "cli/test_several_users.py": "decoding/test_several_live.py",
    "cli/test_toy_hybrid.py": "exactness/test_toy_hybrid.py",
    "model/gguf/test_big_gguf.py": "model/test_block.py",
    "model/gguf/test_real_files.py": "exactness/test_gguf.py",
    "model/test_big_block.py": "model/test_block.py",
    "net/test_transfer_kills.py": "net/test_block_transfer.py",
    "policy/test_slowing.py": "policy/test_experience.py",
    "serving/test_big_prompts.py": "decoding/test_prompts.py",
    "serving/test_clients.py": "serving/test_api.py",
    "serving/test_screenshots.py": "serving/test_page.py",
    "test_install.py": "test_package.py",
}


@pytest.fixture
def quick(request: pytest.FixtureRequest) -> list[pytest.Function]:
    """The tests of the quick tier. Only a run that collected every file knows them."""
    config = request.config
    whole = [Path(argument).resolve() for argument in config.args] == [HERE]
    if not whole or config.option.keyword or config.option.deselect:
        pytest.skip("only part of the tests was collected")
    return [
        item
        for item in request.session.items
        if isinstance(item, pytest.Function) and not any(map(item.get_closest_marker, EXPENSIVE))
    ]


def test_every_file_has_a_quick_test(quick: list[pytest.Function]) -> None:
    files = {str(path.relative_to(HERE)) for path in HERE.rglob("test_*.py")}
    covered = {str(item.path.relative_to(HERE)) for item in quick}
    assert files - covered == set(WITHOUT)
    assert set(WITHOUT.values()) <= covered


@pytest.mark.parametrize(
    "test",
    [
        "test_three_stages_give_what_transformers_generates",
        "test_three_stages_sample_what_one_does",
    ],
)
def test_every_policy_is_shown_to_be_exact(quick: list[pytest.Function], test: str) -> None:
    assert shown(quick, "test_exactness.py", test, "policy") == set(POLICIES)


@pytest.mark.parametrize(
    "test",
    [
        "test_greedy_is_what_transformers_generates",
        "test_sampled_tokens_depend_on_seed_and_prompt_alone",
    ],
)
def test_every_draft_source_is_shown_to_be_exact(quick: list[pytest.Function], test: str) -> None:
    choices = shown(quick, "test_sources.py", test, "draft")
    named = {choice.partition(":")[0] for choice in choices}
    elsewhere = {"independent", "mtp"}  # test_exactness.py, test_hybrid.py
    assert named | elsewhere == {*SOURCES, HYBRID}


def shown(quick: list[pytest.Function], file: str, test: str, parameter: str) -> set[str]:
    """The values of a parameter that the quick cases of a test of exactness have."""
    return {
        item.callspec.params[parameter]
        for item in quick
        if item.path == HERE / "exactness" / file and item.originalname == test
    }
