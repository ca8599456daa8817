"""The stage daemon's own decisions: a block beyond its memory, a coordinator that has moved."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from msgspec import structs

from edgespec.config import Address, Quantisation, StageConfig
from edgespec.daemon import stage
from edgespec.daemon.block_fetch import Wanted
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.memory import Available, give_back
from edgespec.daemon.stage import LEFT_FREE, _prepare, _require_memory, _Watch
from edgespec.errors import CapacityError
from edgespec.model.block import Block
from edgespec.model.block_file import BlockFile
from edgespec.model.loader import Checkpoint
from edgespec.model.source import TensorSource
from edgespec.model.sources import QuantisingSource
from edgespec.net.keys import Identity, KeyPair
from edgespec.wire.messages import Assign

PLACE = Assign(2, 3, 3, 6, "m", "f", "float32", "none", 1024, 1, "key")
LAYER = 2 * 256 * 256 + 2 * 128 * 256 + 3 * 256 * 704 + 2 * 256  # the bundled base's numbers


def allow(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """A device with so many bytes."""
    monkeypatch.setattr(
        "edgespec.daemon.memory.available_memory", lambda kind: Available(count, "a test")
    )


@pytest.mark.parametrize(
    ("quant", "needed"),
    [
        ("none", 3 * LAYER * 4),
        ("int4", 3 * ((LAYER - 512) * 10 // 16 + 512 * 4)),  # scales are held in float32
    ],
)
def test_a_block_beyond_the_memory_is_refused_with_numbers(
    monkeypatch: pytest.MonkeyPatch, quant: str, needed: int
) -> None:
    source: TensorSource = Checkpoint(bundled("base"))
    if quant != "none":
        source = QuantisingSource(Checkpoint(bundled("base")), Quantisation.parse(quant))
    admit = partial(_require_memory, PLACE, None, 0)
    allow(monkeypatch, needed)
    Block(source, PLACE.first, PLACE.end, admit=admit)
    allow(monkeypatch, needed - 1)
    with pytest.raises(
        CapacityError, match=r"stage 2 needs 0\.0\d GiB for layers 3 to 5, .* \(a test\).*--layers"
    ):
        Block(source, PLACE.first, PLACE.end, admit=admit)


def test_a_device_that_prepares_compiles_its_kernels_and_keeps_the_disk_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    def obtain(wanted: Wanted, model: str, cache: str) -> None:
        done.append((wanted.head, wanted.left_free))

    monkeypatch.setattr("edgespec.daemon.block_fetch.obtain", obtain)
    monkeypatch.setattr("edgespec.kernels.compiled.unbuilt", lambda: ["rows"])
    monkeypatch.setattr("edgespec.kernels.compiled.load", done.append)
    identity = Identity.of_coordinator(KeyPair.new())
    place = structs.replace(PLACE, head="none")
    monkeypatch.setattr("edgespec.model.tensors.best_device", lambda: torch.device("cpu"))
    config = StageConfig(0, Address("127.0.0.1", 1), "", 1.0)
    _prepare(config, identity, place, done.append, lambda: False)
    assert done == [
        "compiling the kernels for this CPU (once)",
        "rows",
        (False, LEFT_FREE),
        (True, LEFT_FREE),
    ]


def test_what_the_coordinator_takes_is_not_for_its_stage(monkeypatch: pytest.MonkeyPatch) -> None:
    needed, reserved = 3 * LAYER * 4, 1 << 30
    allow(monkeypatch, needed + reserved)
    _require_memory(PLACE, None, reserved, needed)
    allow(monkeypatch, needed + reserved - 1)
    with pytest.raises(CapacityError, match=r"of which the coordinator takes 1\.00"):
        _require_memory(PLACE, None, reserved, needed)


def test_on_a_gpu_what_torch_holds_is_given_back_and_bounded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own functions are made up: no GPU is needed, and none saw this."""
    done: list[object] = []
    monkeypatch.setattr("edgespec.model.tensors.best_device", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: done.append("empty"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (1, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 100)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", done.append)
    allow(monkeypatch, 500)
    _require_memory(PLACE, None, 200, 300)
    assert done == ["empty", 0.4]
    with pytest.raises(CapacityError):
        _require_memory(PLACE, None, 200, 301)
    assert done == ["empty", 0.4, "empty"]


def test_a_gpu_without_memory_of_its_own_has_weights_once(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[BlockFile] = []
    monkeypatch.setattr(BlockFile, "give_back", lambda one: given.append(one))
    source = object.__new__(BlockFile)
    for unified, device in ((True, "cuda"), (False, "cuda"), (True, "cpu")):
        monkeypatch.setattr("edgespec.daemon.memory.is_unified", lambda one=unified: one)
        give_back(source, torch.device(device))
        give_back(Checkpoint(bundled("base")), torch.device(device))
    assert given == [source]


# --- a coordinator that came back elsewhere -------------------------------------------------------


def test_a_coordinator_that_is_silent_is_looked_for_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be where it was, and load; then the stage waits for it."""
    home, new = Address("127.0.0.1", 7430), Address("127.0.0.1", 7431)
    monkeypatch.setattr(stage, "SILENT_S", 0.0)
    places = iter([None, home, Address("localhost", 7430), new])
    ended: list[str] = []
    is_over = threading.Event()

    def end(reason: str, failed: bool) -> None:
        assert not failed
        ended.append(reason)
        is_over.set()

    node = SimpleNamespace(heard_at=time.monotonic(), end=end)
    with _Watch(node, home, lambda before: next(places)) as watch:  # type: ignore[arg-type]
        assert is_over.wait(60.0)
    assert (watch.found, ended) == (new, [f"the coordinator is at {new} now"])


def test_a_coordinator_that_is_heard_is_looked_for_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Address] = []
    looked = threading.Event()

    class Heard:
        @property
        def heard_at(self) -> float:
            looked.set()
            return float("inf")

    def find(before: Address) -> Address | None:
        asked.append(before)
        return None

    monkeypatch.setattr(stage, "SILENT_S", 0.0)
    home = Address("127.0.0.1", 7430)
    with _Watch(Heard(), home, find) as watch:  # type: ignore[arg-type]
        assert looked.wait(60.0)
    assert (watch.found, asked) == (None, [])
