from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.offline.compress.planner.route import Move, Result, Stage, next_move, stages, worthwhile


def move(name: str, cures: str = "") -> Move:
    return Move(name, "precision", lambda model, _context: model, "int8", cures)  # type: ignore[arg-type]


MOVES = (move("a"), move("b"), move("c", "inaccurate"))


def path(stage: Stage, results: dict[str, Result]) -> str:
    """The steps taken if each ends with its result in ``results``."""
    done: list[tuple[str, Result]] = []
    while (following := next_move(stage, done)) is not None:
        done.append((following.name, results[following.name]))
    return "".join(name for name, _ in done)


def test_first_ends_with_what_is_kept() -> None:
    stage = Stage(MOVES, "first")
    assert path(stage, {"a": "kept"}) == "a"
    assert path(stage, {"a": "useless", "b": "kept"}) == "ab"
    assert path(stage, {"a": "failed", "b": "useless"}) == "ab"


def test_a_cure_is_tried_only_for_what_it_cures() -> None:
    stage = Stage(MOVES, "first")
    assert path(stage, {"a": "inaccurate", "b": "failed", "c": "kept"}) == "abc"
    assert path(stage, {"a": "useless", "b": "inaccurate", "c": "useless"}) == "abc"
    assert path(stage, {"a": "useless", "b": "useless"}) == "ab"


def test_descend_ends_with_what_is_not_kept() -> None:
    stage = Stage(MOVES[:2], "descend")
    assert path(stage, {"a": "kept", "b": "kept"}) == "ab"
    assert path(stage, {"a": "inaccurate"}) == "a"
    assert path(stage, {"a": "failed"}) == "a"


def names(route: tuple[Stage, ...]) -> list[str]:
    return [name for stage in route for name in (*(one.name for one in stage.moves), *names(stage.then))]


def test_quick_gains_come_first() -> None:
    latency, size = names(stages("latency")), names(stages("size"))
    assert latency[:3] == ["int8", "int8-mixed", "int8-qat"]
    assert size[0].startswith("share")
    assert latency.index("shrink-1.5x") < latency.index("low-rank", latency.index("shrink-5x") + 1)
    assert "low-rank" not in size
    assert "prune" not in latency


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=12), st.integers(1, 6))
def test_the_tuner_gets_the_best_and_of_the_rest_the_most_faithful(found: list[tuple[int, int]], most: int) -> None:
    chosen = worthwhile(found, lambda one: one[0], lambda one: one[1], most)
    assert len(chosen) == min(most, len(found))
    ranks = [one[0] for one in chosen]
    assert ranks == sorted(ranks)
    if found:
        assert ranks[0] == min(one[0] for one in found)
    left = list(found)
    for one in chosen:
        left.remove(one)
    best = sorted(found, key=lambda one: one[0])[: most - most // 2]
    bold = [one for one in chosen if one not in best]
    assert all(kept[1] <= other[1] for kept in bold for other in left)
