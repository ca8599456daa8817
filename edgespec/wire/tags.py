"""Tags: the number by which each type of message travels."""

from __future__ import annotations

from edgespec.wire import block_messages, client_messages, hints, messages, segment, snapshots

_MESSAGES: tuple[type[messages.Message], ...] = (
    segment.Segment,
    messages.Retain,
    messages.CloseRequest,
    messages.Assign,
    messages.Connect,
    messages.Refuse,
    messages.Goodbye,
    messages.StandBy,
    snapshots.SubscribeActivity,
    hints.Lenses,
    messages.Join,
    messages.Loading,
    messages.Ready,
    messages.Fault,
    messages.Heartbeat,
    messages.Credit,
    messages.Health,
    snapshots.StageActivity,
    messages.Connected,
    hints.Hint,
    messages.Enrol,
    messages.Enrolled,
    messages.Leave,
    messages.Removed,
    client_messages.Submit,
    client_messages.Cancel,
    client_messages.Progress,
    client_messages.Tokens,
    client_messages.Finished,
    client_messages.Failed,
    client_messages.StatusRequest,
    client_messages.Status,
    snapshots.Subscribe,
    snapshots.Snapshot,
    block_messages.BlockRequest,
    block_messages.PieceRequest,
    block_messages.BlockPreparing,
    block_messages.BlockOffer,
    block_messages.BlockRefused,
    block_messages.Piece,
)

TAGS = {kind.__struct_config__.tag: kind for kind in _MESSAGES}
"""All messages by their tags. A peer names a number in it, never a type."""
