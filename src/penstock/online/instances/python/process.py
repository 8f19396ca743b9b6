"""A Python model in a child process. Sends batches to the child, and handles the model's calls of other models.

The tensors of a batch use the input arena and the output arena. Only one ``execute`` call at a time uses them. Responses of
decoupled models and calls of other models use another pair of arenas, one per direction. An arena of this pair can be reused once
its reader has copied the tensors.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from queue import Empty, SimpleQueue

from penstock.clock import Clock
from penstock.engines.base import Answer
from penstock.errors import PenstockError, Unavailable
from penstock.online.instances import process_channel as wire
from penstock.online.instances.model_calls import MakeCall, ModelCall
from penstock.online.instances.process_child import ProcessChild
from penstock.online.instances.process_instance import ModelProcess
from penstock.online.instances.tensor_arena import TensorArena
from penstock.online.scheduler.base import InstanceDied
from penstock.request import InferRequest, InferResponse, Outcome
from penstock.telemetry.exposition import label_text
from penstock.telemetry.statistics import Duration, ModelStatistics, OwnMetric, add_numbers

_log = logging.getLogger(__name__)

_MAX_CALL_BYTES = 2 << 30
"""Maximum bytes of the tensors in a message that does not belong to a batch."""
_MAX_SERIES = 1000
_LOOK_S = 0.05


class PythonProcess(ModelProcess):
    """A ``RequestModel`` in a child process."""

    worker = "penstock.online.instances.python.worker"
    end_s = 10.0

    def __init__(self, message: wire.Load, model_file: int, timeout_s: float, clock: Clock) -> None:
        super().__init__(message, model_file, timeout_s, clock)
        self.decoupled = False
        self.max_batch: int | None = None
        self._make_call: MakeCall | None = None
        self.stages: wire.Stages = {}
        """Count and total duration of each of the model's stages, by name."""
        self.metrics: dict[str, OwnMetric] = {}
        """The model's own metrics, by name."""
        self.from_child, self.to_child = TensorArena.create(_MAX_CALL_BYTES), TensorArena.create(_MAX_CALL_BYTES)
        self._talk: Talk

    def connect(self, make_call: MakeCall | None) -> None:
        """Allow the model to call other models. Call this once the model is served."""
        self._make_call = make_call

    def execute(self, requests: Sequence[InferRequest], answer: Answer) -> None:
        """Execute ``requests`` in the child. Raises InstanceDied if the process dies or takes too long."""
        talk = self._talk

        def begin(child: ProcessChild) -> None:
            nonlocal talk
            talk = self._talk
            sets = self._inputs.write_all([request.inputs for request in requests])
            talk.begin(child, wire.Execute(0, [wire.without_inputs(request) for request in requests], sets), answer)

        child = self._call(begin)
        try:
            executed = talk.executed.get(timeout=self._timeout_s or None)
        except Empty:
            raise self._ended_late(child) from None
        if executed is None:
            raise self._died(child)
        for number, slots in enumerate(executed.outcomes):
            if slots is not None:
                answer(number, wire.read_outcome(slots, self._outputs), True)

    def unload(self) -> None:
        """Wait for the answers of a decoupled model, then end its process and free the memory."""
        if self.decoupled:
            self._talk.wait()
        super().unload()

    def make_call(self) -> ModelCall:
        """Create a call of another model. Raises Unavailable before ``connect``."""
        if self._make_call is None:
            raise Unavailable("the model is still being loaded and cannot call other models")
        return self._make_call()

    def add_stages(self, stages: wire.Stages) -> None:
        for name, (count, ns) in stages.items():
            before = self.stages.get(name, (0, 0))
            if name in self.stages or len(self.stages) < _MAX_SERIES:
                self.stages[name] = before[0] + count, before[1] + ns

    def hear(self, message: wire.Message) -> None:
        if isinstance(message, wire.Said):
            _log.log(message.level, "%s", message.text)
        elif isinstance(message, wire.MetricChanged):
            values = self.metrics.setdefault(message.name, OwnMetric(message.kind, message.help)).values
            labels = label_text(message.labels)
            if labels in values or sum(len(one.values) for one in self.metrics.values()) < _MAX_SERIES:
                values[labels] = message.value + (0 if message.replaces else values.get(labels, 0))

    def _take_facts(self, loaded: wire.Loaded) -> None:
        super()._take_facts(loaded)
        self.decoupled, self.max_batch = loaded.decoupled, loaded.max_batch

    def _attach(self, child: ProcessChild) -> None:
        self._talk = Talk(self, child)
        self._talk.start()

    def _files(self) -> tuple[int, ...]:
        return *super()._files(), self.from_child.file, self.to_child.file

    def _give_back(self) -> None:
        super()._give_back()
        self.from_child.close()
        self.to_child.close()


class Talk:
    """The messages to and from one child of a ``PythonProcess``.

    One thread reads the child's messages, and never blocks on writing. Another thread writes all messages except ``Execute``.
    """

    def __init__(self, process: PythonProcess, child: ProcessChild) -> None:
        self._process = process
        self._child = child
        self.executed: SimpleQueue[wire.Executed | None] = SimpleQueue()
        """The results of the batches that ``begin`` has sent, in order. A result is None if the child has ended."""
        self._next = self._first = 0
        """The number of the next request, and the number of the first request of the current batch."""
        self._answers: dict[int, tuple[Answer, int]] = {}
        """For each request that has not ended, the callback for its answers, and the request's index in the batch."""
        self._beginning = threading.Lock()
        self._ended = threading.Event()
        """Set when the child has ended, so that no further batch begins. Only set while holding ``_beginning``."""
        self._calls: dict[int, ModelCall] = {}
        self._to_write: SimpleQueue[wire.Message | tuple[int, Outcome] | None] = SimpleQueue()
        self._room = threading.Semaphore()
        """A semaphore that is available while the arena to the child is free."""

    def start(self) -> None:
        for name, run in (("read-model-process", self._read), ("write-model-process", self._write)):
            threading.Thread(target=run, name=name, daemon=True).start()

    def begin(self, child: ProcessChild, task: wire.Execute, answer: Answer) -> None:
        """Send ``task`` to ``child``. Raises OSError if the child has ended."""
        with self._beginning:
            if child is not self._child or self._ended.is_set():
                raise BrokenPipeError
            self._first = task.first = self._next
            self._next += len(task.requests)
            answers = {task.first + number: (answer, number) for number in range(len(task.requests))}
            self._answers.update(answers)
            try:
                self._child.send(task)
            except OSError:
                for number in answers:
                    self._answers.pop(number, None)
                raise

    def wait(self) -> None:
        """Wait until the child has answered all requests whose clients still wait, or until the child has ended."""
        while any(answer(number, None, False) for answer, number in list(self._answers.values())):
            if self._ended.wait(_LOOK_S):
                return

    def _read(self) -> None:
        try:
            while True:
                self._take(self._child.receive(0))
        except (EOFError, OSError):
            pass
        except Exception:  # noqa: BLE001 - the callers that wait must get an error
            _log.exception("a model's process sent an invalid message")
            self._child.kill()
        with self._beginning:
            self._ended.set()
        self.executed.put(None)
        for call in list(self._calls.values()):
            call.cancel()
        self._to_write.put(None)
        self._room.release()
        if self._process.decoupled:
            for answer, number in list(self._answers.values()):
                answer(number, InstanceDied("the model's process died before its last answer"), True)
        self._answers.clear()

    def _take(self, message: wire.Message) -> None:
        process = self._process
        if isinstance(message, wire.Executed):
            process.add_stages(message.stages)
            for number, slots in enumerate(message.outcomes, self._first):
                if slots is not None or not process.decoupled:
                    self._answers.pop(number, None)
            self.executed.put(message)
        elif isinstance(message, wire.Answered):
            process.add_stages(message.stages)
            outcome = wire.read_outcome(message.outcome, process.from_child)
            ends = message.final or isinstance(outcome, PenstockError)
            found = self._answers.pop(message.number, None) if ends else self._answers.get(message.number)
            wanted = found is not None and found[0](found[1], outcome, message.final)
            self._to_write.put(wire.Taken(wanted))
        elif isinstance(message, wire.Asked):
            message.request.inputs = process.from_child.copy(message.inputs)
            self._to_write.put(wire.Taken())
            self._ask(message)
        elif isinstance(message, wire.Taken):
            self._room.release()
        elif isinstance(message, wire.Dropped):
            if (call := self._calls.pop(message.number, None)) is not None:
                call.cancel()
        else:
            process.hear(message)

    def _ask(self, message: wire.Asked) -> None:
        number = message.number
        try:
            call = self._calls[number] = self._process.make_call()
            call.begin(message.request, lambda reply: self._reply(number, reply), message.decoupled)
        except PenstockError as error:
            self._reply(number, error)

    def _reply(self, number: int, reply: Outcome) -> None:
        if isinstance(reply, PenstockError) or reply.final:
            self._calls.pop(number, None)
        self._to_write.put((number, reply))

    def _write(self) -> None:
        try:
            while (item := self._to_write.get()) is not None:
                self._child.send(self._written(*item) if isinstance(item, tuple) else item)
        except OSError:
            pass  # the reading thread handles it

    def _written(self, number: int, reply: Outcome) -> wire.Replied:
        self._room.acquire()
        if isinstance(reply, InferResponse):
            try:
                slots = wire.write_outcome(reply.outputs, self._process.to_child)
                return wire.Replied(number, slots, reply.final, (reply.model_name, reply.model_version))
            except PenstockError as error:
                reply = error
        return wire.Replied(number, wire.Failed.of(reply), True, ("", ""))


def add_up(statistics: ModelStatistics, processes: Sequence[PythonProcess]) -> None:
    """Write the stages and metrics, summed over ``processes``, into ``statistics``."""
    statistics.stages, statistics.metrics = {}, {}
    for process in processes:
        stages = {name: Duration(count, ns) for name, (count, ns) in list(process.stages.items())}
        statistics.stages = add_numbers(statistics.stages, stages)
        # Copies, because the process keeps changing its own objects.
        metrics = {name: OwnMetric(one.kind, one.help, dict(one.values)) for name, one in list(process.metrics.items())}
        statistics.metrics = add_numbers(statistics.metrics, metrics)
