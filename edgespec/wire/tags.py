"""Tags: the number by which each type of message travels."""

from __future__ import annotations

from edgespec.wire import block_messages, client_messages, hints, messages, segment, snapshots

TAGS: dict[int, type[messages.Message]] = {
    1: segment.Segment,
    2: messages.Retain,
    3: messages.CloseRequest,
    4: messages.Assign,
    5: messages.Connect,
    6: messages.Refuse,
    7: messages.Goodbye,
    8: messages.StandBy,
    9: snapshots.SubscribeActivity,
    10: hints.Lenses,
    20: messages.Join,
    21: messages.Loading,
    22: messages.Ready,
    23: messages.Fault,
    24: messages.Heartbeat,
    25: messages.Credit,
    26: messages.Health,
    27: snapshots.StageActivity,
    28: messages.Connected,
    29: hints.Hint,
    30: messages.Enrol,
    31: messages.Enrolled,
    32: messages.Leave,
    33: messages.Removed,
    40: client_messages.Submit,
    41: client_messages.Cancel,
    42: client_messages.Progress,
    43: client_messages.Tokens,
    44: client_messages.Finished,
    45: client_messages.Failed,
    46: client_messages.StatusRequest,
    47: client_messages.Status,
    48: snapshots.Subscribe,
    49: snapshots.Snapshot,
    60: block_messages.BlockRequest,
    61: block_messages.PieceRequest,
    62: block_messages.BlockPreparing,
    63: block_messages.BlockOffer,
    64: block_messages.BlockRefused,
    65: block_messages.Piece,
}
"""The fixed table of message tags. A peer names a number in it, never a type."""
