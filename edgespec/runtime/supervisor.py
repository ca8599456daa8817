"""Supervisor: learns how a node is, such as a service manager does; the base class ignores it."""


class Supervisor:
    """Called from a node's I/O loop; no method may wait or raise."""

    def ready(self, status: str) -> None:
        """The loop begins."""

    def status(self, text: str) -> None:
        """What the node does now."""

    def beat(self) -> None:
        """The loop has turned."""

    def stopping(self, reason: str) -> None:
        """The node is about to end."""
