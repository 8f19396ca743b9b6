"""Steps become stages, or calls of models that run elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from penstock.errors import PenstockError
from penstock.pipeline.executor import Told, Work
from penstock.pipeline.steps.scores.ranking import TopK
from penstock.pipeline.streaming.binding import Remote, bind, run_step
from penstock.pipeline.streaming.models import LocalModel
from penstock.tensor import Array
from pipelines import FEATURES, LOCAL, WEIGHT, function


class Elsewhere:
    """A model that runs elsewhere."""

    def start(self, item: int, inputs: dict[str, Array], done: Callable[[Told], None]) -> Work | None:
        raise NotImplementedError


def test_a_local_model_is_a_stage_that_waits_for_full_batches() -> None:
    bound = bind(function(), LOCAL)
    (model,) = [spec for spec in bound.stages.values() if spec.waits]
    assert (model.max_batch, model.limit) == (8, 1)
    (told,) = model.run([{"x": FEATURES}])
    assert isinstance(told, Mapping)
    np.testing.assert_array_equal(told["y"], FEATURES @ WEIGHT)


def test_a_model_that_merges_no_rows_waits_for_none() -> None:
    alone = {"linear": LocalModel(LOCAL["linear"].forward, max_batch=1, calls=3)}
    specs = bind(function(), alone).stages.values()
    assert not any(spec.waits for spec in specs)
    assert [spec.limit for spec in specs if spec.limit] == [3]


def test_a_batch_that_was_measured_is_not_learnt_again() -> None:
    for is_tuned, size in ((True, None), (False, 1)):
        tuned = {"linear": LocalModel(LOCAL["linear"].forward, max_batch=8, is_tuned=is_tuned)}
        (model,) = [spec for spec in bind(function(), tuned).stages.values() if spec.waits]
        assert (model.max_batch, model.size and model.size()) == (8, size)


def test_a_model_elsewhere_has_no_stage() -> None:
    here, there = bind(function(), LOCAL), bind(function(), {"linear": Elsewhere()})
    assert len(there.stages) == len(here.stages) - 1
    assert [part.path for part in there.scope.parts.values() if isinstance(part, Remote)]


def test_only_what_an_output_needs_is_bound() -> None:
    assert len(bind(function(), LOCAL, ["p"]).stages) == len(bind(function(), LOCAL).stages) - 1


def test_one_wrong_item_does_not_fail_the_others() -> None:
    items = [{"value": np.array(scores, np.float32)} for scores in ([1, 2], [1, np.nan], [4, 3])]
    first, wrong, last = run_step(TopK(k=1), items)
    assert not isinstance(first, PenstockError)
    assert not isinstance(last, PenstockError)
    assert (first["indices"].tolist(), last["indices"].tolist()) == ([1], [0])
    assert isinstance(wrong, PenstockError)
