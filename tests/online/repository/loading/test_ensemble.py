"""Configurations of ensembles, compared with their models."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import pytest

from ensembles import Bench, chain, ensemble, parameter, step, tensor
from penstock.errors import InvalidConfig, PenstockError, Unavailable
from penstock.online.repository.handle import Handle
from penstock.online.scheduler.ensemble import EnsembleScheduler
from penstock.tensor import DataType, Signature, TensorSpec
from penstock.testing import FakeModel, FakeStreamingModel


def assembled(config: str, prepare: Callable[[Bench], object] = lambda bench: None, name: str = "e") -> Any:
    """The handle of an ensemble, or the error, beside models m (batch 8), ints (INT32 in, FP32 out) and what ``prepare`` adds."""
    ints = Signature((TensorSpec("x", DataType.INT32, (-1, 2)),), (TensorSpec("y", DataType.FP32, (-1, 2)),))

    async def assemble() -> Handle | PenstockError:
        async with Bench() as bench:
            bench.model("m", FakeModel())
            bench.model("ints", FakeModel(ints))
            prepare(bench)
            try:
                return bench.ensemble(config, name)
            except PenstockError as error:
                return error

    return asyncio.run(assemble())


def plan_of(handle: Any) -> EnsembleScheduler:
    assert isinstance(handle, Handle), handle
    assert isinstance(handle.scheduler, EnsembleScheduler)
    return handle.scheduler


def test_an_ensemble_as_clients_see_it() -> None:
    handle = assembled(ensemble(*chain("m", "m")))
    assert (handle.platform, handle.config.backend, handle.config.max_batch_size) == ("ensemble", "", 4)
    assert handle.signature == Signature(
        (TensorSpec("X", DataType.FP32, (-1, 2)),), (TensorSpec("Y", DataType.FP32, (-1, 2)),)
    )
    assert handle.scheduler.config.batchable
    assert not handle.config.parameters, "what is looked for is not added"


def test_steps_are_called_after_their_models() -> None:
    assert [one.name for one in plan_of(assembled(ensemble(*chain("m", "m")))).ensemble.graph.steps] == ["m[0]", "m[1]"]
    assert list(plan_of(assembled(ensemble(*chain("m")))).ensemble.models.items()) == [("m", ("m", ""))]


def test_a_namespace_is_a_part_of_the_name() -> None:
    config = ensemble(step("m", {"x": "X"}, {"y": "Y"}).replace("model_name", 'model_namespace: "site" model_name'))
    handle = assembled(config, lambda bench: bench.model("site/m", FakeModel()))
    assert plan_of(handle).ensemble.models == {"m": ("site/m", "")}


def test_an_input_that_the_parts_can_do_without_may_be_left_out() -> None:
    settings = {"input": [{"name": "x", "optional": True}]}
    config = ensemble(*chain("easy"), tensors=tensor("input", "X", more="optional: true") + tensor("output", "Y"))
    handle = assembled(config, lambda bench: bench.model("easy", FakeModel(), settings=settings))
    assert plan_of(handle).ensemble.graph.steps[0].optional == {"x"}


@pytest.mark.parametrize("inside", [False, True])
def test_answers_of_sequences_are_not_kept(inside: bool) -> None:
    def prepare(bench: Bench) -> None:
        bench.model("remembers", FakeModel(), settings={"sequence_batching": {"oldest": {}}})
        bench.ensemble(ensemble(*chain("remembers")), "inner")

    part = step("inner", {"X": "X"}, {"Y": "Y"}) if inside else chain("remembers")[0]
    error = assembled(ensemble(part, more="response_cache { enable: true }"), prepare)
    assert isinstance(error, InvalidConfig)
    assert "it contains model 'remembers', whose responses within sequences cannot be cached" in error.message


TWO = tensor("input", "X") + tensor("input", "FLAG", "BOOL", "1") + tensor("output", "Y")
EITHER = [step("m", {"x": "X"}, {"y": "Y"}), step("m", {"x": "X"}, {"y": "Y"})]


@pytest.mark.parametrize(
    ("config", "message"),
    [
        pytest.param(
            ensemble(*chain("m", "n", "o")),
            "ensemble 'e': it needs models that are not served: 'n', 'o' (load them first)",
            id="models",
        ),
        pytest.param(
            ensemble(step("m", {"x": "X"}, {"y": "Y"}, 9)), "models that are not served: 'm' version 9", id="version"
        ),
        pytest.param(
            ensemble(step("m", {"x": "X"}, {"y": "t"}), step("ints", {"x": "t"}, {"y": "Y"})),
            "ensemble 'e': tensor 't' is FP32 [-1, 2] as output 'y' of step 'm', but INT32 [-1, 2] as input 'x' of step 'ints'",
            id="datatype",
        ),
        pytest.param(
            ensemble(*chain("m"), tensors=tensor("input", "X", dims="3") + tensor("output", "Y")),
            "tensor 'X' is FP32 [-1, 3] as an input, but FP32 [-1, 2] as input 'x' of step 'm'",
            id="dims",
        ),
        pytest.param(
            ensemble(*chain("m"), batch=9),
            "it allows maximum batch size 9, but it contains model 'm' which only allows maximum batch size to be 8",
            id="batch",
        ),
        pytest.param(ensemble(step("m", {"z": "X"}, {"y": "Y"})), "input 'x' of step 'm' has no tensor", id="input"),
        pytest.param(ensemble(step("m", {"x": "X"}, {"z": "Y"})), "step 'm' has no output 'z'", id="output"),
        pytest.param(
            ensemble(*chain("m"), more="instance_group { count: 2 }"),
            "'instance_group' should not be specified for an ensemble",
            id="instances",
        ),
        pytest.param(
            ensemble(*EITHER, tensors=TWO), "tensor 'Y' is produced by step 'm[0]' and by step 'm[1]'", id="twice"
        ),
        pytest.param(
            ensemble(*EITHER, tensors=TWO, more=parameter("if.m", "FLAG")),
            "parameter 'if.m' does not name one step (name each step once, by its number)",
            id="which step",
        ),
        pytest.param(
            ensemble(*chain("m"), tensors=TWO, more=parameter("if.n", "FLAG")), "parameter 'if.n'", id="no step"
        ),
        pytest.param(
            ensemble(*chain("m"), tensors=TWO, more=parameter("if.m", "FLAG") + parameter("if.0", "FLAG")),
            "parameter 'if.m'",
            id="second condition",
        ),
        pytest.param(
            ensemble(*chain("m"), tensors=TWO, more=parameter("if.m", "FLAG >")),
            "'FLAG >' cannot be read",
            id="condition",
        ),
        pytest.param(
            ensemble(*chain("m"), more=parameter("if.m", "X")),
            "'X != 0' of step 'm' needs one number",
            id="many numbers",
        ),
        pytest.param(
            ensemble(*chain("m"), more=parameter("optional_outputs", "Y, Z")),
            "the optional output 'Z' is not an output of the graph",
            id="optional",
        ),
    ],
)
def test_a_configuration_that_does_not_fit_its_parts_is_refused(config: str, message: str) -> None:
    error = assembled(config)
    assert isinstance(error, Unavailable if "not served" in message else InvalidConfig)
    assert message in str(error)


def test_a_decoupled_part_is_refused() -> None:
    error = assembled(ensemble(*chain("many")), lambda bench: bench.model("many", FakeStreamingModel()))
    assert "the model of step 'many' is decoupled" in str(error)


INSIDE = ensemble(step("inner", {"X": "X"}, {"Y": "Y"}))


def test_an_ensemble_cannot_be_a_part_of_itself() -> None:
    def prepare(bench: Bench) -> None:
        bench.ensemble(ensemble(*chain("m")), "inner")
        bench.ensemble(INSIDE, "outer")

    error = assembled(ensemble(step("outer", {"X": "X"}, {"Y": "Y"})), prepare, "inner")
    assert str(error) == "ensemble 'inner': step 'outer' contains the ensemble itself"


def test_ensembles_are_not_nested_without_end() -> None:
    def prepare(bench: Bench) -> None:
        bench.ensemble(ensemble(*chain("m")), "e0")
        for number in range(16):
            bench.ensemble(ensemble(step(f"e{number}", {"X": "X"}, {"Y": "Y"})), f"e{number + 1}")

    error = assembled(ensemble(step("e16", {"X": "X"}, {"Y": "Y"})), prepare)
    assert "contains more than 16 ensembles" in str(error)


def test_a_part_of_a_part_that_is_not_served() -> None:
    def prepare(bench: Bench) -> None:
        bench.model("n", FakeModel())
        bench.ensemble(ensemble(*chain("n")), "inner")
        bench.served.remove("n", "1")

    error = assembled(INSIDE, prepare)
    assert isinstance(error, Unavailable)
    assert str(error).startswith("ensemble 'e': Request for unknown model: 'n' is not found")


def test_labels_are_those_of_the_parts() -> None:
    def prepare(bench: Bench) -> None:
        bench.model("named", FakeModel()).labels = {"y": ["cat", "dog"]}

    assert assembled(ensemble(*chain("m", "named")), prepare).labels["Y"] == ["cat", "dog"]


def test_what_is_not_used_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assembled(ensemble(*chain("m"), tensors=TWO))
    assert "ensemble 'e': tensor 'FLAG' is not used" in caplog.text


def test_what_cannot_be_cached_is_refused() -> None:
    error = assembled(ensemble(*chain("m"), more="response_cache { enable: true }"))
    assert "'response_cache', but the server has no cache" in str(error)
