from __future__ import annotations

import logging
from collections.abc import Iterator

import numpy as np
import pytest

from penstock.online.instances.python.backend_utils import as_module
from penstock.online.instances.python.host import Host, here

pb = as_module("triton_python_backend_utils")
CONFIG = {"input": [{"name": "x"}], "output": [{"name": "y"}], "model_transaction_policy": {"decoupled": True}}


@pytest.fixture
def said() -> Iterator[list[tuple[int, str]]]:
    lines: list[tuple[int, str]] = []

    class Log(Host):
        def say(self, level: int, text: str) -> None:
            lines.append((level, text))

    before, here.host, here.name, here.folder = (here.host, here.name, here.folder), Log(), "m", "/models/m/1"
    yield lines
    here.host, here.name, here.folder = before


def test_the_module_has_what_models_import_and_no_more_than_that() -> None:
    assert pb.__name__ == "triton_python_backend_utils"
    for name in ("Tensor", "InferenceRequest", "InferenceResponse", "TritonError", "MetricFamily", "Logger"):
        assert isinstance(getattr(pb, name), type), name
    assert pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL == 1
    assert not hasattr(pb, "np")
    assert not hasattr(pb, "here")


def test_configurations_are_looked_up_by_name() -> None:
    assert pb.get_input_config_by_name(CONFIG, "x") == {"name": "x"}
    assert pb.get_output_config_by_name(CONFIG, "y") == {"name": "y"}
    assert pb.get_input_config_by_name(CONFIG, "y") is None
    assert pb.get_output_config_by_name({}, "y") is None
    assert pb.using_decoupled_model_transaction_policy(CONFIG)
    assert not pb.using_decoupled_model_transaction_policy({})


def test_tensors_are_looked_up_by_name() -> None:
    response = pb.InferenceResponse([pb.Tensor("y", np.ones(2))])
    assert pb.get_output_tensor_by_name(response, "y").shape() == [2]
    assert pb.get_output_tensor_by_name(response, "z") is None


def test_the_log_names_the_model(said: list[tuple[int, str]]) -> None:
    pb.Logger.log("plain")
    pb.Logger.log_warn("careful")
    pb.Logger.log_error("failed")
    pb.Logger.log_verbose("details")
    levels = [logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG]
    texts = ["plain", "careful", "failed", "details"]
    assert said == [(level, f"model 'm': {text}") for level, text in zip(levels, texts, strict=True)]


def test_the_folder_of_the_version(said: list[tuple[int, str]]) -> None:
    assert pb.get_model_dir() == "/models/m/1"
