"""The child of a ``PythonProcess``: loads a ``model.py``, executes on its main thread, and talks with the parent on another."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

import msgspec

from penstock.engines.base import Answer, LoadedModel, RequestModel
from penstock.errors import InvalidArgument, PenstockError, Unavailable
from penstock.online.instances import process_channel as wire
from penstock.online.instances.process_channel import Channel, Failed
from penstock.online.instances.process_worker import begin, failure, read_artifact
from penstock.online.instances.python.engine import PythonEngine
from penstock.online.instances.python.host import Host, Metered
from penstock.online.instances.tensor_arena import TensorArena, TensorSlot
from penstock.online.scheduler.batch import merge, split
from penstock.request import Done, InferRequest, InferResponse
from penstock.tensor import Array


class Merged:
    """A ``LoadedModel`` as a ``RequestModel``: requests run as one batch, and each alone if that fails, so that what is wrong with one
    client's values is told to that client only."""

    reentrant = False
    decoupled = False

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.signature = model.signature
        self.max_batch = None if model.signature.batchable else 0
        self.unload = model.unload

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        try:
            outputs = self._model.forward(merge([request.inputs for request in requests]))
            parts = [outputs]
            if len(requests) > 1:
                parts = split(outputs, [len(next(iter(request.inputs.values()))) for request in requests])
        except PenstockError:
            if len(requests) == 1:
                raise
            for number, request in enumerate(requests):
                try:
                    answer(number, self._model.forward(request.inputs), True)
                except PenstockError as error:
                    answer(number, error, True)
        else:
            for number, part in enumerate(parts):
                answer(number, part, True)


class Worker(Host):
    """Of a model that others are served beside."""

    def __init__(self, channel: Channel, arenas: Sequence[TensorArena]) -> None:
        self._channel = channel
        self._inputs, self._outputs, self._to_parent, self._from_parent = arenas
        self._sending = threading.Lock()
        self._using = threading.Lock()
        """Held while the arena to the parent is written and read."""
        self._taken: SimpleQueue[bool] = SimpleQueue()
        self._tasks: SimpleQueue[wire.Execute | None] = SimpleQueue()
        self._open: dict[int, Done] = {}
        self._asked = 0
        self._ended = True
        """Or not begun: others cannot be asked."""
        self._chores: SimpleQueue[Callable[[], object]] = SimpleQueue()

    def load(self, load: wire.Load, model_file: int) -> RequestModel | None:
        """Load the model and tell the parent; None if it cannot be loaded."""
        self._engine = PythonEngine(self)
        try:
            loaded = self._engine.load(read_artifact(load, model_file), load.options)
        except Exception as error:  # noqa: BLE001 - the parent raises it
            self._send(failure(error))
            return None
        model = loaded if isinstance(loaded, RequestModel) else Merged(loaded)
        self._send(wire.Loaded(model.signature, (), model.decoupled, model.max_batch))
        return model

    def serve(self, model: RequestModel) -> None:
        """Until the parent hangs up."""
        self._ended = False
        for name, run in (("read-parent", self._read), ("do-chores", self._do_chores)):
            threading.Thread(target=run, name=name, daemon=True).start()
        while (task := self._tasks.get()) is not None:
            try:
                self._send(self._execute(model, task))
            except OSError:
                break
        model.unload()

    def call(self, request: InferRequest, done: Done, decoupled: bool) -> Callable[[], None]:
        try:
            # What the parent would refuse is the model's mistake, and no reason to end its process.
            told = msgspec.convert(msgspec.to_builtins(wire.without_inputs(request)), InferRequest)
        except (TypeError, ValueError) as error:
            raise InvalidArgument(f"the request to model '{request.model_name}' is wrong: {error}") from None
        with self._using:
            self._asked = number = self._asked + 1
            inputs = self._to_parent.write(request.inputs)
            self._open[number] = done
            if not self._pass_on(wire.Asked(number, told, inputs, decoupled)):
                self._end_call(number, Unavailable("no model can be asked while this one is loaded or unloaded"))
        return lambda: self._drop(number)

    def say(self, level: int, text: str) -> None:
        try:
            self._send(wire.Said(level, text))
        except OSError:
            logging.getLogger(__name__).log(level, "%s", text)

    def measure(self, metric: Metered, value: float, replaces: bool) -> None:
        self._try_to_send(wire.MetricChanged(metric.name, metric.kind, metric.help, metric.labels, value, replaces))

    def later(self, call: Callable[[], object]) -> None:
        self._chores.put(call)

    def _do_chores(self) -> None:
        while True:
            self._chores.get()()

    def _execute(self, model: RequestModel, task: wire.Execute) -> wire.Executed:
        stages = self._engine.stages
        outcomes: list[dict[str, Array] | PenstockError | None] = [None] * len(task.requests)

        def answer(number: int, outcome: dict[str, Array] | PenstockError | None, final: bool) -> bool:
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
        except Exception as error:  # noqa: BLE001 - a model's bug costs its batch, not the process
            reason = failure(error).error()
            outcomes = [reason if one is None else one for one in outcomes]
        with stages.stage("transfer_out"):
            told = self._told(outcomes)
        return wire.Executed(told, stages.take())

    def _view(self, slots: Sequence[TensorSlot], copies: bool) -> dict[str, Array]:
        """The inputs; a decoupled model may still read them when the arena has the next ones."""
        inputs = self._inputs.copy(slots) if copies else self._inputs.view(slots)
        for array in inputs.values():
            array.flags.writeable = True  # no other code reads them, and Triton models may write
        return inputs

    def _told(self, outcomes: Sequence[dict[str, Array] | PenstockError | None]) -> list[wire.Told]:
        try:
            sets = self._outputs.write_all([one if isinstance(one, Mapping) else {} for one in outcomes])
        except Exception as error:  # noqa: BLE001 - as above
            return [failure(error)] * len(outcomes)
        return [
            Failed.of(one) if isinstance(one, PenstockError) else None if one is None else slots
            for one, slots in zip(outcomes, sets, strict=True)
        ]

    def _answer(self, number: int, outcome: dict[str, Array] | PenstockError | None, final: bool) -> bool:
        with self._using:
            told: wire.Told = Failed.of(outcome) if isinstance(outcome, PenstockError) else None
            if isinstance(outcome, Mapping):
                told = self._to_parent.write(outcome)
            return self._pass_on(wire.Answered(number, told, final, self._engine.stages.take()))

    def _pass_on(self, message: wire.Asked | wire.Answered) -> bool:
        """Send it, and wait until the parent has copied its tensors."""
        return not self._ended and self._try_to_send(message) and self._taken.get()

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
        self._ended = True
        self._tasks.put(None)
        self._taken.put(False)
        for number in list(self._open):
            self._end_call(number, Unavailable("the server is ending"))

    def _take(self, message: wire.Replied) -> None:
        outcome = message.outcome
        outputs = self._from_parent.copy(outcome) if isinstance(outcome, list) else {}
        self._send(wire.Taken())
        if isinstance(outcome, Failed):
            self._end_call(message.number, outcome.error())
        elif (done := self._open.get(message.number)) is not None:
            if message.final:
                del self._open[message.number]
            name, version = message.model
            done(InferResponse(name, version, outputs, final=message.final))

    def _end_call(self, number: int, error: PenstockError) -> None:
        if (done := self._open.pop(number, None)) is not None:
            done(error)

    def _drop(self, number: int) -> None:
        if self._open.pop(number, None) is not None:
            self._try_to_send(wire.Dropped(number))


def main(arguments: Sequence[str]) -> None:
    """Serve until the parent closes the socket."""
    end, model_file, *arenas = begin(arguments)
    channel = Channel(socket.socket(fileno=end))
    try:
        message = channel.receive()
        assert isinstance(message, wire.Load)
        worker = Worker(channel, [TensorArena(file) for file in arenas])
        model = worker.load(message, model_file)
        if model is not None:
            worker.serve(model)
    except (EOFError, OSError):
        pass  # the parent needs it no more


if __name__ == "__main__":
    main(sys.argv[1:])
