"""Runs a ``TritonPythonModel`` as Triton does, from ``initialize`` to ``finalize``, and checks the model's responses."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.engines.base import Answer
from penstock.errors import InvalidModel, PenstockError
from penstock.online.instances.python.auto_complete import completed
from penstock.online.instances.python.messages import InferenceRequest, InferenceResponse, ResponseSender
from penstock.online.instances.python.module import log, reason
from penstock.online.instances.python.options import PythonOptions, joined, specs_of
from penstock.online.instances.python.tensors import check_rows, check_type, rows_of
from penstock.request import InferRequest
from penstock.tensor import Array, Signature

_Sent = dict[int, InferenceResponse]
"""Responses that a model sent through a response sender instead of returning them, by number of the request."""


class TritonModel:
    """A Triton Python model in memory, a ``RequestModel``."""

    reentrant = False

    def __init__(self, model: Any, options: PythonOptions, config: dict[str, Any], signature: Signature) -> None:
        self._model = model
        self._name = options.instance or options.name
        self.signature = signature
        self.max_batch = int(config["max_batch_size"])
        self.decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._outputs = signature.output_names
        self._row_wise = self.max_batch > 0 and not self.decoupled and not _changes_rows(config)
        """True if the outputs must have one row for each row of the inputs."""
        self._loop: asyncio.Runner | None = None

    @classmethod
    def load(cls, kind: type, options: PythonOptions, folder: Path) -> TritonModel:
        """Complete the configuration and initialise the model. Raises InvalidModel, and the model's exceptions."""
        if not callable(getattr(kind, "execute", None)):
            raise InvalidModel("TritonPythonModel has no function 'execute'", "add 'def execute(self, requests)'")
        config = completed(kind, options)
        batched = config["max_batch_size"] > 0
        try:
            signature = Signature(specs_of(config["input"], batched), specs_of(config["output"], batched))
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidModel(f"the configuration of the model's tensors is invalid: {error}") from None
        signature = joined(options, signature)
        if not signature.inputs or not signature.outputs:
            raise InvalidModel(
                "the model's inputs and outputs are unknown",
                "write 'input' and 'output' in config.pbtxt, or add auto_complete_config",
            )
        model = kind()
        if callable(getattr(model, "initialize", None)):
            model.initialize(
                {
                    "model_config": json.dumps(config),
                    "model_instance_kind": "CPU",
                    "model_instance_device_id": "0",
                    "model_instance_name": options.instance or options.name,
                    "model_repository": str(folder.parent),
                    "model_version": options.version,
                    "model_name": options.name,
                }
            )
        return cls(model, options, config, signature)

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        sent: _Sent = {}
        asked = [
            InferenceRequest.of(request, self._outputs, self._sender(number, answer, sent))
            for number, request in enumerate(requests)
        ]
        try:
            responses = self._model.execute(asked)
            if inspect.isawaitable(responses):
                self._loop = self._loop or asyncio.Runner()
                responses = self._loop.run(_finish(responses))
        except BaseException as error:  # SystemExit and CancelledError too: the model raised them
            log(error)
            raise self._end(asked, reason(error)) from None
        if not self.decoupled:
            self._answer(responses, asked, sent, answer)
        elif responses is not None:
            why = "a decoupled model's 'execute' must return None, and answer through response senders"
            raise self._end(asked, why)

    def unload(self) -> None:
        model, self._model = self._model, None
        if self._loop is not None:
            self._loop.close()
        if callable(getattr(model, "finalize", None)):
            try:
                model.finalize()
            except BaseException as error:
                log(error)

    def _sender(self, number: int, answer: Answer, sent: _Sent) -> ResponseSender:
        def stream(response: InferenceResponse | None, final: bool) -> bool:
            return answer(number, None if response is None else self._checked(response), final)

        def keep(response: InferenceResponse | None, final: bool) -> bool:
            if response is None:
                return final or answer(number, None, False)
            return sent.setdefault(number, response) is response

        if not self.decoupled:
            return ResponseSender(keep, lambda: None)
        lost = self._failed("the model dropped its response sender before the final flag")
        return ResponseSender(stream, lambda: answer(number, lost, True))

    def _answer(self, responses: Any, asked: Sequence[InferenceRequest], sent: _Sent, answer: Answer) -> None:
        if responses is None and len(sent) == len(asked):
            responses = [None] * len(asked)
        if not isinstance(responses, list | tuple):
            raise self._failed(f"expected a list in the execute return, found type '{type(responses).__name__}'")
        if len(responses) != len(asked):
            raise self._failed(
                "Number of InferenceResponse objects do not match number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(asked)}, and InferenceResponse(s) size is:{len(responses)}"
            )
        for number, returned in enumerate(responses):
            response = sent.get(number) if returned is None else returned
            if isinstance(response, InferenceResponse):
                answer(number, self._checked(response, asked[number]), True)
            else:
                found = type(response).__name__
                wanted = "Expected an 'InferenceResponse' object in the execute function return list"
                answer(number, self._failed(f"{wanted}, found type '{found}'"), True)

    def _checked(
        self, response: InferenceResponse, asked: InferenceRequest | None = None
    ) -> dict[str, Array] | PenstockError:
        """The outputs of ``response``. Returns an error if an output's name is not configured, or its number of rows differs from
        the request's.

        The model may choose datatypes and other dimensions freely.
        """
        outcome = response.outcome()
        if isinstance(outcome, PenstockError):
            return outcome
        rows = rows_of({one.name(): one.as_numpy() for one in asked.inputs()}) if asked and self._row_wise else None
        try:
            for name, array in outcome.items():
                if name not in self._outputs:
                    return PenstockError(f"the model returned the output '{name}', which is not in its configuration")
                check_type(name, array)
                check_rows(name, array, rows)
        except PenstockError as error:
            return error
        requested = asked.requested_output_names() if asked else ()
        missing = [name for name in requested if name not in outcome]
        return PenstockError(f"the model did not return the output '{missing[0]}'") if missing else outcome

    def _end(self, asked: Sequence[InferenceRequest], why: str) -> PenstockError:
        """Close the response senders of the requests ``asked``. Returns the error with which these requests end."""
        for request in asked:
            request.get_response_sender().closed = True
        return self._failed(why)

    def _failed(self, why: str) -> PenstockError:
        return PenstockError(f"Failed to process the request(s) for model instance '{self._name}', message: {why}")


def _changes_rows(config: Mapping[str, Any]) -> bool:
    """True if the first dimension of the model's inputs may differ from the request's."""
    ragged = any(tensor.get("allow_ragged_batch") for tensor in config["input"])
    return ragged or bool(config.get("batch_input") or config.get("batch_output"))


async def _finish(responses: Any) -> Any:
    return await responses
