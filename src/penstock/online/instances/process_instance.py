"""A model in a child process. If it crashes or hangs, the server and its other models continue.

Tensors pass through shared memory. Inputs and outputs are each copied once, and nothing is pickled. If the process dies, only its
current batch fails. The process is restarted immediately, or after a delay if it has died repeatedly (see ``restart``). Until the
new process has loaded the model, the model is not ``healthy``. Calls wait up to a second for the new process. Then they fail, and
the error says when to retry.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Self

from penstock.artifact import Artifact
from penstock.clock import Clock, SystemClock
from penstock.engines.base import LoadedModel, Options
from penstock.engines.custom_ops import files
from penstock.errors import Code, PenstockError, Unavailable
from penstock.online.instances.process_channel import Failed, Forward, Forwarded, Load, Loaded, Message
from penstock.online.instances.process_child import WORKER, ProcessChild
from penstock.online.instances.process_halt import Halt
from penstock.online.instances.tensor_arena import TensorArena
from penstock.online.restart import restart_delay_s
from penstock.online.scheduler.base import InstanceDied
from penstock.tensor import Array, Signature, TensorSpec

_log = logging.getLogger(__name__)

_PATIENCE_S = 1.0
"""Maximum seconds for which a call waits for a process that is being restarted. This wait also limits the rate of failing batches."""
_LOOK_S = 0.05
_MAX_DEATHS = 32


class InstanceRestarting(InstanceDied):
    """The model's process has died and has not been restarted yet."""

    code = Code.UNAVAILABLE


class ModelProcess:
    """A model in a child process that is restarted when it dies. Create it with ``load``."""

    reentrant = False
    worker = WORKER
    """Module that the child runs."""
    end_s = 2.0
    """Maximum seconds to wait for the child to end before it is killed."""
    least_load_s = 60.0
    """Minimum load timeout in seconds, if calls have a timeout, because loading takes longer than a call."""

    def __init__(self, message: Load, model_file: int, timeout_s: float, clock: Clock) -> None:
        self.signature: Signature
        self.optional_inputs: tuple[TensorSpec, ...]
        self.keeps_state: bool
        self.unranked: frozenset[str]
        self.left_out: Mapping[str, str]
        self._message = message
        self._timeout_s = timeout_s
        self._clock = clock
        self._model_file = os.dup(model_file)
        self._inputs, self._outputs = TensorArena.create(), TensorArena.create()
        self._deaths: deque[float] = deque(maxlen=_MAX_DEATHS)
        self._keeper: threading.Thread
        self._changed = threading.Condition()
        # The condition guards all attributes below.
        self._child: ProcessChild | None = None
        """The child that receives calls; None during a restart."""
        self._starting: ProcessChild | None = None
        self._closed = self._unloaded = False
        """True once ``unload`` has begun. From then on, no child is called or started."""

    @classmethod
    def load(  # noqa: PLR0913, PLR0917 - the model, and the settings of its process
        cls,
        engine: str,
        artifact: Artifact,
        options: Options,
        model_file: int,
        cores: Sequence[int] = (),
        timeout_s: float = 0.0,
        clock: Clock | None = None,
        halt: Halt | None = None,
    ) -> Self:
        """Load ``artifact`` in a new process that runs on ``cores``. The file descriptor ``model_file`` refers to the artifact's
        bytes (see ``Artifact.in_memory``).

        The process is killed if a call takes longer than ``timeout_s`` (0: no limit). Loading may take up to ``least_load_s``, if
        that is longer. ``halt`` can end the process until ``Halt.release``. Raises the errors of the engine.
        """
        halt = halt or Halt()
        path = str(artifact.path.resolve()) if artifact.path else ""
        facts = artifact.format.value, artifact.digest, path
        message = Load(engine, *facts, dict(options), tuple(cores), artifact.name, artifact.beside, files())
        model = cls(message, model_file, timeout_s, clock or SystemClock())
        try:
            halt.hold(model)
            child, loaded = model._start()
        except BaseException:
            halt.release(model)
            model._give_back()
            raise
        model._take_facts(loaded)
        model._child = child
        model._keeper = threading.Thread(target=model._keep, args=(child,), name="keep-model-process", daemon=True)
        model._keeper.start()
        return model

    @property
    def healthy(self) -> bool:
        """True if a child can be called; False during a restart."""
        return self._child is not None

    @property
    def pid(self) -> int | None:
        """Id of the process; None while no process is running."""
        child = self._child
        return child.pid if child else None

    def unload(self) -> None:
        """End the process and free all memory."""
        with self._changed:
            if self._unloaded:
                return
            self._unloaded = self._closed = True
            child, starting, self._child = self._child, self._starting, None
            self._changed.notify_all()
        if starting:
            starting.kill()
        if child:
            child.ask_to_end()
            self._keeper.join(self.end_s)
            if self._keeper.is_alive():
                child.kill()
        self._keeper.join()
        self._give_back()

    def end_at_once(self) -> None:
        """Kill the process and do not restart it. ``unload`` frees the memory. Any thread may call this."""
        with self._changed:
            self._closed = True
            for child in (self._child, self._starting):
                if child:
                    child.kill()
            self._changed.notify_all()

    def used_s(self) -> float | None:
        """CPU seconds of the starting process, if any, else of the current process; None if unknown. Any thread may call this."""
        child = self._starting or self._child
        return 0.0 if child is None else child.used_s()

    def hear(self, message: Message) -> None:
        """Handle a message from the child that is not a reply."""

    def _take_facts(self, loaded: Loaded) -> None:
        self.signature, self.optional_inputs = loaded.signature, loaded.optional_inputs
        self.keeps_state, self.unranked, self.left_out = loaded.keeps_state, loaded.unranked, loaded.left_out

    def _attach(self, child: ProcessChild) -> None:
        """Hook that runs when ``child`` has loaded the model, before its first call."""

    def _call(self, call: Callable[[ProcessChild], None]) -> ProcessChild:
        """Call the model in the child. If the child died before it received the batch, call the child that replaces it."""
        while True:
            child = self._wait_for_child()
            try:
                call(child)
            except OSError:
                self._lose(child)
            else:
                return child

    def _ended_late(self, child: ProcessChild) -> InstanceDied:
        child.kill()
        self._lose(child)
        return InstanceDied(
            f"the model took longer than {self._timeout_s:g} s, so its process was ended",
            "raise 'model_timeout_s' if the model needs more time",
        )

    def _died(self, child: ProcessChild) -> InstanceDied:
        self._lose(child)
        return InstanceDied("the model's process died in the middle of this batch")

    def _wait_for_child(self) -> ProcessChild:
        with self._changed:
            if self._child is None and not self._closed:
                self._changed.wait_for(lambda: self._child or self._closed, _PATIENCE_S)
            if self._closed:
                raise Unavailable("the model has been unloaded")
            if self._child is None:
                left = max(0.0, self._restart_at() - self._clock.now())
                raise InstanceRestarting(
                    "the model's process died and is being restarted", "try again later", retry_after_s=left
                )
            return self._child

    def _lose(self, child: ProcessChild) -> None:
        """Stop calling ``child``. The keeper thread starts another child."""
        with self._changed:
            if self._child is child:
                self._child = None

    def _keep(self, child: ProcessChild | None) -> None:
        """Run the keeper thread, which replaces a child that has died."""
        while child is not None:
            how, pid = child.wait(), child.pid
            with self._changed:
                if self._child is child:
                    self._child = None
                if self._closed:
                    return
                self._deaths.append(self._clock.now())
            delay_s = restart_delay_s(self._deaths, self._clock.now())
            _log.error("the process %d of a model ended with %s; restarting it in %.1f s", pid, how, delay_s)
            child = self._restart()

    def _restart(self) -> ProcessChild | None:
        """Start a child, with as many attempts as necessary. Returns None if the model is unloaded."""
        while self._is_due():
            try:
                child, _ = self._start()
            except PenstockError as error:
                _log.error("a model's process could not be restarted: %s", error)
                self._deaths.append(self._clock.now())
                continue
            with self._changed:
                if not self._closed:
                    self._child = child
                    self._changed.notify_all()
            if self._child is not child:
                child.kill()
            return child
        return None

    def _is_due(self) -> bool:
        """Wait until the next start is due. Returns False if the model is unloaded."""
        with self._changed:
            while not self._closed and (left := self._restart_at() - self._clock.now()) > 0:
                # Wait in short steps, because the clock of a test may advance at any time.
                self._changed.wait(min(left, _LOOK_S))
            return not self._closed

    def _restart_at(self) -> float:
        return self._deaths[-1] + restart_delay_s(self._deaths, self._deaths[-1]) if self._deaths else 0.0

    def _files(self) -> tuple[int, ...]:
        """Descriptors that the child inherits."""
        return self._model_file, self._inputs.file, self._outputs.file

    def _start(self) -> tuple[ProcessChild, Loaded]:
        load_s = max(self.least_load_s, self._timeout_s) if self._timeout_s else 0.0
        child = ProcessChild(self._files(), self.worker)
        with self._changed:
            self._starting = child
            if self._closed:
                child.kill()
        try:
            loaded = child.load(self._message, self.hear, load_s)
            self._attach(child)
            return child, loaded
        except BaseException as error:
            child.kill()
            child.wait()
            if isinstance(error, TimeoutError):
                raise PenstockError(
                    f"the model took longer than {load_s:g} s to load, so its process was ended",
                    "raise 'model_timeout_s' if the model needs more time",
                ) from None
            raise
        finally:
            with self._changed:
                self._starting = None

    def _give_back(self) -> None:
        self._inputs.close()
        self._outputs.close()
        os.close(self._model_file)


class ProcessModel(ModelProcess, LoadedModel):
    """A model of any engine in a child process."""

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        """Run the model once. See ``LoadedModel``. Raises InstanceDied if the process dies or takes too long."""
        child = self._call(lambda child: child.send(Forward(self._inputs.write(inputs))))
        try:
            answer = child.receive(self._timeout_s)
        except TimeoutError:
            raise self._ended_late(child) from None
        except (EOFError, OSError):
            raise self._died(child) from None
        if isinstance(answer, Failed):
            raise answer.error()
        assert isinstance(answer, Forwarded)
        return self._outputs.copy(answer.outputs)
