"""The child process of a ``PythonProcess``. The main thread executes a ``model.py``. Another thread reads the parent's messages."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import msgspec

from penstock.artifact import Artifact
from penstock.engines.base import RequestModel
from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.online.instances import process_channel as wire
from penstock.online.instances.process_channel import Channel, Failed
from penstock.online.instances.process_worker import serve
from penstock.online.instances.python.engine import PythonEngine
from penstock.online.instances.python.host import Host
from penstock.online.instances.tensor_arena import TensorArena, TensorSlot
from penstock.request import Done, InferRequest, InferResponse
from penstock.tensor import Array

_Outcome = dict[str, Array] | PenstockError | None


class Worker(Host):
    """Runs one model, and gives it access to the server through the parent."""

    def __init__(self, channel: Channel, arenas: Sequence[TensorArena]) -> None:
        self._channel = channel
        self._inputs, self._outputs, self._to_parent, self._from_parent = arenas
        self._engine = PythonEngine(self)
        self._sending = threading.Lock()
        self._using = threading.Lock()
        """Held while the arena for tensors to the parent is in use: from writing the tensors until the parent has copied them."""
        self._taken: SimpleQueue[bool] = SimpleQueue()
        self._tasks: SimpleQueue[wire.Execute | None] = SimpleQueue()
        self._calls: dict[int, Done] = {}
        self._last_call = 0
        self._can_call = False
        """False while the model is being loaded, and after the parent has closed the connection."""
        self._chores: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def run(self, load: wire.Load, read_artifact: Callable[[], Artifact]) -> None:
        """Load the model and execute it until the parent closes the connection."""
        try:
            model = self._engine.load(read_artifact(), load.options)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            self._send(Failed.of(error))
            return
        self._send(wire.Loaded(model.signature, decoupled=model.decoupled, max_batch=model.max_batch))
        self._can_call = True
        for name, run in (("read-parent", self._read), ("do-chores", self._do_chores)):
            threading.Thread(target=run, name=name, daemon=True).start()
        while (task := self._tasks.get()) is not None and self._try_to_send(self._execute(model, task)):
            pass
        model.unload()

    def call(self, request: InferRequest, done: Done, decoupled: bool) -> Callable[[], None]:
        try:
            # A value that cannot be encoded is an error of the model, and must not end this process.
            sendable = msgspec.convert(msgspec.to_builtins(wire.without_inputs(request)), InferRequest)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the request to model '{request.model_name}' is invalid: {error}") from None
        with self._using:
            self._last_call = number = self._last_call + 1
            inputs = self._to_parent.write(request.inputs)
            self._calls[number] = done
            if not self._send_tensors(wire.Asked(number, sendable, inputs, decoupled)):
                self._end_call(number, Unavailable("a model cannot call other models while it is loaded or unloaded"))
        return lambda: self._drop(number)

    def say(self, level: int, text: str) -> None:
        if not self._try_to_send(wire.Said(level, text)):
            logging.getLogger(__name__).log(level, "%s", text)

    def measure(self, change: wire.MetricChanged) -> None:
        self._try_to_send(change)

    def later(self, call: Callable[[], object]) -> None:
        self._chores.put(call)

    def _do_chores(self) -> None:
        while True:
            self._chores.get()()

    def _execute(self, model: RequestModel, task: wire.Execute) -> wire.Executed:
        stages = self._engine.stages
        outcomes: list[_Outcome] = [None] * len(task.requests)

        def answer(number: int, outcome: _Outcome, final: bool) -> bool:
            if model.decoupled or outcome is None:
                return self._answer(task.first + number, outcome, final)
            outcomes[number] = outcome
            return True

        try:
            with stages.stage("transfer_in"):
                for request, slots in zip(task.requests, task.inputs, strict=True):
                    request.inputs = self._view(slots, model.decoupled)
            with stages.stage("execute"):
                model.execute(task.requests, answer)
        except Exception as error:  # noqa: BLE001 - a model's bug must fail its batch, not end the process
            failure = Failed.of(error).error()
            outcomes = [failure if one is None else one for one in outcomes]
        with stages.stage("transfer_out"):
            written = self._written(outcomes)
        return wire.Executed(written, stages.take())

    def _view(self, slots: Sequence[TensorSlot], copies: bool) -> dict[str, Array]:
        """The inputs of a request. ``copies`` is true for decoupled models, which may still read inputs when the arena is reused."""
        inputs = self._inputs.copy(slots) if copies else self._inputs.view(slots)
        for array in inputs.values():
            array.flags.writeable = True  # Triton models may write to their inputs
        return inputs

    def _written(self, outcomes: Sequence[_Outcome]) -> list[wire.OutcomeSlots]:
        try:
            sets = self._outputs.write_all([one if isinstance(one, Mapping) else {} for one in outcomes])
        except Exception as error:  # noqa: BLE001 - as above
            return [Failed.of(error)] * len(outcomes)
        return [
            Failed.of(one) if isinstance(one, PenstockError) else None if one is None else slots
            for one, slots in zip(outcomes, sets, strict=True)
        ]

    def _answer(self, number: int, outcome: _Outcome, final: bool) -> bool:
        with self._using:
            written = wire.write_outcome(outcome, self._to_parent)
            return self._send_tensors(wire.Answered(number, written, final, self._engine.stages.take()))

    def _send_tensors(self, message: wire.Asked | wire.Answered) -> bool:
        """Send ``message`` and wait until the parent has copied its tensors."""
        return self._can_call and self._try_to_send(message) and self._taken.get()

    def _send(self, message: wire.Message) -> None:
        with self._sending:
            self._channel.send(message)

    def _try_to_send(self, message: wire.Message) -> bool:
        try:
            self._send(message)
        except OSError:
            return False
        return True

    def _read(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if isinstance(message, wire.Execute):
                    self._tasks.put(message)
                elif isinstance(message, wire.Taken):
                    self._taken.put(message.wanted)
                elif isinstance(message, wire.Replied):
                    self._take(message)
        except (EOFError, OSError):
            pass
        self._can_call = False
        self._tasks.put(None)
        self._taken.put(False)
        for number in list(self._calls):
            self._end_call(number, Unavailable("the server is shutting down"))

    def _take(self, message: wire.Replied) -> None:
        outcome = wire.read_outcome(message.outcome, self._from_parent)
        self._send(wire.Taken())
        if isinstance(outcome, PenstockError):
            self._end_call(message.number, outcome)
        elif (done := self._calls.get(message.number)) is not None:
            if message.final:
                del self._calls[message.number]
            name, version = message.model
            done(InferResponse(name, version, outcome or {}, final=message.final))

    def _end_call(self, number: int, error: PenstockError) -> None:
        if (done := self._calls.pop(number, None)) is not None:
            done(error)

    def _drop(self, number: int) -> None:
        if self._calls.pop(number, None) is not None:
            self._try_to_send(wire.Dropped(number))


if __name__ == "__main__":
    serve(sys.argv[1:], lambda channel, load, read, arenas: Worker(channel, arenas).run(load, read))
