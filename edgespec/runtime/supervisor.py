"""Supervisor: who is told how a node is, such as a service manager; by default nobody."""

from __future__ import annotations

from typing import Protocol


class Supervisor(Protocol):
    """Hears from a node's I/O loop; nothing here may wait or raise."""

    def ready(self, status: str) -> None:
        """The loop begins; `status` says what the node does now."""

    def status(self, text: str) -> None:
        """What the node does now."""

    def beat(self) -> None:
        """The loop has turned."""

    def stopping(self, reason: str) -> None:
        """The node is about to end, and why."""


class Nobody:
    """A Supervisor that takes no notice."""

    def ready(self, status: str) -> None:
        """Nothing."""

    def status(self, text: str) -> None:
        """Nothing."""

    def beat(self) -> None:
        """Nothing."""

    def stopping(self, reason: str) -> None:
        """Nothing."""
