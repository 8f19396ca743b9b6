"""The defaults of a step."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.pipeline.steps.base import Step, StepResources, wrong_type
from penstock.pipeline.value import TEXT, Value, ValueType


class Add(Step, frozen=True, kw_only=True):
    """Add a number."""

    number: int = 1

    def check(self, inputs: Mapping[str, ValueType]) -> dict[str, ValueType]:
        return dict(inputs)

    def run(self, inputs: Mapping[str, Value]) -> dict[str, Value]:
        return {"value": inputs["value"] + self.number}


def test_many_items_run_one_by_one() -> None:
    assert Add(number=2).run_many([{"value": 1}, {"value": 5}]) == [{"value": 3}, {"value": 7}]
    assert Add().run_many([]) == []


def test_a_step_without_files_stays_the_same() -> None:
    step = Add()
    assert step.bound(StepResources()) is step


def test_the_error_names_step_input_and_type() -> None:
    assert (
        wrong_type("add", "value", "a number", TEXT).message == "step 'add' needs a number as 'value', but it is text"
    )
