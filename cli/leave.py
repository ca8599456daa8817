"""edgespec leave: take this device out of its cluster."""

from __future__ import annotations

from edgespec.cli import options
from edgespec.cli.notes import Notes
from edgespec.cli.reach import address_of
from edgespec.daemon.cluster import ClusterFolder, folder_of
from edgespec.errors import AccessRefused, ConfigError, PeerLost
from edgespec.runtime.enrolment import leave as leave_cluster


def leave(
    coordinator: str | None = options.COORDINATOR,
    wait: float = options.WAIT,
    cluster: str = options.CLUSTER,
) -> None:
    """Leave the cluster: the coordinator admits this device's key no more, and it is deleted here.

    A daemon of this device ends by itself. Blocks stay in the cache.
    """
    notes = Notes()
    folder = ClusterFolder.open(folder_of(cluster))
    if folder.is_coordinator:
        raise ConfigError(
            f"{folder.path} is the coordinator's own folder, which leaves no cluster; the cluster "
            "ends when the coordinator is stopped and this folder deleted"
        )
    name = folder.name
    try:
        address = address_of(folder, coordinator, wait, notes)
        leave_cluster(address, folder.identity, wait)
    except AccessRefused:
        notes.say("the coordinator did not know this device any more")
    except PeerLost as lost:
        notes.say(str(lost))
        notes.say(f"its key is admitted until somebody says there: edgespec device remove {name}")
    folder.forget()
    notes.say(f"this machine is no part of the cluster {folder.cluster_id} any more")
