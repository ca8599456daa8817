"""The torch backend: jobs as machines make them, checked against transformers, and bad jobs."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from support.checkpoints import (
    WINDOW,
    plain_hidden,
    plain_logits,
    reference,
    write_checkpoint,
    write_family,
)
from support.segments import run_block
from transformers import PreTrainedModel

from edgespec.backends.base import BlockBackend, Head, Walk
from edgespec.backends.torch_backend import (
    SCORED_ROWS,
    TorchBlock,
    TorchHead,
    best_along,
    few_along,
)
from edgespec.drafting.grower import TreeGrower
from edgespec.drafting.independent import IndependentGuesser
from edgespec.errors import LocalProtocolError, RemoteProtocolError
from edgespec.machines.effects import RunBlock
from edgespec.model.aux_hidden import unpacked
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.tensors import from_torch, to_torch
from edgespec.tree.ledger import RetainSet, RowLedger, Rows
from edgespec.types.features import NO_NEEDS
from edgespec.types.tensor import Layers, Tensor
from edgespec.verify.sampling import BadLogits, Sampling, choose, choose_along

NONE = np.zeros(0, np.int64)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(tmp_path_factory.mktemp("backend") / "m")


@pytest.fixture(scope="module")
def model(folder: Path) -> PreTrainedModel:
    return reference(folder)


@pytest.fixture
def stages(folder: Path) -> list[TorchBlock]:
    checkpoint = Checkpoint(folder)
    return [TorchBlock(Block(checkpoint, a, b, "float64")) for a, b in [(0, 2), (2, 4)]]


def chain(tokens: list[int], first: int = 0) -> Rows:
    """Rows of a plain sequence whose ids are their positions."""
    ids = np.arange(first, first + len(tokens))
    return Rows(ids, ids - 1, np.array(tokens, np.int64), ids)


def through(stages: list[TorchBlock], job: RunBlock) -> Tensor:
    hidden = None
    for stage in stages:
        hidden = stage.run(replace(job, hidden=hidden), lambda: False)
        part = job.parts[0]  # only the first stage reads its tokens
        job = replace(job, parts=(replace(part, rows=replace(part.rows, tokens=NONE)),))
    assert hidden is not None
    return hidden


def opened(stages: list[TorchBlock], request: int, tokens: list[int]) -> Tensor:
    for stage in stages:
        stage.open(request, reserve=2)
    tri = np.tri(len(tokens), dtype=np.bool_)
    return through(stages, run_block(0, request, chain(tokens), None, 0, tri))


@torch.inference_mode()
def test_what_enters_tapped_layers_is_handed_out(
    stages: list[TorchBlock], model: PreTrainedModel
) -> None:
    tokens = [5, 6, 7, 8]
    for stage in stages:
        stage.open(1, reserve=4)
    tri = np.tri(len(tokens), dtype=np.bool_)
    job = run_block(0, 1, chain(tokens), None, 0, tri, Layers((0, 1, 3)))
    hidden = stages[0].run(job, lambda: False)
    first = stages[0].take_aux_hidden()
    stages[1].run(replace(job, hidden=hidden), lambda: False)
    second = stages[1].take_aux_hidden()
    assert first is not None
    assert second is not None
    found = unpacked(first.beside(second), 3, model.config.hidden_size)
    exact = model.model(torch.tensor([tokens]), output_hidden_states=True).hidden_states
    for index, layer in enumerate(job.aux_layers):
        wanted = exact[layer][0].float()
        # Half a step of 127 to either side.
        most = wanted.abs().amax(1, keepdim=True) / 127 * 0.501
        assert ((found[:, index] - wanted).abs() <= most).all()
    assert stages[0].take_aux_hidden() is None


def test_two_requests_side_by_side_with_a_retain(
    stages: list[TorchBlock], model: PreTrainedModel
) -> None:
    prompts = {1: [5, 6, 7, 8], 2: [9, 8]}
    ledgers = {request: RowLedger() for request in prompts}
    for request, prompt in prompts.items():
        hidden = to_torch(opened(stages, request, prompt))
        ledgers[request].commit(chain(prompt))
        assert torch.allclose(hidden, plain_hidden(model, prompt), rtol=0, atol=1e-5)
    for request, prompt in prompts.items():
        n, ledger = len(prompt), ledgers[request]
        # Two children of the root, and a child of the second.
        rows = Rows(
            np.array([n, n + 1, n + 2]),
            np.array([n - 1, n - 1, n + 1]),
            np.array([20, 21, 22]),
            np.array([n, n, n + 1]),
        )
        sees = ledger.append(rows)
        hidden = to_torch(
            through(stages, run_block(1, request, rows, None, ledger.committed, sees))
        )
        for index, path in enumerate([[20], [21], [21, 22]]):
            exact = plain_hidden(model, prompt + path)[-1]
            assert torch.allclose(hidden[index], exact, rtol=0, atol=1e-5)
        start = ledger.committed
        order = ledger.retain(RetainSet(1, n + 2, (n + 1,), frozenset({n + 2})))
        assert order is not None
        for stage in stages:
            stage.gather(request, start, order)
    for request, prompt in prompts.items():
        n, ledger = len(prompt), ledgers[request]
        rows = Rows(np.array([n + 3]), np.array([n + 2]), np.array([23]), np.array([n + 2]))
        sees = ledger.append(rows)
        hidden = to_torch(
            through(stages, run_block(2, request, rows, None, ledger.committed, sees))
        )
        exact = plain_hidden(model, [*prompt, 21, 22, 23])[-1]
        assert torch.allclose(hidden[0], exact, rtol=0, atol=1e-5)


def test_windows_caps_and_scales_reach_the_machines(tmp_path: Path) -> None:
    folder = write_family(tmp_path / "m", "gemma2")
    model, checkpoint = reference(folder), Checkpoint(folder)
    stages = [TorchBlock(Block(checkpoint, a, b, "float64")) for a, b in [(0, 1), (1, 4)]]
    prompt, ledger = list(range(20, 20 + WINDOW)), RowLedger()
    opened(stages, 1, prompt)
    ledger.commit(chain(prompt))
    n = len(prompt)
    # A wrong child of the root, then the right one, and a chain of rows below that.
    ids = np.arange(n, n + 2 + WINDOW)
    places = np.array([n, *range(n, n + 1 + WINDOW)])
    rows = Rows(ids, np.array([n - 1, n - 1, *ids[1:-1]]), ids, places)
    hidden = through(stages, run_block(1, 1, rows, None, n, ledger.append(rows)))
    path = [*prompt, *ids[1:].tolist()]
    exact = plain_hidden(model, path)
    assert torch.allclose(to_torch(hidden)[1:], exact[n:], rtol=0, atol=1e-5)
    order = ledger.retain(RetainSet(1, int(ids[-1]), (n + 1,), frozenset(ids[2:].tolist())))
    assert order is not None
    for stage in stages:
        stage.gather(1, n, order)
    last = Rows(ids[-1:] + 1, ids[-1:], np.array([7]), places[-1:] + 1)
    job = run_block(2, 1, last, None, ledger.committed, ledger.append(last))
    hidden = through(stages, job)
    exact = plain_hidden(model, [*path, 7])[-1:]
    assert torch.allclose(to_torch(hidden), exact, rtol=0, atol=1e-5)
    ((choice, _),) = TorchHead(OutputHead(checkpoint, "float64")).choose(
        [Walk(hidden, last, Sampling(temperature=1.0, seed=3))]
    )
    logits = plain_logits(model, [*path, 7]).numpy()[None]
    known = choose(logits, last.positions + 1, Sampling(temperature=1.0, seed=3))
    assert choice.tokens.tolist() == known.tokens.tolist()
    assert np.allclose(choice.margins, known.margins, atol=1e-4)


def test_a_stopped_job_returns_none_and_its_slots_can_be_dropped(
    stages: list[TorchBlock], model: PreTrainedModel
) -> None:
    opened(stages, 1, [4, 5])
    job = run_block(1, 1, chain([6, 7], 2), None, 2, np.tri(2, dtype=np.bool_))
    assert stages[0].run(job, lambda: True) is None
    stages[0].gather(1, 2, NONE)
    hidden = to_torch(through(stages, job))
    assert torch.allclose(hidden, plain_hidden(model, [4, 5, 6, 7])[2:], rtol=0, atol=1e-5)


def test_an_emptied_job_gives_empty_rows(stages: list[TorchBlock]) -> None:
    opened(stages, 1, [4, 5])
    hidden = through(stages, run_block(1, 1, chain([]), None, 2, np.zeros((0, 0), np.bool_)))
    assert (hidden.dtype, hidden.shape) == ("float64", (0, 32))


@pytest.mark.parametrize("token", [-1, 96, 2**62])
def test_a_token_outside_the_vocabulary_is_the_peers_fault(
    stages: list[TorchBlock], token: int
) -> None:
    stages[0].open(1, 4)
    job = run_block(1, 1, chain([token]), None, 0, np.ones((1, 1), np.bool_))
    with pytest.raises(RemoteProtocolError, match="vocabulary of 96"):
        stages[0].run(job, lambda: False)


def test_missing_tokens_are_the_peers_fault(stages: list[TorchBlock]) -> None:
    stages[0].open(1, 4)
    job = run_block(1, 1, replace(chain([3]), tokens=NONE), None, 0, np.ones((1, 1), np.bool_))
    with pytest.raises(RemoteProtocolError, match="lacks the tokens"):
        stages[0].run(job, lambda: False)


@pytest.mark.parametrize(
    "hidden",
    [
        None,
        from_torch(torch.zeros(1, 32)),
        from_torch(torch.zeros(2, 32, dtype=torch.float64)),
        from_torch(torch.zeros(1, 31, dtype=torch.float64)),
        from_torch(torch.zeros(32, dtype=torch.float64)),
    ],
)
def test_hidden_rows_of_another_kind_are_the_peers_fault(
    stages: list[TorchBlock], hidden: Tensor | None
) -> None:
    stages[1].open(1, 4)
    job = run_block(1, 1, chain([3]), hidden, 0, np.ones((1, 1), np.bool_))
    with pytest.raises(RemoteProtocolError, match="same model and dtype"):
        stages[1].run(job, lambda: False)
    fit = replace(job, hidden=from_torch(torch.zeros(1, 32, dtype=torch.float64)))
    assert stages[1].run(fit, lambda: False) is not None


def test_jobs_that_do_not_fit_the_cache_are_our_bug(stages: list[TorchBlock]) -> None:
    one = np.ones((1, 1), np.bool_)
    with pytest.raises(LocalProtocolError, match="not open"):
        stages[0].run(run_block(1, 1, chain([3]), None, 0, one), lambda: False)
    with pytest.raises(LocalProtocolError, match="not open"):
        stages[0].gather(1, 0, NONE)
    stages[0].open(1, 4)
    with pytest.raises(LocalProtocolError, match="holds 0"):
        stages[0].run(run_block(1, 1, chain([3]), None, 2, one), lambda: False)
    stages[0].close(1)
    stages[0].close(1)
    with pytest.raises(LocalProtocolError, match="not open"):
        stages[0].gather(1, 0, NONE)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.9, top_p=0.8, seed=4)])
def test_the_head_chooses_as_one_machine_would(
    folder: Path, model: PreTrainedModel, sampling: Sampling
) -> None:
    head = TorchHead(OutputHead(Checkpoint(folder), "float64"))
    tokens = [3, 1, 4, 1, 5, 9, 2, 6]
    hidden = from_torch(plain_hidden(model, tokens)[-3:])
    logits = np.stack([plain_logits(model, tokens[: n + 1]).numpy() for n in (5, 6, 7)])
    exact = choose(logits, np.array([6, 7, 8]), sampling)
    ids, below = np.array([5, 6, 7]), np.array([0, *exact.tokens[:2]])
    ((choice, _),) = head.choose([Walk(hidden, Rows(ids, ids - 1, below, ids), sampling)])
    assert choice.tokens.tolist() == exact.tokens.tolist()
    assert np.allclose(choice.margins, exact.margins, atol=1e-4)
    below[2] = -1  # the last row stands for another token: it is not on the path
    ((choice, _),) = head.choose([Walk(hidden, Rows(ids, ids - 1, below, ids), sampling)])
    assert choice.rows.tolist() == [0, 1]


def test_the_head_computes_in_bfloat16_too(folder: Path) -> None:
    head = TorchHead(OutputHead(Checkpoint(folder), "bfloat16"))
    hidden = from_torch(torch.randn(2, 32, dtype=torch.bfloat16))
    ids = np.array([1, 2])
    rows = Rows(ids, ids - 1, np.array([0, -1]), ids)
    ((choice, _),) = head.choose([Walk(hidden, rows, Sampling())])
    assert len(choice.tokens) == 1
    with pytest.raises(RemoteProtocolError, match="same model and dtype"):
        head.choose([Walk(from_torch(torch.randn(2, 32)), rows, Sampling())])
    with pytest.raises(RemoteProtocolError, match="same model and dtype"):
        head.choose([Walk(hidden, rows.take(np.array([0])), Sampling())])


def test_the_classes_are_what_the_interfaces_say(folder: Path) -> None:
    checkpoint = Checkpoint(folder)
    block: BlockBackend = TorchBlock(Block(checkpoint, 0, 1))
    head: Head = TorchHead(OutputHead(checkpoint))
    draft: TreeGrower = TreeGrower(IndependentGuesser(checkpoint))
    assert block
    assert head
    assert draft.name == "independent"
    assert draft.needs == NO_NEEDS


def test_a_device_takes_the_best_token_as_the_host_does() -> None:
    """Of random trees, with ties, numbers that are left out, and one token alone."""
    generator = torch.Generator().manual_seed(0)
    for case in range(60):
        count, width = case % 6 + 1, (1, 3, 4, 200)[case % 4]
        logits = torch.randint(-3, 3, (count, width), generator=generator).float()
        logits[logits == -3] = -torch.inf
        logits[:, case % width] = 1.0
        parents = np.array([0, *(row // 2 for row in range(1, count))])
        tokens = np.arange(count) % width
        rows = Rows(np.arange(count), parents, tokens, np.arange(count))
        host = choose_along(lambda row, own=logits: own[row].numpy(), rows, Sampling())
        found = best_along(logits, rows)
        np.testing.assert_array_equal(found.rows, host.rows)
        np.testing.assert_array_equal(found.tokens, host.tokens)
        np.testing.assert_array_equal(found.margins, host.margins)
        assert found.tokens.dtype == host.tokens.dtype
    for bad in (torch.nan, torch.inf, -torch.inf):
        damaged = torch.zeros(2, 5)
        damaged[0] = bad
        rows = Rows(np.arange(2), np.zeros(2, np.int64), np.arange(2), np.arange(2))
        messages = []
        for work in (
            best_along,
            lambda own, r: choose_along(lambda n: own[n].numpy(), r, Sampling()),
        ):
            with pytest.raises(BadLogits) as raised:
                work(damaged, rows)
            messages.append(str(raised.value))
        assert messages[0] == messages[1]


@pytest.mark.parametrize(
    "more", [{}, {"top_p": 0.7}, {"min_p": 0.1}, {"top_p": 0.9, "min_p": 0.05}]
)
@pytest.mark.parametrize("top_k", [1, 3, 40])
def test_a_device_finds_the_few_of_top_k_as_the_host_does(
    top_k: int, more: dict[str, float]
) -> None:
    """Of random trees, with ties at the edge and tokens that are left out."""
    generator = torch.Generator().manual_seed(top_k)
    for case in range(20):
        count, sampling = case % 6 + 1, Sampling(0.3 + case % 3 * 0.8, top_k, seed=case, **more)
        logits = torch.randn(count, 5000, generator=generator) * 3
        logits = logits.round(decimals=case % 3)  # many are alike
        logits[logits < -3] = -torch.inf
        parents = np.array([0, *(row // 2 for row in range(1, count))])
        ids = np.arange(count)
        # The tokens after each row, as far as there are rows below it.
        after = [
            int(choose(logits[i : i + 1].numpy(), ids[i : i + 1] + 1, sampling).tokens[0])
            for i in ids
        ]
        tokens = np.array([0, *(after[parents[row]] for row in range(1, count))])
        rows = Rows(ids, parents, tokens, ids)
        host = choose_along(lambda row, own=logits: own[row].numpy(), rows, sampling)
        found = few_along(logits, rows, sampling)
        np.testing.assert_array_equal(found.rows, host.rows)
        np.testing.assert_array_equal(found.tokens, host.tokens)
        np.testing.assert_array_equal(found.margins, host.margins)
    for bad in (torch.nan, torch.inf):
        logits[0, 4321] = bad
        with pytest.raises(BadLogits, match=f"row 0 .* {'NaN' if bad != bad else '.inf'}"):
            few_along(logits, rows, sampling)


def test_a_long_prompt_is_scored_with_few_logits_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    head = OutputHead(Checkpoint(folder), "float32")
    whole = head.logits
    held: list[int] = []

    def logits(rows: torch.Tensor) -> torch.Tensor:
        held.append(len(rows))
        return whole(rows)

    monkeypatch.setattr(head, "logits", logits)
    rows = torch.randn((3 * SCORED_ROWS + 5, head.hidden_size))
    tokens = np.arange(len(rows)) % 7
    told = TorchHead(head).score(from_torch(rows), tokens, 3)
    assert (max(held), sum(held)) == (SCORED_ROWS, len(rows))
    assert told.top.shape == (len(rows), 3)
    for at in (0, SCORED_ROWS, len(rows) - 1):
        one = TorchHead(head).score(from_torch(rows[at : at + 1]), tokens[at : at + 1], 3)
        assert one.log_probs[0] == told.log_probs[at], "a row's are its own, to the bit"
        assert one.top_log_probs[0].tolist() == told.top_log_probs[at].tolist()
    rows[SCORED_ROWS] = torch.nan
    with pytest.raises(BadLogits):
        TorchHead(head).score(from_torch(rows), tokens, 3)
