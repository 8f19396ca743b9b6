"""Random pipelines: all forms of a declaration are the same, and all ways to run it in this process give the same bits and errors.

Tests of the server are in ``tests/e2e/test_serve_random_pipelines.py``, and ``make fuzz`` tries more pipelines.
"""

from __future__ import annotations

import warnings
from collections import Counter
from random import Random

import pytest

from declaration_forms import check_forms, check_meaning, mistaken
from penstock.pipeline.steps.registry import NAMES, step_class
from penstock.pipeline.streaming.step_process import StepProcess
from pipeline_parts import catalogue
from pipeline_ways import check_ways, draw, expected, joined
from random_chains import MAP_SIZES
from random_pipelines import RandomPipeline

SEEDS = 80


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_all_ways_give_the_same(first: int, process: StepProcess) -> None:
    for seed in range(first, first + 10):
        random = Random(seed)
        case = draw(random)
        try:
            check_ways(case, random, process)
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}\n{case.data}") from error


@pytest.mark.parametrize("first", range(0, SEEDS, 10))
def test_all_forms_are_the_same(first: int) -> None:
    refused = 0
    for seed in range(first, first + 10):
        random = Random(seed)
        data = RandomPipeline(random, catalogue().traits).data
        for one in (data, *(mistaken(random, data) for _ in range(4))):
            try:
                declaration = check_forms(one)
                assert declaration is not None or one is not data
            except AssertionError as error:
                raise AssertionError(f"seed {seed}: {error}\n{one}") from error
            if declaration is None:
                refused += 1
                continue
            reason = check_meaning(declaration)
            assert not reason or one is not data, f"seed {seed}: a valid declaration is refused: {reason}\n{one}"
            refused += bool(reason)
    assert refused > 15


def test_random_pipelines_have_all_kinds_of_steps() -> None:
    text = "".join(str(RandomPipeline(Random(seed), catalogue().traits).data) for seed in range(300))
    used = Counter(name for name in NAMES if f"'step': '{name}'" in text)
    assert len(used) > len(NAMES) * 0.9, f"never: {set(NAMES) - set(used)}"
    for word in ("'map': ", "'python': ", "'model': ", "'when': ", "'optional': ['", "'batch': False"):
        assert text.count(word) > 5, word


def test_most_kinds_of_steps_run_with_success() -> None:
    """Of the seeds that the tests above compare."""
    cases = [draw(Random(seed)) for seed in range(SEEDS)]
    with warnings.catch_warnings(action="ignore"):
        found = [expected(joined(case.function), catalogue().loaded, item) for case in cases for item in case.items]
    ran = sum((one.ran for one in found), Counter[str]())
    never = [name for name in NAMES if not ran[step_class(name).__name__]]
    assert len(never) <= 3, f"never: {never}"
    assert ran["NormalisePlanes"] > 5
    assert not [size for size in MAP_SIZES if not ran[f"map {size}"]], ran
    assert sum(not one.errors for one in found) > len(found) * 0.55
