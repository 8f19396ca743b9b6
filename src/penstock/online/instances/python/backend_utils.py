"""The module ``triton_python_backend_utils``, which models written for Triton's Python backend import."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import ModuleType
from typing import Any

from penstock.online.instances.python import auto_complete, messages, metrics, tensors
from penstock.online.instances.python.host import here
from penstock.online.instances.python.messages import InferenceRequest, InferenceResponse
from penstock.online.instances.python.tensors import TritonTensor


class Logger:
    """Writes into the server's log."""

    VERBOSE, INFO, WARNING, ERROR = logging.DEBUG, logging.INFO, logging.WARNING, logging.ERROR

    @staticmethod
    def log(message: str, level: int = logging.INFO) -> None:
        here.host.say(level, f"model '{here.name}': {message}")

    @staticmethod
    def log_info(message: str) -> None:
        Logger.log(message, Logger.INFO)

    @staticmethod
    def log_warn(message: str) -> None:
        Logger.log(message, Logger.WARNING)

    @staticmethod
    def log_error(message: str) -> None:
        Logger.log(message, Logger.ERROR)

    @staticmethod
    def log_verbose(message: str) -> None:
        Logger.log(message, Logger.VERBOSE)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> TritonTensor | None:
    return next((tensor for tensor in inference_request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> TritonTensor | None:
    return next((tensor for tensor in inference_response.output_tensors() if tensor.name() == name), None)


def get_input_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("input", ()) if tensor["name"] == name), None)


def get_output_config_by_name(model_config: Mapping[str, Any], name: str) -> dict[str, Any] | None:
    return next((tensor for tensor in model_config.get("output", ()) if tensor["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: Mapping[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def get_model_dir() -> str:
    """The folder of the model's version."""
    return here.folder


def as_module(name: str) -> ModuleType:
    """A module called ``name`` that contains the whole interface."""
    module = ModuleType(name, __doc__)
    for part in (vars(tensors), vars(messages), vars(metrics), vars(auto_complete), globals()):
        own = part["__name__"]
        vars(module).update(
            {key: one for key, one in part.items() if key.isupper() or getattr(one, "__module__", "") == own}
        )
    return module
