"""Simulation: policies on a ring in virtual time, from names to figures as Python values."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from edgespec.bench.load import Load
from edgespec.bench.report import Run
from edgespec.bench.setup import Setup, answerable
from edgespec.bench.simulated import simulate as run_policies
from edgespec.bench.workloads import Prompt, default_prompts
from edgespec.config import Quantisation
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.planning import Quants, model_to_plan
from edgespec.daemon.precision import AUTO
from edgespec.daemon.profiles import fitted_model, profile_named, ring_of
from edgespec.daemon.settings import chosen_draft
from edgespec.door.asking import USUAL, SamplingParams
from edgespec.drafting.choice import NONE
from edgespec.planning.cost_model import COST_MODELS, CostModel, cost_model_named
from edgespec.planning.profile import Profile
from edgespec.sim.links import LinkSpec

DEFAULT_PROFILE = "jetson-orin-nano-8gb"

log = logging.getLogger(__name__)


def simulate(
    policies: Sequence[str] = ("all",),
    prompts: Sequence[str] = (),
    *,
    model: str = "",
    draft: str = "",
    stages: int = 4,
    profiles: Sequence[str] = (DEFAULT_PROFILE,),
    cost_model: str = "",
    link: LinkSpec | None = None,
    live: int | None = None,
    limit: int = 0,
    params: SamplingParams = USUAL,
    jobs: int = 1,
) -> list[Run]:
    """What `edgespec simulate` shows, as values: the figures of each policy, in their order.

    `policies`: names, "all", or your own ("package.module:Class"). `prompts`: texts; none given:
    the first `limit` (0: all 40) of the bundled problems. `model` and `draft` compute the tokens,
    by default the bundled pair. Devices of `profiles`, one for all or D0's and each stage's, are
    charged as if they ran `cost_model`; `link`: every link, instead of the profiles'. `live`: so
    many requests at once. `jobs`: processes, 0: one a processor; with several, the calling script
    must be importable (`if __name__ == "__main__":`). Raises ConfigError for what cannot run.
    """
    base, chosen = model or bundled("base"), str(chosen_draft(draft, model))
    devices = tuple(map(cache(profile_named), ring_of(profiles, stages)))
    asked = [Prompt(str(number), "", (text,)) for number, text in enumerate(prompts, 1)]
    setup = Setup(
        model=base,
        draft=chosen,
        dtype="float64",
        profiles=devices,
        cost_model=charged_model(cost_model, devices, chosen),
        link=link,
        prompts=tuple(answerable(base, asked or default_prompts(limit), log.warning)),
        max_new_tokens=params.max_new_tokens,
        sampling=params.sampling,
        load=None if live is None else Load(live),
    )
    return run_policies(setup, policies, jobs)


def charged_model(
    name: str, profiles: Sequence[Profile], draft: str = "", head_quant: str = AUTO
) -> CostModel:
    """The cost model of that name; "": that of the profiles, or the default.

    That of a folder or file is by its sizes, held as daemon.precision chooses, with `draft`.
    `head_quant` "auto": with heads as the cost model has them.
    """
    if name and name not in COST_MODELS and Path(name).exists():
        return model_to_plan(name, Quants(head=head_quant), draft or NONE).model.costs
    head = None if head_quant == AUTO else Quantisation.parse(head_quant)
    return cost_model_named(name or fitted_model(profiles), head)
