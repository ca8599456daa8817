"""Setup: what is played in virtual time, and the ring and the models that play it.

The bundled models (or any pair) compute the tokens, a cost model and the devices' profiles say how
long a published model would have taken for the same rows. Nothing here depends on the machine.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from msgspec import structs

from edgespec.backends.base import BlockBackend
from edgespec.bench.load import Load
from edgespec.bench.workloads import Prompt
from edgespec.config import HEAD_ON_COORDINATOR, HEAD_ON_LAST_STAGE, HEADS
from edgespec.decoding.admission import CoordinatorSettings
from edgespec.decoding.coordinator import CoordinatorMachine
from edgespec.decoding.stage import StageMachine
from edgespec.drafting.choice import parse_draft
from edgespec.errors import CapacityError, ConfigError
from edgespec.planning.cost_model import CostModel
from edgespec.planning.costs import RingCosts, local_links, ring_costs
from edgespec.planning.partition import blocks_of
from edgespec.planning.profile import Profile, RowPrice
from edgespec.sim.durations import Durations, Jitter, charged_durations, jittered, network_of
from edgespec.sim.links import LinkSpec, Network
from edgespec.sim.world import CoordinatorParts, StageParts, World
from edgespec.types.features import NO_NEEDS
from edgespec.types.shown import shown
from edgespec.verify.sampling import Sampling

if TYPE_CHECKING:  # torch takes seconds to import: not before all settings are known to be right
    from edgespec.drafting.base import Guesser
    from edgespec.drafting.grower import TreeGrower
    from edgespec.model.block import Block
    from edgespec.model.ends import OutputHead
    from edgespec.model.tokenizer import Tokenizer

_ROOM = 4096
"""Rows of a request that a stage may hold beyond the model's context."""
_OF_TOKENS = {"independent", "ngram", "easyspec"}
"""Draft sources that take tokens alone of the base: no row of it has to be computed for them."""

MOST_ROW_PRICE = 100.0
"""Of a step of one row: far beyond any device."""


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that determines a run, except the policy.

    `model`: a folder. `draft`: what drafting.choice takes, with its folders (none: "").
    `profiles`: D0's, then those of V1 … VN. `link`: every link of the ring, instead of the
    profiles' own, but for those on D0's device. `split`: layers of the cost model that each stage
    is charged for; none given: evenly. `with_stage`: the stage on D0's device, 0: none.
    `row_price`: see planning.costs.NodeCosts. `d0_free`: head, choosing, ranking and drafts take no
    time; `loop_free`: nor does the coordinator's own loop. `jitter`: noise in the times of jobs, by
    the sampling's seed. `head`: where the output head is, one of config.HEADS. `load`: how many
    requests come at once; None: one after the other, each on an idle ring. Raises ConfigError
    for what cannot run.
    """

    model: str
    draft: str
    dtype: str
    profiles: tuple[Profile, ...]
    cost_model: CostModel
    link: LinkSpec | None
    prompts: tuple[Prompt, ...]
    max_new_tokens: int
    sampling: Sampling
    split: tuple[int, ...] = ()
    with_stage: int = 0
    row_price: RowPrice | None = None
    d0_free: bool = False
    loop_free: bool = False
    jitter: Jitter | None = None
    head: str = HEAD_ON_COORDINATOR
    load: Load | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max-new-tokens is {self.max_new_tokens}; it must be at least 1")
        price = self.row_price
        if isinstance(price, float) and not 0 <= price <= MOST_ROW_PRICE:
            raise ConfigError(
                f"row-price is {price:g}; it must be from 0 to {MOST_ROW_PRICE:g}, of "
                "a step of one row"
            )
        if not self.prompts:
            raise ConfigError("there are no prompts; give at least one")
        if self.head not in HEADS:
            raise ConfigError(f"unknown head {self.head!r}; choose one of: {', '.join(HEADS)}")
        parse_draft(self.draft).check_head(self.head)
        self.costs()

    @property
    def stages(self) -> int:
        return len(self.profiles) - 1

    @property
    def is_scripted(self) -> bool:
        """Whether what the models say may be computed once for all policies (see bench.script).

        Not where a draft source takes rows of the base, nor where the order of
        sums may decide a token: whether the tokens are the same is then to be seen.
        """
        members = parse_draft(self.draft).members
        exact = self.dtype == "float64"
        return exact and all(one.is_own or one.name in _OF_TOKENS for one in members)

    @property
    def head_last(self) -> bool:
        return self.head == HEAD_ON_LAST_STAGE

    def costs(self) -> RingCosts:
        """The charged costs. Raises ConfigError if the model does not fit the devices."""
        try:
            return ring_costs(
                self.profiles,
                self.cost_model,
                self.split,
                self.row_price,
                self.with_stage,
                self.head_last,
            )
        except CapacityError as problem:
            raise ConfigError(str(problem)) from None

    def network(self) -> Network:
        """The links; a control message is small and is charged no bandwidth (see network_of)."""
        own = network_of(self.costs())
        if self.link is None:
            return own
        even = Network.even(
            self.stages, self.link, structs.replace(self.link, bytes_per_second=0.0)
        )
        local = local_links(self.stages, self.with_stage)
        ring = [own.ring[i] if i in local else link for i, link in enumerate(even.ring)]
        return structs.replace(even, ring=tuple(ring))

    def settings(self) -> dict[str, object]:
        """The settings that a rerun needs."""
        content = json.dumps([[prompt.id, prompt.text] for prompt in self.prompts])
        return {
            "stages": self.stages,
            "with_stage": self.with_stage,
            "head": self.head,
            "profiles": [profile.name for profile in self.profiles],
            "cost_model": self.cost_model.name,
            "head_bits": self.cost_model.head.bits,
            "link": None if self.link is None else structs.asdict(self.link),
            "row_price": self.row_price,
            "d0_free": self.d0_free,
            "loop_free": self.loop_free,
            "jitter": asdict(self.jitter) if self.jitter else None,
            "dtype": self.dtype,
            "max_new_tokens": self.max_new_tokens,
            **asdict(self.sampling),
            "prompts": len(self.prompts),
            "prompts_sha256": hashlib.sha256(content.encode()).hexdigest(),
            **(self.load.settings() if self.load else {}),
        }


@dataclass(frozen=True, slots=True)
class LoadedBase:
    """A base model in memory, cut into blocks."""

    tokenizer: Tokenizer
    context_length: int
    folds: bool
    blocks: tuple[Block, ...]
    head: OutputHead


@lru_cache(maxsize=1)
def load_base(model: str, dtype: str, stages: int) -> LoadedBase:
    """Load the base; the policies of one process share it, as no request leaves anything in it."""
    from edgespec.model.block import Block
    from edgespec.model.ends import OutputHead
    from edgespec.model.families import bound_last, folds
    from edgespec.model.hub import local_folder
    from edgespec.model.sources import open_source
    from edgespec.model.template_process import render_apart
    from edgespec.model.tokenizer import Tokenizer

    source = open_source(model)
    cuts = blocks_of(source.layers, stages, bound=bound_last(source.config))
    tokenizer = Tokenizer(local_folder(model), is_kept=True)
    render_apart(tokenizer)
    return LoadedBase(
        tokenizer,
        int(source.config.max_position_embeddings),
        folds(source.config),
        tuple(Block(source, first, end, dtype) for first, end in cuts),
        OutputHead(source, dtype),
    )


def draft_of(
    setup: Setup, head: OutputHead, independent: Callable[[str], Guesser] | None = None
) -> TreeGrower | None:
    """A draft source of its own for every world, as it learns from what it answers.

    `independent(folder)`: builds independent drafts in another way than the registry.
    """
    from edgespec.drafting.registry import BUILDERS, BaseParts, build_draft
    from edgespec.model.hub import local_folder
    from edgespec.model.sources import open_source

    source = open_source(setup.model)
    base = BaseParts(local_folder(setup.model), source, head, setup.dtype, "cpu")
    builders = dict(BUILDERS)
    if independent is not None:
        builders["independent"] = lambda folder, base: independent(folder)
    return build_draft(parse_draft(setup.draft), base, builders)


def answerable(model: str, prompts: Sequence[Prompt], say: Callable[[str], None]) -> list[Prompt]:
    """The prompts that the model's context has room for; `say` hears of those left out.

    Raises ConfigError if there are none.
    """
    from edgespec.model.hub import local_folder
    from edgespec.model.sources import open_source
    from edgespec.model.tokenizer import Tokenizer

    context = int(open_source(model).config.max_position_embeddings)
    tokenizer = Tokenizer(local_folder(model), is_kept=True)
    lengths = {prompt: len(tokenizer.encode(prompt.text)) for prompt in prompts}
    fit = [prompt for prompt in prompts if 0 < lengths[prompt] < context]
    if len(fit) < len(prompts):
        left_out = [f"{p.id} ({n})" for p, n in lengths.items() if not 0 < n < context]
        text = (
            f"{len(left_out)} of {len(prompts)} prompts are left out, whose tokens leave no room "
            f"for an answer in the model's context of {context}: {shown(', '.join(left_out))}"
        )
        if not fit:
            raise ConfigError(text)
        say(text)
    return fit


def world_of(setup: Setup, loaded: LoadedBase) -> World:
    """A ring of that set-up in virtual time, with a draft source that has learnt nothing."""
    from edgespec.backends.torch_backend import TorchBlock, TorchHead

    device = CoordinatorParts(TorchHead(loaded.head), draft_of(setup, loaded.head))
    return ring_world(setup, loaded, device, lambda number: TorchBlock(loaded.blocks[number - 1]))


def ring_world(
    setup: Setup,
    loaded: LoadedBase,
    device: CoordinatorParts,
    block_of: Callable[[int], BlockBackend],
    world: Callable[..., World] = World,
) -> World:
    """A ring of that set-up in virtual time, whatever computes: V1 … VN have `block_of(1 … N)`.
    `world`: what makes it, of World's arguments."""
    stages, draft, head = setup.stages, device.draft, None
    asks, load = len(setup.prompts), setup.load
    # Of those that come at random times no one waits for another's end.
    live = 1 if load is None else load.live or asks
    queue: dict[str, Any] = {} if load is None else {"queue_limit": asks + 1, "live": live}
    if setup.head_last:
        head, device = device.head, replace(device, head=None)

    def make_stages() -> list[StageParts]:
        return [
            StageParts(
                StageMachine(
                    is_first=number == 1,
                    is_last=number == stages,
                    row_limit=live * (loaded.context_length + _ROOM),
                    keeps_tokens=loaded.blocks[0].token_rows is not None,
                ),
                block_of(number),
                head if number == stages else None,
            )
            for number in range(1, stages + 1)
        ]

    return world(
        CoordinatorMachine(
            CoordinatorSettings(
                stages,
                loaded.context_length,
                draft.name if draft else "",
                needs=draft.needs if draft else NO_NEEDS,
                sources=draft.sources if draft else (),
                head_last=setup.head_last,
                own_stage=setup.with_stage,
                folds=loaded.folds,
                **queue,
            ),
            loaded.tokenizer,
        ),
        device,
        make_stages,
        _durations(setup, draft),
        setup.network(),
        seed=setup.sampling.seed,
        with_stage=setup.with_stage,
    )


def _durations(setup: Setup, draft: TreeGrower | None) -> Durations:
    charged = charged_durations(setup.costs(), draft, setup.d0_free, setup.loop_free)
    return jittered(charged, setup.jitter, setup.sampling.seed) if setup.jitter else charged


@contextmanager
def one_thread() -> Iterator[None]:
    """One thread for torch: on small models faster than several, and always the same sums."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)
