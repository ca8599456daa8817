"""Where a stage finds its block: cache, model at hand, coordinator; and damage on the way."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from msgspec import structs
from support.checkpoints import write_checkpoint
from support.keys import OWN, everybody, identity

from edgespec.config import LOOPBACK, QUANTISATIONS, Address, CoordinatorConfig, Quantisation
from edgespec.daemon.block_fetch import Wanted, obtain
from edgespec.daemon.ring_model import RingModel
from edgespec.errors import ConfigError, ModelError, PeerLost
from edgespec.model.block import Block
from edgespec.model.ends import OutputHead
from edgespec.model.loader import Checkpoint
from edgespec.model.sharding import Sharding
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.net.block_server import BlockServer
from edgespec.wire.messages import Assign

DEVICE = identity("a device")
QUANT = "int4-g32"


@dataclass
class Coordinator:
    """A model with its block server, and places for its two stages."""

    places: list[Assign]
    server: BlockServer
    said: list[str] = field(default_factory=list)

    def wanted(self, stage: int = 1, **changes: object) -> Wanted:
        place = structs.replace(self.places[stage - 1], **changes)  # type: ignore[arg-type]
        return Wanted(place, Address(LOOPBACK, 1), DEVICE, self.said.append, lambda: False)


@contextmanager
def serving(model: Path, cache: Path, quant: str = QUANT) -> Iterator[Coordinator]:
    config = CoordinatorConfig(
        str(model),
        "",
        2,
        "float32",
        Address(LOOPBACK, 0),
        quantisation=Quantisation.parse(quant),
        cache=str(cache),
    )
    ring_model = RingModel(config)
    places: list[Assign] = []
    prepare = partial(ring_model.prepare, places)
    server = BlockServer(Address(LOOPBACK, 0), OWN, everybody, prepare, lambda: False)
    places += [
        Assign(
            stage,
            2,
            first,
            end,
            "/no/such/folder",
            ring_model.fingerprint,
            "float32",
            quant,
            ring_model.longest_context,
            server.port,
            "",
            block_number=stage,
        )
        for stage, (first, end) in enumerate([(0, 1), (1, 4)], start=1)
    ]
    server.start()
    try:
        yield Coordinator(places, server)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.set_num_threads(1)
    return write_checkpoint(
        tmp_path_factory.mktemp("model") / "m", shard_size=12_000, intermediate_size=64
    )


def outputs(source: TensorSource, first: int, end: int) -> torch.Tensor:
    """What a block computes, bit by bit."""
    block = Block(source, first, end, "float32")
    inputs = torch.arange(5) if first == 0 else torch.linspace(-1, 1, 160).reshape(5, 32)
    mask = torch.tril(torch.ones(5, 5, dtype=torch.bool))[None, None]
    hidden = block.forward(inputs, torch.arange(5), block.new_cache(8), mask)
    assert hidden is not None
    return hidden


def quantised(model: Path, quant: str = QUANT) -> TensorSource:
    checkpoint = Checkpoint(model)
    if quant == "none":
        return checkpoint
    return QuantisingSource(checkpoint, Quantisation.parse(quant))


@pytest.mark.parametrize("quant", [QUANT, "none"])
@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_sent_computes_what_the_model_does(
    model: Path, tmp_path: Path, stage: int, quant: str
) -> None:
    with serving(model, tmp_path / "theirs", quant) as there:
        place = there.places[stage - 1]
        source = obtain(there.wanted(stage), "", str(tmp_path / "ours"))
        assert there.server.sent_bytes > 0
        expected = outputs(quantised(model, quant), place.first, place.end)
        assert torch.equal(outputs(source, place.first, place.end), expected)


def test_a_block_that_may_not_be_needed_does_not_fill_the_disk(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "theirs") as there:
        wanted = replace(there.wanted(1), left_free=1 << 60)
        with pytest.raises(ConfigError, match="its disk has"):
            obtain(wanted, "", str(tmp_path / "ours"))
        obtain(replace(wanted, left_free=1), "", str(tmp_path / "ours"))


def test_the_output_head_is_sent_once_and_kept(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = str(tmp_path / "ours")
    with serving(model, tmp_path / "theirs") as there:
        wanted = replace(there.wanted(2, head="none"), head=True)
        sent = there.server.sent_bytes
        head = OutputHead(obtain(wanted, "", ours))
        assert there.server.sent_bytes > sent
    rows = torch.linspace(-1, 1, 96).reshape(3, 32)
    expected = OutputHead(Checkpoint(model)).logits(rows)
    assert torch.equal(head.logits(rows), expected)
    # The coordinator is not even asked; and what was damaged meanwhile is not loaded.
    assert torch.equal(OutputHead(obtain(wanted, "", ours)).logits(rows), expected)
    (file,) = (tmp_path / "ours").glob("*/head.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    monkeypatch.setattr("edgespec.daemon.block_fetch.SILENCE_S", 0.5)
    with pytest.raises(PeerLost):
        obtain(wanted, "", ours)


@pytest.mark.parametrize("place", ["given", "named", "made"])
def test_the_output_head_is_taken_from_a_model_at_hand(
    model: Path, tmp_path: Path, place: str
) -> None:
    with serving(model, tmp_path / "theirs") as there:
        here = tmp_path / "made" if place == "made" else model
        if place == "made":
            quantisation = Quantisation.parse(QUANT)
            sharding = Sharding(str(model), quantisation, QUANTISATIONS["none"])
            sharding.into(here, [(0, 1), (1, 4)], lambda *_: None)
        changes = {"model": str(here)} if place == "named" else {}
        wanted = replace(there.wanted(2, head="none", **changes), head=True)
        source = obtain(wanted, str(here) if place != "named" else "", str(tmp_path / "ours"))
        assert there.server.sent_bytes == 0
    rows = torch.linspace(-1, 1, 96).reshape(3, 32)
    assert torch.equal(OutputHead(source).logits(rows), OutputHead(Checkpoint(model)).logits(rows))


def test_what_was_sent_once_is_on_disk_from_then_on(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "theirs") as there:
        obtain(there.wanted(), "", str(tmp_path / "ours"))
        sent = there.server.sent_bytes
        wanted = there.wanted()
        obtain(wanted, "", str(tmp_path / "ours"))
        assert there.server.sent_bytes == sent
    source = obtain(wanted, "", str(tmp_path / "ours"))  # the coordinator is not even asked
    assert torch.equal(outputs(source, 0, 1), outputs(quantised(model), 0, 1))


@pytest.mark.parametrize("damage", ["flipped", "cut", "longer", "gone", "manifest", "config"])
def test_a_damaged_block_is_not_loaded_but_fetched_again(
    model: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    with serving(model, tmp_path / "theirs") as there:
        obtain(there.wanted(2), "", str(tmp_path / "ours"))
        sent = there.server.sent_bytes
        (block,) = (tmp_path / "ours").glob("*/*.safetensors")
        harm(block, damage)
        source = obtain(there.wanted(2), "", str(tmp_path / "ours"))
        assert there.server.sent_bytes == 2 * sent
    assert "of no use and is removed" in caplog.text
    assert torch.equal(outputs(source, 1, 4), outputs(quantised(model), 1, 4))


def harm(block: Path, damage: str) -> None:
    """Do to a kept block what disks and people do."""
    content = bytearray(block.read_bytes())
    match damage:
        case "flipped":
            content[len(content) // 2] ^= 1
            block.write_bytes(content)
        case "cut":
            block.write_bytes(content[:-7])
        case "longer":
            block.write_bytes(content + b"\0")
        case "gone":
            block.unlink()
        case other:
            file = block.with_name(f"{other}.json")
            file.write_text(file.read_text().replace('"', "'", 1))


def test_a_model_at_hand_is_quantised_here(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "theirs") as there:
        for where in ({"model": str(model)}, {}):
            wanted = there.wanted(**where)
            given = "" if where else str(model)
            source = obtain(wanted, given, str(tmp_path / f"ours{len(where)}"))
            assert torch.equal(outputs(source, 0, 1), outputs(quantised(model), 0, 1))
        assert there.server.sent_bytes == 0
    assert any("quantising to int4-g32" in text for text in there.said)


def test_another_model_in_the_named_folder_is_left_alone(model: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", seed=7, intermediate_size=64)
    with serving(model, tmp_path / "theirs") as there:
        source = obtain(there.wanted(model=str(other)), "", str(tmp_path / "ours"))
        assert there.server.sent_bytes > 0
        assert torch.equal(outputs(source, 0, 1), outputs(quantised(model), 0, 1))
        with pytest.raises(ModelError, match="is not the one that the coordinator runs"):
            obtain(there.wanted(), str(other), str(tmp_path / "ours"))


def test_a_folder_of_block_files_serves_both_sides(model: Path, tmp_path: Path) -> None:
    made = tmp_path / "made"
    Sharding(str(model), Quantisation.parse(QUANT), Quantisation()).into(
        made, [(0, 1), (1, 4)], lambda *_: None
    )
    with serving(made, tmp_path / "theirs") as there:
        assert not (tmp_path / "theirs").exists()
        for given in ("", str(made)):
            source = obtain(there.wanted(2), given, str(tmp_path / "ours"))
            assert torch.equal(outputs(source, 1, 4), outputs(quantised(model), 1, 4))
        wrong = there.wanted(2, first=2)
        with pytest.raises(ModelError, match="does not hold layers 2 to 3"):
            obtain(wanted=wrong, model=str(made), cache=str(tmp_path / "ours"))


def test_a_coordinator_that_has_lost_its_model_says_so(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(model, copy)
    with serving(copy, tmp_path / "theirs") as there:
        for file in copy.glob("*.safetensors"):
            file.unlink()
        with pytest.raises(ConfigError, match="safetensors"):
            obtain(there.wanted(), "", str(tmp_path / "ours"))


def test_a_stage_that_shall_end_stops_fetching(model: Path, tmp_path: Path) -> None:
    with serving(model, tmp_path / "theirs") as there:
        wanted = replace(there.wanted(), stop=lambda: True)
        with pytest.raises(Exception, match="stopped"):
            obtain(wanted, "", str(tmp_path / "ours"))


def test_a_cache_that_cannot_be_written_is_named(model: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        serving(model, tmp_path / "theirs") as there,
        pytest.raises(ConfigError, match=r"cannot keep blocks in .*file.*--cache"),
    ):
        obtain(there.wanted(), "", str(tmp_path / "file"))


def test_a_coordinator_that_is_gone_is_an_error(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(model, tmp_path / "theirs") as there:
        wanted = there.wanted()
    monkeypatch.setattr("edgespec.daemon.block_fetch.SILENCE_S", 0.5)
    with pytest.raises(PeerLost, match=LOOPBACK):
        obtain(wanted, "", str(tmp_path / "ours"))
