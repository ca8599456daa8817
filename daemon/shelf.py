"""Shelf: models of one cluster, each with a coordinator of its own, of which one at a time runs.

It is a child of this process, which keeps the HTTP API, so that clients wait in it while another
model is loaded. Stages know no more than that their coordinator ends and comes back, and assigns
them other layers.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgespec.config import LOOPBACK, Address
from edgespec.daemon.api_process import ApiOptions
from edgespec.daemon.bundled_models import bundled
from edgespec.daemon.child_process import ChildProcess
from edgespec.daemon.cluster import VARIABLE, ClusterFolder, ClusterSettings
from edgespec.daemon.local_ring import kept_port
from edgespec.daemon.model_names import names_of
from edgespec.daemon.notify import Notifier
from edgespec.errors import ConfigError, EdgespecError, PeerLost
from edgespec.net.discovery_interfaces import listens_everywhere, reached_at
from edgespec.net.slowness import slowness
from edgespec.net.sockets import unavailable
from edgespec.plugins import own_policy_options
from edgespec.types.own_module import own_command
from edgespec.wire.client_messages import Status

if TYPE_CHECKING:
    from edgespec.runtime.async_client import AsyncClient

LOOK_S = 0.2
"""Seconds between two looks at whether a coordinator has loaded its model."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ShelfOptions:
    """How `edgespec serve` shares the ring among models. `turn`, `idle`, `drain`: seconds, see
    serving.turns.ModelTurns. `passed_on`: options for each coordinator."""

    turn: float
    idle: float = math.inf
    drain: float = 0.0
    passed_on: tuple[str, ...] = ()


def models_of(folder: ClusterFolder) -> dict[str, ClusterSettings]:
    """What the cluster serves, by the name to ask for it by: first what `edgespec init` made, then
    what it added. Raises ConfigError for two of one name."""
    first = folder.settings
    found = {names_of(first.model or bundled("base"))[0]: first}
    for name, settings in folder.added().items():
        if name in found:
            raise ConfigError(
                f"two models of the cluster are called {name}; `edgespec init --add` one of them "
                f"again under another name, and remove {folder.path_of_added(name)}"
            )
        found[name] = settings
    return found


def run_shelf(
    folder: ClusterFolder,
    models: Mapping[str, ClusterSettings],
    http: Address,
    told: ApiOptions,
    options: ShelfOptions,
    own: Address,
) -> int:
    """Serve models of a cluster by turns until a signal ends it; returns the exit code.

    `models`: see `models_of`. `http`: of the API; `own`: where coordinators listen. The one line
    on standard output is that address. Raises AddressUnavailable for one that cannot be used.
    """
    # Late: uvicorn and starlette take their time to import.
    from edgespec.daemon.api import ApiConfig, Several, run_api
    from edgespec.serving.protocol import opened
    from edgespec.serving.turns import ModelTurns

    try:
        opened(own, 1).close()
    except OSError as problem:  # every coordinator would say so, and only in the log
        raise unavailable(own, problem.strerror or str(problem)) from None
    with kept_port(own) as address, ExitStack() as ends:
        host = LOOPBACK if listens_everywhere(address.host) else address.host
        print(f"coordinator at {reached_at(address)[0]}", flush=True)
        log.info("models that take turns: %s", ", ".join(models))
        serve = ["serve", "--http", "none", "--host", address.host, "--port", str(address.port)]
        command = [*own_command("edgespec.cli.main"), *serve, *options.passed_on]
        notifier = Notifier(slow=slowness())
        ends.callback(notifier.close)

        def turns_over(client: AsyncClient) -> ModelTurns:
            shelf = Shelf(client, [*command, *own_policy_options()], {VARIABLE: str(folder.path)})
            known = [_unloaded(*one) for one in models.items()]
            notifier.ready(f"serving {', '.join(models)} by turns")
            times = options.turn, options.idle, options.drain
            return ModelTurns(shelf, known, *times, notifier.leaving)

        several = Several(turns_over, notifier.beat)
        config = ApiConfig(http, Address(host, address.port), told)
        return run_api(config, folder, several)


def _unloaded(name: str, settings: ClusterSettings) -> Status:
    """What is known of a model before it is loaded."""
    model = settings.model or bundled("base")
    names = (name, *names_of(model))
    return Status(False, (), model=name, names=names, context_length=settings.context)


class Shelf:
    """Loads one model by starting its coordinator; see serving.turns.Loader."""

    def __init__(
        self, client: AsyncClient, command: Sequence[str], environment: Mapping[str, str]
    ) -> None:
        """`client`: of whichever coordinator there is. `command`: starts one, with `--only NAME`
        behind it."""
        self._client = client
        self._command, self._environment = command, environment
        self._child: ModelProcess | None = None

    @property
    def runs(self) -> bool:
        return self._child is not None and not self._child.is_over

    async def load(self, name: str, is_wanted: Callable[[], bool]) -> Status:
        """Start its coordinator, and wait until it answers."""
        await self.unload()
        command = [*self._command, "--only", name]
        self._child = child = ModelProcess(name, command, self._environment)
        child.__enter__()
        while not child.is_over:
            try:
                status = await self._client.status()
                if status.model == name:
                    return status
            except PeerLost:
                pass  # it loads its models, and does not listen before
            if not is_wanted():
                raise EdgespecError(f"nobody waits for the model {name} any more")
            await asyncio.sleep(LOOK_S)
        raise EdgespecError(
            f"the model {name} cannot be loaded; the log of `edgespec serve` says why"
        )

    async def unload(self) -> None:
        child, self._child = self._child, None
        if child is not None:
            await asyncio.to_thread(child.__exit__)


class ModelProcess(ChildProcess):
    """The coordinator of one model, as a child; if it ends, the next request has another one."""

    def __init__(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        super().__init__(f"the coordinator of {name}", command, environment, is_watched=True)
        self.is_over = False
        """Whether it has ended by itself."""

    def again_after(self, code: int, lived: float) -> float | None:
        self.is_over = True
        log.error("%s has ended with code %d", self.name, code)
        return None
