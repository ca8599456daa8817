"""Stems: any forks and ends leave every row with as many holders as there are."""

from __future__ import annotations

import random

import pytest

from edgespec.tree.stems import LEAST_ROWS, MOST_STEMS, Stems


@pytest.mark.parametrize("seed", range(20))
def test_books_agree_with_lists_of_rows(seed: int) -> None:
    """Each row of a model list is an object; those that two requests share are the same ones."""
    rng, stems = random.Random(seed), Stems()
    shared: dict[int, list[list[object]]] = {}  # the rows of a request's stems
    own: dict[int, list[object]] = {}

    def rows(request: int) -> list[object]:
        return [row for stem in shared[request] for row in stem] + own[request]

    for number in range(60):
        if not own or rng.random() < 0.2:
            stems.open(number)
            shared[number], own[number] = [], [object() for _ in range(rng.randint(1, 300))]
        elif rng.random() < 0.3:
            gone = rng.choice(list(own))
            stems.close(gone)
            del shared[gone], own[gone]
        else:
            base = rng.choice(list(own))
            held = len(rows(base))
            count = rng.randint(1, held)
            how = stems.fork(number, base, count, stems.shareable(base, count), held)
            if how.split:
                whole = shared[base][how.stems - 1]
                two = [whole[: how.split], whole[how.split :]]
                for chain in shared.values():
                    for at, stem in enumerate(chain):
                        if stem is whole:
                            chain[at : at + 1] = two
                            break
            if how.frozen:
                shared[base].append(own[base][: how.frozen])
                own[base] = own[base][how.frozen :]
            shared[number] = shared[base][: how.stems]
            before = sum(map(len, shared[number]))
            assert before + how.copied == count
            own[number] = [object() for _ in range(how.copied + rng.randint(0, 90))]
        if own and rng.random() < 0.2:
            old = rng.choice(list(own))
            stems.move(1000 + number, old)
            shared[1000 + number], own[1000 + number] = shared.pop(old), own.pop(old)
        for request, chain in shared.items():
            holders = [
                sum(any(one is stem for one in c) for c in shared.values()) for stem in chain
            ]
            assert stems.shares(request) == [
                (len(stem), count) for stem, count in zip(chain, holders, strict=True)
            ]
            assert len(chain) <= MOST_STEMS
            assert all(len(stem) >= LEAST_ROWS for stem in chain)
        every = {id(row) for request in own for row in rows(request)}
        assert sum(len(rows(request)) for request in own) - stems.saved == len(every)
    for request in list(own):
        stems.close(request)
    assert stems.saved == 0
