"""How the requests of one model version wait and are merged: Triton's ``dynamic_batching``, by its names."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from penstock.errors import InvalidConfig

_MAX_LEVELS = 1000


class TimeoutAction(enum.Enum):
    """What happens to a request that has waited as long as it may."""

    REJECT = "REJECT"
    """It is refused, at that moment."""
    DELAY = "DELAY"
    """It goes behind all of its priority level that are not late."""


class QueuePolicy(msgspec.Struct, frozen=True):
    """How the requests of one priority level wait."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    """Longest time in the queue; 0: no limit."""
    allow_timeout_override: bool = False
    """Whether a request's own time-out counts where it is shorter than the default; without a default, none is shorter."""
    max_queue_size: int = 0
    """Most requests of the level that wait; 0: no limit but the model's."""

    def timeout_ns(self, asked_us: int) -> int:
        """Longest wait of a request that asks for ``asked_us`` (0: nothing), in nanoseconds; 0: no limit."""
        timeout_us = self.default_timeout_microseconds
        if self.allow_timeout_override and 0 < asked_us < timeout_us:
            timeout_us = asked_us
        return timeout_us * 1000


class DynamicBatching(msgspec.Struct, frozen=True):
    """Triton's ``dynamic_batching``. Without preferred sizes and delay batching is natural: nothing is ever waited for."""

    preferred_batch_size: tuple[int, ...] = ()
    """Sizes at which a batch leaves at once; none: ``max_batch``."""
    max_queue_delay_microseconds: int = 0
    """Longest that a request is held back, with an instance free, for others to join it."""
    preserve_ordering: bool = False
    """Whether responses are given in the order in which requests came."""
    priority_levels: int = 0
    """Number of levels, 1 the most urgent; 0: none."""
    default_priority_level: int = 0
    """Level of requests that ask for none, or for one that does not exist."""
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = {}
    """By level, for those that differ from the default."""

    @property
    def policies(self) -> list[QueuePolicy]:
        """One for each level, the most urgent first; at least one."""
        levels = range(1, max(1, self.priority_levels) + 1)
        return [self.priority_queue_policy.get(level, self.default_queue_policy) for level in levels]


class BatchingConfig(DynamicBatching, frozen=True, kw_only=True):
    """How requests of one model version queue up and leave. Raises InvalidConfig where Triton refuses a configuration."""

    batchable: bool
    """Whether requests may be merged along the first axis; if not, each runs alone."""
    max_batch: int = 1
    """Most rows that are merged; a single larger request runs alone."""
    max_queue: int = 4096
    """Most requests that are accepted and not yet answered."""
    decoupled: bool = False
    """Whether the model gives any number of responses to a request; such requests run alone."""
    instances: int = 1
    """How many take batches side by side; for predicting how long a queue takes."""
    stateful: bool = False
    """Whether the model remembers earlier requests: then nothing of a batch that failed runs again."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.preferred_batch_size):
            raise InvalidConfig("dynamic batching preferred size must be positive")
        if any(size > self.max_batch for size in self.preferred_batch_size):
            raise InvalidConfig("dynamic batching preferred size must be <= max batch size")
        levels = self.priority_levels
        if levels > _MAX_LEVELS:  # each is a queue
            raise InvalidConfig(f"priority levels must be at most {_MAX_LEVELS}")
        if levels and not 1 <= self.default_priority_level <= levels:
            raise InvalidConfig(f"default priority level must be in range [1, {levels}]")
        if not all(1 <= level <= levels for level in self.priority_queue_policy):
            raise InvalidConfig(f"priority queue policy must have priority level in range [1, {levels}]")
        if self.preserve_ordering:
            self._check_order()

    def _check_order(self) -> None:
        if self.priority_levels > 1:
            raise InvalidConfig("Only one priority level is allowed when 'preserve_ordering' is true")
        for policy in self.policies:
            if policy.timeout_action is TimeoutAction.DELAY and policy.default_timeout_microseconds:
                raise InvalidConfig(
                    "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
                )

    @property
    def max_rows(self) -> int:
        """Most rows of a merged batch; 1 if nothing is merged."""
        return self.max_batch if self.batchable and not self.decoupled else 1
