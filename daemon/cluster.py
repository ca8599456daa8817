"""The cluster folder: this machine's keys and membership; on the coordinator also the settings."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

from msgspec import Meta, structs

from edgespec.config import (
    DEFAULT_PORT,
    HEAD_ON_COORDINATOR,
    LOOPBACK,
    Address,
    CoordinatorConfig,
    Quantisation,
)
from edgespec.daemon.private_files import (
    held,
    make_folder,
    read_private,
    remove_private,
    require_own,
    write_private,
)
from edgespec.errors import AccessRefused, ConfigError, EdgespecError
from edgespec.files import locked, state_folder
from edgespec.net.discovery_interfaces import EVERY_ADDRESS, listens_everywhere
from edgespec.net.keys import Identity, KeyPair, is_key, short
from edgespec.planning.partition import parse_split
from edgespec.schema import FileStruct, json_text, read_as

log = logging.getLogger(__name__)

VARIABLE = "EDGESPEC_CLUSTER"
"""Environment variable: the cluster folder."""

COORDINATOR_NAME = "coordinator"
"""What the coordinator is called where a device has its name."""

DeviceName = Annotated[str, Meta(min_length=1)]

_VERSION = ("version", 1)
_NEWER = ("with_stage", "head", "head_quant", "share_prefixes", "cache_dtype")
"""Settings that the folders of earlier releases do not have."""

_CLUSTER_KEY = "cluster.key"
_SETTINGS = "settings.json"
_DEVICE_KEY = "device.key"
_MEMBERSHIP = "membership.json"
_PLAN = "plan.json"
_HOLDERS = "holders.json"
_ADDED = "models"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def default_folder() -> Path:
    """$EDGESPEC_CLUSTER, systemd's state folder, or the user's own."""
    chosen = os.environ.get(VARIABLE, "") or os.environ.get("STATE_DIRECTORY", "").split(":")[0]
    return Path(chosen).absolute() if chosen else state_folder()


def folder_of(option: str) -> Path:
    """The folder that the option --cluster names; "": the default."""
    return Path(option).absolute() if option else default_folder()


class ClusterSettings(FileStruct, frozen=True):
    """What `edgespec serve` takes for the ring, in the words of its options.

    `model` and `draft` "": the bundled ones. `layers` "": equal shares; `context` 0: what the model
    takes; `quant` "": as the model's folder has it. `places`: names of
    the devices that a plan assigns to stages 1, 2, …; () if any device may be any stage.
    `with_stage`: the stage on the coordinator's own machine; 0: none. `head`: one of config.HEADS.
    `share_prefixes`: prompts of different users may begin with the same rows; for the owner to say,
    in this file alone (docs/security.md). `cache_dtype`: see CoordinatorConfig.
    """

    model: str = ""
    draft: str = ""
    stages: int = 1
    dtype: str = "float32"
    quant: str = "none"
    head_quant: str = "none"
    draft_quant: str = "none"
    layers: str = ""
    context: int = 0
    host: str = EVERY_ADDRESS
    port: int = DEFAULT_PORT
    places: tuple[DeviceName, ...] = ()
    with_stage: int = 0
    head: str = HEAD_ON_COORDINATOR
    share_prefixes: bool = False
    cache_dtype: str = ""

    def __post_init__(self) -> None:
        """Raises ConfigError for settings that no coordinator could use."""
        CoordinatorConfig(
            self.model,
            self.draft,
            self.stages,
            self.dtype,
            Address(self.host, self.port),
            quantisation=Quantisation.parse(self.quant or "none"),
            head_quantisation=Quantisation.parse(self.head_quant),
            draft_quantisation=Quantisation.parse(self.draft_quant),
            layers=parse_split(self.layers),
            context=self.context,
            with_stage=self.with_stage,
            head=self.head,
            cache_dtype=self.cache_dtype,
        )
        if self.places and len(set(self.places)) != self.stages:
            raise ConfigError(
                f"places names {len(set(self.places))} devices, and the ring has {self.stages} "
                "stages; name one device for each, or none"
            )

    def to_json(self) -> str:
        return json_text(self, _VERSION)

    @staticmethod
    def from_json(text: str | bytes, path: Path) -> ClusterSettings:
        """The settings in a file. Raises ConfigError that names it."""
        remedy = "`edgespec init` writes it again"
        return read_as(
            ClusterSettings, text, str(path), remedy, _VERSION, all_keys=True, newer=_NEWER
        )


class _Membership(FileStruct, frozen=True):
    """Of a device: the coordinator's public key and last address, and our name there."""

    coordinator: str
    name: str
    address: str

    def __post_init__(self) -> None:
        if not is_key(self.coordinator):
            raise ConfigError("the coordinator's key is no key")
        Address.parse(self.address)


class _Holders(FileStruct, frozen=True):
    """Of a coordinator: the public keys of the devices that held stages 1, 2, … last."""

    keys: tuple[str, ...]


class ClusterFolder:
    """The keys and the membership of this machine; made by `create`, `open` and `remember`.

    Every method raises AccessRefused if others could read or change what is stored, and ConfigError
    if it is damaged, or if the disk refuses.
    """

    def __init__(self, path: Path, own: KeyPair, membership: _Membership | None) -> None:
        """`membership`: None for the coordinator."""
        self.path = path
        self._own, self._membership = own, membership

    @staticmethod
    def create(path: Path, settings: ClusterSettings) -> ClusterFolder:
        """Make a cluster; one that is there keeps its key, devices and tokens, not its settings."""
        make_folder(path)
        with held(path):
            if (path / _MEMBERSHIP).exists():
                raise ConfigError(
                    f"this machine is a device of another cluster, by {path}; let it leave that "
                    "one with `edgespec leave`, or give another folder with --cluster"
                )
            own = _key(path / _CLUSTER_KEY)
            write_private(path / _SETTINGS, settings.to_json())
            if own is None:  # last: a folder is a cluster's if and only if it has this file
                own = _new_key(path / _CLUSTER_KEY)
        return ClusterFolder(path, own, None)

    @staticmethod
    def is_at(path: Path) -> bool:
        """Whether a cluster was made or joined there. Raises AccessRefused if we cannot look."""
        require_own(path)
        return any((path / name).exists() for name in (_CLUSTER_KEY, _MEMBERSHIP))

    @staticmethod
    def open(path: Path) -> ClusterFolder:
        """The cluster in a folder. Raises AccessRefused, with what to do, if there is none."""
        require_own(path)
        own = _key(path / _CLUSTER_KEY)
        if own is not None:
            return ClusterFolder(path, own, None)
        stored = read_private(path / _MEMBERSHIP, secret=False)
        if stored is None:
            raise AccessRefused(
                f"there is no cluster in {path}: make one with `edgespec init --model ... "
                "--stages N`, join one with `edgespec join TOKEN`, or only ask one with `edgespec "
                "prompt --token TOKEN`; --cluster names another folder (a service's is "
                "/var/lib/edgespec)"
            )
        where = str(path / _MEMBERSHIP)
        membership = read_as(_Membership, stored[0], where, "join again with a token", _VERSION)
        own = _key(path / _DEVICE_KEY)
        if own is None:
            raise AccessRefused(
                f"{path / _DEVICE_KEY} is missing, with which this device proved who it is; join "
                "again with `edgespec join TOKEN`"
            )
        return ClusterFolder(path, own, membership)

    @staticmethod
    def remember(
        path: Path, own: KeyPair, coordinator_key: str, name: str, address: str
    ) -> ClusterFolder:
        """Store that the coordinator with this public key has admitted our key, as `name`.

        `address`: its HOST:PORT. An earlier membership is replaced. Raises ConfigError for a
        coordinator's folder.
        """
        membership = _Membership(coordinator_key, name, address)
        make_folder(path)
        with held(path):
            _refuse_coordinators(path)
            if _key(path / _DEVICE_KEY) != own:
                write_private(path / _DEVICE_KEY, own.secret + "\n")
            _write_membership(path, membership)
        return ClusterFolder(path, own, membership)

    @property
    def identity(self) -> Identity:
        """Our key pair, and the key of the coordinator."""
        if self._membership is None:
            return Identity.of_coordinator(self._own)
        return Identity(self._own, self._membership.coordinator)

    @property
    def is_coordinator(self) -> bool:
        """Whether the cluster's own key is here, which grants all rights."""
        return self._membership is None

    @property
    def cluster_id(self) -> str:
        """The coordinator's fingerprint."""
        return short(self.identity.coordinator)

    @property
    def settings(self) -> ClusterSettings:
        """The coordinator's settings, as they are on disk now. Raises ConfigError on a device."""
        if self._membership is not None:
            raise ConfigError(
                f"{self.path} is that of a device, which has no settings of a ring; do this on the "
                "coordinator"
            )
        path = self.path / _SETTINGS
        stored = read_private(path, secret=False)
        if stored is None:
            raise ConfigError(f"{path} is missing; `edgespec init` writes it again")
        return ClusterSettings.from_json(stored[0], path)

    def path_of_added(self, name: str) -> Path:
        """Where the settings of a further model are. Raises ConfigError for what is no name."""
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no name for a model; give up to 64 letters, digits, dots, dashes and "
                "underscores"
            )
        return self.path / _ADDED / f"{name}.json"

    def add(self, name: str, settings: ClusterSettings) -> None:
        """Store the settings of a further model, which is served in turn with the others."""
        path = self.path_of_added(name)
        make_folder(path.parent)
        with held(self.path):
            write_private(path, settings.to_json())

    def added(self) -> dict[str, ClusterSettings]:
        """Of each model that was added, by its name."""
        found = {}
        for path in sorted((self.path / _ADDED).glob("*.json")):
            if (stored := read_private(path, secret=False)) is not None:
                found[path.stem] = ClusterSettings.from_json(stored[0], path)
        return found

    @contextmanager
    def served(self) -> Iterator[None]:
        """Hold the lock of the one process that serves the cluster.

        Raises EdgespecError if another process holds it; ConfigError if the disk refuses.
        """

        def taken() -> None:
            raise EdgespecError(
                f"the cluster {self.cluster_id} is served by another `edgespec serve` of this "
                f"machine already ({self.path}); end that one first, or make another cluster with "
                "`edgespec init --cluster DIR` and serve that"
            )

        with ExitStack() as stack:
            try:
                stack.enter_context(locked(self.path / _CLUSTER_KEY, taken))
            except OSError as problem:
                raise ConfigError(
                    f"cannot lock {self.path / _CLUSTER_KEY} ({problem.strerror or problem})"
                ) from None
            yield

    def keep_plan(self, text: str) -> None:
        """Store the plan that the settings follow in plan.json; "": remove it."""
        with held(self.path):
            if text:
                write_private(self.path / _PLAN, text)
            else:
                remove_private(self.path / _PLAN)

    def holders(self) -> tuple[str, ...]:
        """The keys of the devices that held stages 1, 2, … last; () if that is not known."""
        path = self.path / _HOLDERS
        try:
            stored = read_private(path, secret=False)
            return read_as(_Holders, stored[0], str(path), "", _VERSION).keys if stored else ()
        except EdgespecError as problem:  # it is made again: boards may have to fetch other layers
            log.warning("not known which device held which layers: %s", problem)
            return ()

    def keep_holders(self, keys: tuple[str, ...]) -> None:
        """Store them for the next start, unless the disk refuses."""
        try:
            with held(self.path):
                write_private(self.path / _HOLDERS, json_text(_Holders(keys), _VERSION))
        except EdgespecError as problem:
            log.warning("the next start does not know which device has which layers: %s", problem)

    @property
    def name(self) -> str:
        """This machine's name in the cluster."""
        return COORDINATOR_NAME if self._membership is None else self._membership.name

    @property
    def address(self) -> str:
        """HOST:PORT at which this machine last reached the coordinator."""
        if self._membership is not None:
            return self._membership.address
        settings = self.settings
        host = LOOPBACK if listens_everywhere(settings.host) else settings.host
        return str(Address(host, settings.port))

    def with_address(self, address: str) -> ClusterFolder:
        """The same with another address of the coordinator; a device stores it."""
        if self._membership is None or address == self._membership.address:
            return self
        membership = structs.replace(self._membership, address=address)
        with held(self.path):
            _write_membership(self.path, membership)
        return ClusterFolder(self.path, self._own, membership)

    def forget(self) -> None:
        """Remove a device's membership and key pair. Raises ConfigError on a coordinator."""
        with held(self.path):
            _refuse_coordinators(self.path)
            for name in (_MEMBERSHIP, _DEVICE_KEY):
                remove_private(self.path / name)


def own_key(path: Path) -> KeyPair:
    """This device's key pair, made at the first call and kept, whatever cluster it is in.

    Raises ConfigError for a coordinator's folder.
    """
    make_folder(path)
    with held(path):
        _refuse_coordinators(path)
        return _key(path / _DEVICE_KEY) or _new_key(path / _DEVICE_KEY)


def _key(path: Path) -> KeyPair | None:
    """The key pair whose secret key a file holds; None if it is not there."""
    stored = read_private(path, secret=True)
    if stored is None:
        return None
    try:
        return KeyPair.from_secret(stored[0].decode().strip())
    except ValueError:
        again = "join again with a new token"
        if path.name == _CLUSTER_KEY:
            again = f"run `edgespec init` again, and let all devices and clients {again}"
        raise ConfigError(
            f"{path} is damaged: it holds no secret key; put a copy of it back. If there is none, "
            f"remove it, and {again}"
        ) from None


def _new_key(path: Path) -> KeyPair:
    pair = KeyPair.new()
    write_private(path, pair.secret + "\n")
    return pair


def _write_membership(path: Path, membership: _Membership) -> None:
    write_private(path / _MEMBERSHIP, json_text(membership, _VERSION))


def _refuse_coordinators(path: Path) -> None:
    if (path / _CLUSTER_KEY).exists():
        raise ConfigError(
            f"{path} is the coordinator's own folder; a stage on the coordinator's machine needs "
            "no token (`edgespec join` alone), and for another cluster give another folder with "
            "--cluster"
        )
