"""Fit the paper-flowspec-7b profile: three times such that three policies run at the paper's speed.

    python tools/fit_paper_profile.py PROMPTS [ROUNDS]

prints, round by round, the stage's time at one row, its time for each further row, the draft's time
a pass (the FLOWSPEC_ constants of tools/estimate_profiles.py), and tokens a second with them:
Gauss-Newton on the logarithms, from those constants. PROMPTS: a few that no report uses.
"""

from __future__ import annotations

import sys

import estimate_profiles
import numpy as np

from edgespec.bench.setup import Setup
from edgespec.bench.simulated import play
from edgespec.bench.workloads import read_prompts
from edgespec.daemon.bundled_models import bundled
from edgespec.planning.cost_model import cost_model_named
from edgespec.verify.sampling import Sampling

PAPER = {"naive_tree": 6.24, "pipedec16": 7.12, "flowspec": 8.71}
"""Tokens a second of LLaMA2-7B at T = 0 on GSM8K (FlowSpec, Table 1)."""

TIMES = ("FLOWSPEC_STAGE_SECONDS", "FLOWSPEC_STAGE_ROW_SECONDS", "FLOWSPEC_DRAFT_SECONDS")
STEP = 0.15  # of a logarithm, for the derivatives
STAGES = 4


def main() -> None:
    """Run the fit."""
    path = sys.argv[1]
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 4
    wanted = np.log(list(PAPER.values()))
    logs = np.log([getattr(estimate_profiles, name) for name in TIMES])
    for _ in range(rounds):
        found = speeds(path, logs)
        print(np.exp(logs).round(6).tolist(), np.exp(found).round(2).tolist(), flush=True)
        slopes = np.column_stack(
            [(speeds(path, logs + STEP * unit) - found) / STEP for unit in np.eye(len(TIMES))]
        )
        change = np.linalg.lstsq(slopes, wanted - found, rcond=1e-2)[0]
        logs = logs + np.clip(change, -0.8, 0.8)


def speeds(path: str, logs: np.ndarray) -> np.ndarray:
    """Logarithms of the policies' tokens a second with these times."""
    for name, value in zip(TIMES, np.exp(logs), strict=True):
        setattr(estimate_profiles, name, float(value))
    profile = estimate_profiles.flowspec()
    setup = Setup(
        model=bundled("base"),
        draft=bundled("draft"),
        dtype="float32",
        profiles=(profile,) * (STAGES + 1),
        cost_model=cost_model_named(profile.cost_model),
        link=None,
        prompts=tuple(read_prompts(path)),
        max_new_tokens=128,
        sampling=Sampling(),
    )
    return np.log([play(setup, policy).speed for policy in PAPER])


if __name__ == "__main__":
    main()
