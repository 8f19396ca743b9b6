from __future__ import annotations

import msgspec
import pytest

from evidences import accuracy, evidence, record
from penstock.bundle.evidence import Evidence
from penstock.measurement import Conditions


def test_candidates_are_found_by_name_the_original_among_them() -> None:
    found = evidence(record("int8", 0.5), record("fp16", 0.8))
    assert found.candidate("fp16").latency_ms == 0.8
    assert found.candidate("original") is found.baseline
    with pytest.raises(KeyError, match="int4"):
        found.candidate("int4")


def test_a_coded_candidate_takes_its_coded_bytes_on_disk() -> None:
    plain = record("a", size_bytes=100)
    assert plain.disk_bytes == 100
    assert msgspec.structs.replace(plain, stored_bytes=10).disk_bytes == 10


def test_the_optimised_graph_is_the_exact_one_on_the_originals_engine_and_threads() -> None:
    others = [
        record("int8", 0.3, precision="int8"),
        record("pruned", 0.4, compression="prune"),
        record("openvino", 0.5, engine="openvino"),
        record("wide", 0.6, threads=4),
        record("broken", None),
    ]
    assert evidence(*others).optimized is None
    assert evidence(*others, record("fp32", 0.9)).optimized == record("fp32", 0.9)


def test_round_trip() -> None:
    found = evidence(record("int8", 0.5), record("broken", None), notes=("a note",), data={"evaluate": "0" * 64})
    assert msgspec.json.decode(msgspec.json.encode(found), type=Evidence) == found


def test_the_contract_in_words() -> None:
    old = evidence()
    assert old.contract == "at most 1.00% loss of accuracy"
    named = msgspec.structs.replace(old, metric="top-1", metric_outputs=("y",), metric_reason="there are labels")
    assert (
        named.contract == "at most 1.00% loss of top-1 in 'y' (there are labels), and 10% difference from the original"
    )
    fidelity = msgspec.structs.replace(named, metric="fidelity", prove_accuracy=True)
    assert fidelity.contract.startswith("at most 10.00% loss of fidelity with 95 % confidence in 'y'")
    assert (named.limit, fidelity.limit) == (0.01, 0.1)


def test_accuracy_is_shown_by_its_kind() -> None:
    share, error = accuracy(0.9), accuracy(3.25, 0.02, metric="mae", is_share=False)
    assert (share.shown, error.shown) == ("90.00%", "3.25")
    assert (share.level, error.level) == (0.9, 0.98)


def test_a_disturbance_is_of_the_candidates_whose_timings_were_disturbed() -> None:
    quiet, busy, untimed = record("quiet"), record("busy", busy="other processes used 1 of 2 cores"), record("no", None)
    assert [evidence(quiet, untimed).disturbance(one) for one in (quiet, untimed)] == ["", ""]
    found = evidence(quiet, busy, conditions=Conditions(0.1, 1.0, 0.0, dirty=True, busy=busy.busy))
    assert [found.disturbance(one) for one in (quiet, busy, untimed)] == ["", busy.busy, ""]


def test_a_disturbance_of_unknown_extent_is_of_all_candidates() -> None:
    """Bundles of older versions do not record it for each candidate."""
    one, untimed = record("one"), record("no", None)
    found = evidence(one, untimed, conditions=Conditions(9.0, 9.0, 0.0, dirty=True))
    assert found.disturbance(one) == found.disturbance(found.baseline) == "load 9 before, 0 % of the time stolen"
    assert found.disturbance(untimed) == ""
