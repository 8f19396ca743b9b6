"""One run of a graph: a step starts as soon as its inputs are available, and a value is released after its last consumer.

A run uses callbacks instead of tasks. A step calls back with its outcome, possibly before ``start`` returns.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

from penstock.errors import Cancelled, InvalidArgument, PenstockError, prefixed
from penstock.pipeline.graph import GraphPlan, PipelineStep
from penstock.pipeline.value import Value

_log = logging.getLogger(__name__)


class Work(Protocol):
    """A step that has been started."""

    def cancel(self) -> object:
        """Abandon the step and ignore its outcome. Idempotent."""


Told = Mapping[str, Value] | PenstockError
"""Values by name, or an error."""
Start = Callable[[PipelineStep, dict[str, Value], Callable[[Told], None]], Work | None]
"""``start(step, inputs, done)`` starts a step on read-only ``inputs``. The step calls ``done`` once. ``start`` returns None if the
step has already called ``done``. Inputs and outputs have the step's own tensor names. Raises PenstockError."""


class PipelineRun:
    """Runs a graph once. At the end, it calls ``done`` once: with the wanted outputs that are present, in order, or with the first
    error. An error cancels all running steps. Only one thread may use the object.
    """

    def __init__(self, plan: GraphPlan, start: Start, done: Callable[[Told], None]) -> None:
        self._plan = plan
        self._start = start
        self._done: Callable[[Told], None] | None = done
        self._values: dict[str, Value | None] = {}
        """The tensors that are settled (known to have a value or to be absent) and still needed. An absent tensor is None."""
        self._uses, self._givers = dict(plan.uses), dict(plan.givers)
        self._waits = [len(step.reads) for step in plan.steps]
        """For each step, the number of its input tensors that are not yet settled."""
        self._ready = deque(position for position, waits in enumerate(self._waits) if not waits)
        self._running: dict[int, Work | None] = {}
        self._is_advancing = False

    def begin(self, inputs: Mapping[str, Value]) -> None:
        """Start the run. ``inputs`` may lack some of the graph's inputs. Call once. May call ``done`` before it returns."""
        for name in self._plan.inputs:
            self._settle(name, inputs.get(name))
        self._advance()

    def cancel(self) -> None:
        """End the run with Cancelled, unless it has already ended. Idempotent."""
        self._end(Cancelled("the request was cancelled"))

    def _settle(self, tensor: str, value: Value | None) -> None:
        """Record that ``tensor`` is ``value``. With None, record that one of the steps that may produce the tensor was skipped."""
        if value is None:
            self._givers[tensor] -= 1
            if self._givers[tensor]:
                return
        if self._uses.get(tensor):
            self._values[tensor] = value
        for position in self._plan.readers.get(tensor, ()):
            self._waits[position] -= 1
            if not self._waits[position]:
                self._ready.append(position)

    def _advance(self) -> None:
        """Start all ready steps. A loop replaces recursion, because steps may finish before ``start`` returns."""
        if self._is_advancing:
            return
        self._is_advancing = True
        while self._ready and self._done is not None:
            self._begin(self._ready.popleft())
        self._is_advancing = False
        if not self._running and self._done is not None:
            self._finish()

    def _begin(self, position: int) -> None:
        step = self._plan.steps[position]
        try:
            inputs = self._take(step)
            if inputs is None:
                for tensor in step.outputs.values():
                    self._settle(tensor, None)
                return
            self._running[position] = None
            work = self._start(step, inputs, partial(self._answered, position))
        except PenstockError as error:
            self._end(prefixed(f"step '{step.name}': ", error))
        except Exception:  # noqa: BLE001 - a bug must not leave the run without an end
            _log.exception("step '%s' could not be started", step.name)
            self._end(PenstockError("internal error"))
        else:
            if position in self._running:
                self._running[position] = work
            elif self._done is None and work is not None:
                work.cancel()  # the run ended while the step was being started

    def _take(self, step: PipelineStep) -> dict[str, Value] | None:
        """The inputs of ``step``; None if it is skipped. Releases tensors without further consumers. Raises InvalidArgument."""
        inputs = step.take(self._values)
        for tensor in step.reads:
            self._uses[tensor] -= 1
            if not self._uses[tensor]:
                del self._values[tensor]
        return inputs

    def _answered(self, position: int, told: Told) -> None:
        if position not in self._running:
            return
        del self._running[position]
        step = self._plan.steps[position]
        if isinstance(told, PenstockError):
            self._end(prefixed(f"step '{step.name}': ", told))
            return
        for own, tensor in step.outputs.items():
            if own not in told:
                self._end(PenstockError(f"step '{step.name}' returned no output '{own}'"))
                return
            self._settle(tensor, told[own])
        self._advance()

    def _finish(self) -> None:
        try:
            self._end(wanted_of(self._plan, self._values))
        except InvalidArgument as error:
            self._end(error)

    def _end(self, told: Told) -> None:
        done, self._done = self._done, None
        if done is None:
            return
        running, self._running = self._running, {}
        self._values.clear()
        for work in running.values():
            if work is not None:
                work.cancel()
        done(told)


def wanted_of(plan: GraphPlan, values: Mapping[str, Value | None]) -> dict[str, Value]:
    """The wanted outputs that are present, in order. Raises InvalidArgument if another is absent."""
    outputs = {}
    for name in plan.wanted:
        value = values.get(name)
        if value is not None:
            outputs[name] = value
        elif name not in plan.optional:
            givers = ", ".join(f"'{step.name}'" for step in plan.steps if name in step.outputs.values())
            why = f"step {givers} was skipped" if givers else "the request lacks this input"
            raise InvalidArgument(f"output '{name}' is missing: {why}", "declare the output as optional")
    return outputs
