"""The table has a figure for every stage of every way, and the copies are those that the code makes."""

from __future__ import annotations

import numpy as np

from benchmarks import in_process, profile_path
from benchmarks.in_process import NULL_INPUTS, NullModel


def test_every_stage_of_every_way_has_its_time() -> None:
    found, held = in_process.run(profile_path.profile(NullModel(), NULL_INPUTS, bursts=1))
    assert set(found) == {f"{way}, {count}" for way in ("HTTP JSON", "HTTP binary", "gRPC") for count in (64, 1)}
    for way, stages in found.items():
        assert set(stages) == set(profile_path.STAGES)
        # Differences of short times: a busy machine can make one negative, or long.
        assert np.isfinite(list(stages.values())).all(), (way, stages)
        assert sum(stages.values()) > 1
    assert all(0 < blocks < 1000 for blocks in held.values())


def test_large_tensors_are_copied_once_by_merging_and_nowhere_else() -> None:
    large = {stage: copies for stage, _, copies in profile_path.count_copies()}
    assert {stage for stage, copies in large.items() if copies != "none"} == {"merge, several requests"}


def test_the_table_is_markdown() -> None:
    stages = dict.fromkeys(profile_path.STAGES, 1.5)
    text = profile_path.render({"HTTP JSON, 64": stages}, {"HTTP JSON": 12.0}, [("split", "none", "none")])
    assert "| engine | 1.50 |" in text
    assert f"| **sum** | {1.5 * len(stages):.2f} |" in text
    assert "| split | none | none |" in text


def test_sockets_take_time() -> None:
    read, write = profile_path.socket_microseconds(200, count=20)
    assert 0 < read < 10_000
    assert 0 < write < 10_000
    assert np.isfinite([read, write]).all()
