import pickle

from networks import mlp
from penstock.artifact import Artifact
from penstock.offline.compress.pruning.magnitude import GlobalRule, PruneOptions, prune
from penstock.offline.compress.pruning.n_m import prune_n_m
from penstock.offline.compress.restored.restore import RESTORED, restored, steps
from penstock.offline.compress.sharing.share import share
from penstock.offline.optimize.model import read_proto

ORIGINAL = mlp(32)
PRUNED = prune(ORIGINAL, PruneOptions(GlobalRule(0.5)))
SHARED = share(PRUNED)


def test_steps_lead_back_to_the_original():
    assert [(name, made.digest, source.digest) for name, made, source in steps(ORIGINAL, SHARED)] == [
        ("share", SHARED.digest, PRUNED.digest),
        ("prune", PRUNED.digest, ORIGINAL.digest),
    ]
    assert [name for name, *_ in steps(PRUNED, SHARED)] == ["share"]
    assert not list(steps(ORIGINAL, ORIGINAL))


def test_a_step_that_changed_nothing_is_left_out():
    same = PRUNED.derive(PRUNED.data, "mixed_precision", {}, {})
    assert [name for name, *_ in steps(ORIGINAL, same)] == ["prune"]


def test_steps_end_where_a_source_is_not_in_memory():
    copy: Artifact = pickle.loads(pickle.dumps(PRUNED))
    assert not list(steps(ORIGINAL, copy))
    assert [name for name, *_ in steps(ORIGINAL, share(copy))] == ["share"]


def test_each_step_is_undone_to_its_own_source():
    for step in steps(ORIGINAL, SHARED):
        assert step[0] in RESTORED
        pair = restored(*step)
        assert pair.wanted == step[2]
        assert pair.found is pair.wanted  # without a run, because nothing else was changed


def test_pruning_by_pattern_may_keep_smaller_elements_than_it_removes():
    made = prune_n_m(ORIGINAL)
    found, wanted = restored("prune_n_m", made, ORIGINAL)
    weights = [read_proto(one).graph.initializer for one in (found, wanted, made)]
    assert list(weights[0]) == list(weights[1]) != list(weights[2])
