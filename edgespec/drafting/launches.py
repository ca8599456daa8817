"""Launches: how far the host runs ahead of a CUDA device while a draft model runs."""

from __future__ import annotations

from collections import deque

import torch

AHEAD = 2
"""Layers that may be launched and not done: one that runs, and one behind it, so that the device
never waits for the host."""


class Launches:
    """Of one draft model. Elsewhere than on CUDA a layer is done when the host goes on.

    On CUDA the host only queues a layer's kernels, so that it may be a whole pass ahead of them. A
    head that is let in between two layers takes the same stream, so it would wait for all of them,
    and gain nothing. With the host kept near it waits for AHEAD layers at most.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._cuda = torch.device(device).type == "cuda"
        self._launched: deque[torch.cuda.Event] = deque()

    def keep_near(self) -> None:
        """A layer is about to be launched: wait until few enough are not done."""
        if not self._cuda:
            return
        launched = torch.cuda.Event()
        launched.record()
        self._launched.append(launched)
        if len(self._launched) > AHEAD:
            self._launched.popleft().synchronize()
