"""A ``TritonPythonModel``: initialised, executed and finalised as Triton does it, its answers checked."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Mapping, Sequence
from functools import partial
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

_LOST = "the model dropped its response sender before the final flag"


class TritonModel:
    """The ``RequestModel``."""

    reentrant = False

    def __init__(self, model: Any, options: PythonOptions, config: dict[str, Any], signature: Signature) -> None:
        self._model = model
        self._name = options.instance or options.name
        self.signature = signature
        self.max_batch = int(config["max_batch_size"])
        self.decoupled = bool(config.get("model_transaction_policy", {}).get("decoupled"))
        self._outputs = {spec.name: spec for spec in signature.outputs}
        self._batches = self.max_batch > 0 and not self.decoupled and not _reforms(config)
        """Whether it answers row for row."""
        self._loop: asyncio.Runner | None = None

    @classmethod
    def load(cls, kind: type, options: PythonOptions, folder: Path) -> TritonModel:
        """Complete the configuration of ``kind``, the user's class, and initialise it. Raises InvalidModel, and what it raises."""
        if not callable(getattr(kind, "execute", None)):
            raise InvalidModel("TritonPythonModel has no function 'execute'", "add 'def execute(self, requests)'")
        config = completed(kind, options)
        batched = config["max_batch_size"] > 0
        try:
            signature = Signature(specs_of(config["input"], batched), specs_of(config["output"], batched))
        except (KeyError, ValueError, TypeError) as error:
            raise InvalidModel(f"the configuration of the model's tensors is wrong: {error}") from None
        signature = joined(options, signature)
        if not signature.inputs or not signature.outputs:
            raise InvalidModel(
                "it is not known what the model takes and gives",
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
        sent: dict[int, InferenceResponse] = {}
        asked = []
        for number, request in enumerate(requests):
            send = partial(self._stream, answer) if self.decoupled else partial(self._keep, sent, answer)
            lost = partial(answer, number, self._failed(_LOST), True) if self.decoupled else _nothing
            sender = ResponseSender(partial(send, number), lost)
            asked.append(InferenceRequest.of(request, list(self._outputs), sender))
        try:
            responses = self._model.execute(asked)
            if inspect.isawaitable(responses):
                self._loop = self._loop or asyncio.Runner()
                responses = self._loop.run(_finish(responses))
        except BaseException as error:  # an exit, a cancelled task: whatever it is, it is the model's
            log(error)
            raise self._end(asked, reason(error)) from None
        if self.decoupled:
            if responses is not None:
                raise self._end(
                    asked, "a decoupled model's 'execute' must return None, and answer through response senders"
                )
        else:
            self._answer(responses, asked, sent, answer)

    def unload(self) -> None:
        model, self._model = self._model, None
        if self._loop is not None:
            self._loop.close()
        if callable(getattr(model, "finalize", None)):
            try:
                model.finalize()
            except BaseException as error:
                log(error)

    def _stream(self, answer: Answer, number: int, response: InferenceResponse | None, final: bool) -> bool:
        return answer(number, None if response is None else self._checked(response), final)

    def _keep(
        self,
        sent: dict[int, InferenceResponse],
        answer: Answer,
        number: int,
        response: InferenceResponse | None,
        final: bool,
    ) -> bool:
        """What a model that is not decoupled sends: its one answer."""
        if response is None:
            return final or answer(number, None, False)
        return sent.setdefault(number, response) is response

    def _answer(
        self,
        responses: Any,
        asked: Sequence[InferenceRequest],
        sent: dict[int, InferenceResponse],
        answer: Answer,
    ) -> None:
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
        """Its outputs, or what is wrong: they must have the configuration's names, and the rows of the one request that was ``asked``;
        types and other dimensions are the model's own affair."""
        outcome = response.outcome()
        if isinstance(outcome, PenstockError):
            return outcome
        rows = rows_of({one.name(): one.as_numpy() for one in asked.inputs()}) if asked and self._batches else None
        try:
            for name, array in outcome.items():
                if name not in self._outputs:
                    return PenstockError(f"the model gave the output '{name}', which its configuration does not have")
                check_type(name, array)
                check_rows(name, array, rows)
        except PenstockError as error:
            return error
        requested = asked.requested_output_names() if asked else ()
        missing = [name for name in requested if name not in outcome]
        return PenstockError(f"the model gave no output '{missing[0]}'") if missing else outcome

    def _end(self, asked: Sequence[InferenceRequest], why: str) -> PenstockError:
        """What befalls those of ``asked`` that have not ended."""
        for request in asked:
            request.get_response_sender().closed = True
        return self._failed(why)

    def _failed(self, why: str) -> PenstockError:
        return PenstockError(f"Failed to process the request(s) for model instance '{self._name}', message: {why}")


def _reforms(config: Mapping[str, Any]) -> bool:
    """Whether the first dimension of what the model is given need not be that of the request."""
    ragged = any(tensor.get("allow_ragged_batch") for tensor in config["input"])
    return ragged or bool(config.get("batch_input") or config.get("batch_output"))


def _nothing() -> None:
    """Who is not decoupled answers by what ``execute`` returns."""


async def _finish(responses: Any) -> Any:
    return await responses
