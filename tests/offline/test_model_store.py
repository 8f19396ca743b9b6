"""The kept objects, their lifetime, and their limit."""

from __future__ import annotations

import pytest

from networks import mlp
from penstock.errors import Unavailable
from penstock.offline.model_store import SESSION, ModelStore, keep_models, remembered
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import loaded, signature_of


def test_within_the_block_a_model_is_read_and_loaded_once() -> None:
    with keep_models(1 << 30) as store:
        for _ in range(3):
            read_proto(mlp())
            with loaded(mlp()) as model:
                assert model.signature == signature_of(mlp())
        with loaded(mlp(), as_written=True):
            pass
    assert store.made["parse"] == 1
    assert store.made[SESSION] == 2
    with pytest.raises(Unavailable):
        model.forward({})


def test_outside_of_it_nothing_is_kept() -> None:
    with loaded(mlp()) as first, loaded(mlp()) as second:
        assert first is not second
    made = [remembered("thing", "key", object, 0) for _ in "12"]
    assert made[0] is not made[1]


def test_an_inner_block_joins_the_outer_one() -> None:
    with keep_models(1 << 30) as outer:
        with keep_models(1) as inner:
            assert inner is outer
        assert remembered("thing", "key", object, 1) is remembered("thing", "key", object, 1)


def test_what_was_used_least_recently_goes_first_when_the_bytes_are_spent() -> None:
    with keep_models(2) as store:
        first = remembered("thing", 1, object, 1)
        second = remembered("thing", 2, object, 1)
        assert remembered("thing", 1, object, 1) is first
        remembered("thing", 3, object, 1)
        assert remembered("thing", 1, object, 1) is first
        assert remembered("thing", 2, object, 1) is not second
    assert store.made["thing"] == 4


def test_what_is_in_use_stays() -> None:
    store = ModelStore(0)
    kept = store.take("thing", 1, object, 5)
    assert store.take("thing", 1, object, 5) is kept
    store.give_back(kept)
    assert store.take("thing", 1, object, 5) is kept
    store.give_back(kept)
    store.give_back(kept)
    assert store.take("thing", 1, object, 5) is not kept


def test_a_failure_keeps_nothing() -> None:
    def fail() -> None:
        raise ValueError("no")

    with keep_models(1 << 30) as store:
        with pytest.raises(ValueError, match="no"):
            remembered("thing", 1, fail, 1)
        assert not store.made


def test_a_copy_may_be_changed() -> None:
    with keep_models(1 << 30):
        read_proto(mlp()).graph.node.pop()
        assert len(read_proto(mlp()).graph.node) == len(read_proto(mlp()).graph.node)
        assert len(read_proto(mlp()).graph.node) > 1
