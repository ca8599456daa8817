"""Shared caches: the caches of all open requests of a block, which hold their stems together."""

from __future__ import annotations

from collections.abc import Callable

from edgespec.errors import LocalProtocolError
from edgespec.model.kv_cache import Stem, TwoRegionCache
from edgespec.tree.stems import Fork


class SharedCaches:
    """A cache for every open request (see tree.stems, which says what is shared)."""

    def __init__(self, new_cache: Callable[[int], TwoRegionCache]) -> None:
        """`new_cache` makes an empty one with room for so many rows."""
        self._new_cache = new_cache
        self._caches: dict[int, TwoRegionCache] = {}

    def __getitem__(self, request: int) -> TwoRegionCache:
        """Raises LocalProtocolError if the request is not open."""
        if request not in self._caches:
            raise LocalProtocolError(f"request {request} is not open on this block")
        return self._caches[request]

    def open(self, request: int, reserve: int) -> None:
        """An empty cache with room for `reserve` rows."""
        self._caches[request] = self._new_cache(reserve)

    def move(self, request: int, base: int) -> None:
        """A request goes on with the cache of `base`, which has none afterwards."""
        self._caches[request] = self[base]
        del self._caches[base]

    def fork(self, request: int, base: int, how: Fork) -> None:
        """A request begins with the first rows of `base`."""
        origin = self[base]
        if how.split:
            stem = origin.stems[how.stems - 1]
            two = stem.split(how.split)
            for cache in self._caches.values():
                cache.replace(stem, two)
        if how.frozen:
            origin.freeze(how.frozen)
        self._caches[request] = origin.fork(how.stems, how.copied)

    def close(self, request: int) -> None:
        """Free a request's cache, and the stems that it held last; unknown ones are ignored."""
        self._caches.pop(request, None)

    @property
    def rows(self) -> int:
        """Rows that are held, shared ones once."""
        own = sum(
            cache.length - sum(stem.rows for stem in cache.stems) for cache in self._caches.values()
        )
        return own + sum(stem.rows for stem in self._stems)

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values that are held."""
        own = sum(cache.own_bytes for cache in self._caches.values())
        return own + sum(stem.nbytes for stem in self._stems)

    @property
    def _stems(self) -> list[Stem]:
        every = (stem for cache in self._caches.values() for stem in cache.stems)
        return list({id(stem): stem for stem in every}.values())
