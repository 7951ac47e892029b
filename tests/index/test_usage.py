"""What commits take, against sums over all pairs of commits and objects."""

from __future__ import annotations

import random
import time

import pytest


def id_of(number):
    return f"{number:064x}"


class Model:
    """A store that is only numbers: every commit names objects, and its manifests name packs."""

    def __init__(self, index, commit):
        self.index, self.commit = index, commit
        self.sizes = {}
        self.named = {}  # commit number -> keys
        self.tables = {}  # manifest -> packs

    def add(self, number, parent, new, named, tables, **changes):
        """`new` are (key, kind, size); `named` what the commit needs, new or not; `tables` packs of new manifests."""
        self.sizes |= {f"commits/{number}": 100, **{key: size for key, _, size in new}}
        self.named[number] = {*named}
        self.tables |= tables
        document = f"commits/{number}"
        edges = [(document, key) for key in named] + [(key, pack) for key, packs in tables.items() for pack in packs]
        self.commit(number, parent, tuple(new), edges=tuple(edges), **changes)

    def needs(self, number):
        named = self.named[number]
        return {f"commits/{number}"} | named | {pack for key in named for pack in self.tables.get(key, ())}

    def unique(self, number):
        others = set().union(*(self.needs(other) for other in self.named if other != number))
        return self.total(self.needs(number) - others)

    def added(self, number):
        before = set().union(*(self.needs(other) for other in self.named if other < number))
        return self.total(self.needs(number) - before)

    def total(self, keys):
        return sum(self.sizes[key] for key in keys)


@pytest.fixture
def model(index, commit):
    return Model(index, commit)


def grow(model, count, seed=0):
    """Commits that share structures, manifests and packs with any that came before."""
    rng = random.Random(seed)
    manifests, packs, structures = [], [], []
    for number in range(1, count + 1):
        new, tables = [], {}
        if not structures or rng.random() < 0.2:
            structures.append(f"structures/{number}")
            new.append((structures[-1], "structure", 30 + number))
        brought = [f"packs/{number}-{i}" for i in range(rng.randrange(3))]
        new += [(key, "pack", 1000 + rng.randrange(1000)) for key in brought]
        packs += brought
        used = []
        for i in range(2):
            if not manifests or rng.random() < 0.6:
                manifests.append(f"manifests/{number}-{i}")
                new.append((manifests[-1], "manifest", 200 + i))
                tables[manifests[-1]] = {*brought, *rng.sample(packs, min(len(packs), 4))}
                used.append(manifests[-1])
            else:
                used.append(rng.choice(manifests))
        model.add(number, number - 1 or None, new, {rng.choice(structures), *used, *brought}, tables)


def test_against_all_pairs(index, model):
    grow(model, 40)
    shares = index.commit_shares()
    assert list(shares) == [id_of(number) for number in model.named]
    stored = index.stored_bytes(list(shares))
    for number in model.named:
        share = shares[id_of(number)]
        assert (share.added, share.unique) == (model.added(number), model.unique(number)), number
        assert stored[id_of(number)] == model.total(model.needs(number)), number
    assert sum(share.added for share in shares.values()) == sum(each.size for each in index.object_totals())
    some = [3, 7, 20]
    needed = index.needed_objects([id_of(number) for number in some])
    assert sum(needed.values()) == model.total(set().union(*(model.needs(number) for number in some)))
    structures = index.structures()
    assert all(structures[id_of(number)] in model.named[number] for number in model.named)


def test_nothing_there(index):
    assert (
        index.commit_shares() == index.parents() == index.structures() == index.stored_bytes([]) == index.needed_objects([]) == {}
    )


def test_a_pack_that_a_commit_brings_and_only_a_later_one_uses(index, model):
    """The packs of a folded delta are named by the commit that brought them, and by manifests that come later."""
    structure, manifest = ("structures/a", "structure", 1), ("manifests/a", "manifest", 10)
    packs = [("packs/a", "pack", 1000), ("packs/fold", "pack", 500)]
    model.add(
        1,
        None,
        [structure, manifest, *packs],
        {"structures/a", "manifests/a", "packs/a", "packs/fold"},
        {"manifests/a": {"packs/a"}},
    )
    new = ("manifests/b", "manifest", 10)
    model.add(2, 1, [new], {"structures/a", "manifests/b"}, {"manifests/b": {"packs/a", "packs/fold"}})
    shares = index.commit_shares()
    assert (shares[id_of(1)].added, shares[id_of(1)].unique) == (1611, 110)
    assert (shares[id_of(2)].added, shares[id_of(2)].unique) == (110, 110)
    assert index.stored_bytes([id_of(2)]) == {id_of(2): 1611}


def test_parents_come_in_the_order_of_the_log(index, commit):
    commit(1, None)
    commit(3, 1)
    commit(2, 3, parents=(id_of(3), id_of(9)))
    assert list(index.parents().items()) == [(id_of(1), ()), (id_of(3), (id_of(1),)), (id_of(2), (id_of(3), id_of(9)))]


def test_a_long_history_takes_no_query_per_pair(index, model):
    grow(model, 200, seed=1)
    start = time.perf_counter()
    shares = index.commit_shares()
    index.stored_bytes(list(shares))
    index.needed_objects(list(shares))
    assert len(shares) == 200
    assert time.perf_counter() - start < 5
