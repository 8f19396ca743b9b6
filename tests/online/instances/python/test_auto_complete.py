"""The parts of its configuration that a model may complete, and contradictions to the user's file."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.errors import InvalidModel
from penstock.online.instances.python.auto_complete import completed
from penstock.online.instances.python.options import PythonOptions

X = {"name": "x", "data_type": "TYPE_FP32", "dims": [3]}


def config_of(complete: Any, **options: Any) -> dict[str, Any]:
    """The configuration as a model completes it by ``complete(config)``."""

    class Model:
        @staticmethod
        def auto_complete_config(config: Any) -> Any:
            return complete(config) or config

    return completed(Model, PythonOptions(name="m", **options))


def test_a_model_that_completes_nothing_keeps_what_is_written() -> None:
    found = completed(
        object, PythonOptions(name="m", max_batch=4, config={"input": [X], "default_model_filename": "a"})
    )
    assert found == {
        "name": "m",
        "backend": "python",
        "max_batch_size": 4,
        "input": [X],
        "output": [],
        "default_model_filename": "a",
    }


def test_inputs_outputs_batching_and_decoupling_are_added() -> None:
    def complete(config: Any) -> None:
        config.add_input(X, optional=True)
        config.add_output({**X, "name": "y"})
        config.set_max_batch_size(8)
        config.set_dynamic_batching()
        config.set_model_transaction_policy({"decoupled": True})

    found = config_of(complete)
    assert found["input"] == [{**X, "optional": True}]
    assert [tensor["name"] for tensor in found["output"]] == ["y"]
    assert (found["max_batch_size"], found["dynamic_batching"]) == (8, {})
    assert found["model_transaction_policy"] == {"decoupled": True}


def test_a_batch_size_that_is_written_stays_and_may_not_exceed_the_models() -> None:
    assert config_of(lambda config: config.set_max_batch_size(8), max_batch=4)["max_batch_size"] == 4
    with pytest.raises(ValueError, match="'max_batch_size' is 16, above the model's 8"):
        config_of(lambda config: config.set_max_batch_size(8), max_batch=16)


def test_a_tensor_that_is_written_may_be_repeated_or_filled_in_but_not_changed() -> None:
    assert config_of(lambda config: config.add_input(X), config={"input": [X]})["input"] == [X]
    assert config_of(lambda config: config.add_input(X), config={"input": [{"name": "x"}]})["input"] == [X]
    with pytest.raises(ValueError, match="input 'x' differs from its configuration"):
        config_of(lambda config: config.add_input({**X, "dims": [4]}), config={"input": [X]})


@pytest.mark.parametrize(
    "complete",
    [
        lambda config: config.add_input({**X, "shape": [3]}),
        lambda config: config.set_model_transaction_policy({"coupled": True}),
    ],
)
def test_unknown_keys_are_refused(complete: Any) -> None:
    with pytest.raises(ValueError, match="unknown fields"):
        config_of(complete)


def test_what_is_written_is_not_changed_in_place() -> None:
    written = {"input": [{"name": "x"}]}
    config_of(lambda config: config.add_input(X), config=written)
    assert written == {"input": [{"name": "x"}]}


def test_the_configuration_must_be_returned() -> None:
    with pytest.raises(InvalidModel, match="did not return its argument"):
        config_of(lambda config: "something else")
