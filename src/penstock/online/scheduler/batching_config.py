"""Settings for queueing and merging the requests of one model version, with the names of Triton's ``dynamic_batching``."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from penstock.errors import InvalidConfig

_MAX_LEVELS = 1000


class TimeoutAction(enum.Enum):
    """The action for a request whose queue timeout has passed."""

    REJECT = "REJECT"
    """The request fails."""
    DELAY = "DELAY"
    """The request moves behind all requests of its priority level whose timeout has not passed."""


class QueuePolicy(msgspec.Struct, frozen=True):
    """The settings of the queue of one priority level."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    """Maximum microseconds in the queue; 0 means no limit."""
    allow_timeout_override: bool = False
    """True if a request's own timeout may shorten the default timeout. Without a default, timeouts of requests are ignored."""
    max_queue_size: int = 0
    """Maximum number of waiting requests of the level. With 0, only the model's limit applies."""

    def timeout_ns(self, asked_us: int) -> int:
        """The effective queue timeout in nanoseconds; 0 means no limit. ``asked_us`` is the request's own timeout (0: none)."""
        timeout_us = self.default_timeout_microseconds
        if self.allow_timeout_override and 0 < asked_us < timeout_us:
            timeout_us = asked_us
        return timeout_us * 1000


class DynamicBatching(msgspec.Struct, frozen=True):
    """Triton's ``dynamic_batching``. Without preferred sizes and delay, a request never waits for further requests."""

    preferred_batch_size: tuple[int, ...] = ()
    """A batch of one of these sizes leaves immediately; empty means ``max_batch``."""
    max_queue_delay_microseconds: int = 0
    """Maximum microseconds that a request waits for further requests while an instance is free."""
    preserve_ordering: bool = False
    """True if responses are sent in the order of the requests."""
    priority_levels: int = 0
    """Number of priority levels. Level 1 is the most urgent. 0 means that there are no levels."""
    default_priority_level: int = 0
    """The priority level of requests without a valid level."""
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = {}
    """Queue policies that differ from the default policy, by level."""

    @property
    def policies(self) -> list[QueuePolicy]:
        """The policy of each level, starting with the most urgent level. Contains at least one policy."""
        levels = range(1, max(1, self.priority_levels) + 1)
        return [self.priority_queue_policy.get(level, self.default_queue_policy) for level in levels]


class BatchingConfig(DynamicBatching, frozen=True, kw_only=True):
    """The batching of one model version. Raises InvalidConfig for the configurations that Triton rejects."""

    batchable: bool
    """True if requests may be merged along the first axis. If False, each request runs alone."""
    max_batch: int = 1
    """Maximum rows of a merged batch. A larger request runs alone."""
    max_queue: int = 4096
    """Maximum number of requests that are accepted and not yet answered."""
    decoupled: bool = False
    """True if the model may send any number of responses to a request. Such requests run alone."""
    instances: int = 1
    """Number of instances, for the prediction of queueing times."""
    stateful: bool = False
    """True if the model keeps state between requests. The requests of a failed batch are then not retried."""

    def __post_init__(self) -> None:
        if any(size < 1 for size in self.preferred_batch_size):
            raise InvalidConfig("dynamic batching preferred size must be positive")
        if any(size > self.max_batch for size in self.preferred_batch_size):
            raise InvalidConfig("dynamic batching preferred size must be <= max batch size")
        levels = self.priority_levels
        if levels > _MAX_LEVELS:  # each level is a queue
            raise InvalidConfig(f"priority levels must be at most {_MAX_LEVELS}")
        if levels and not 1 <= self.default_priority_level <= levels:
            raise InvalidConfig(f"default priority level must be in range [1, {levels}]")
        if not all(1 <= level <= levels for level in self.priority_queue_policy):
            raise InvalidConfig(f"priority queue policy must have priority level in range [1, {levels}]")
        if not self.preserve_ordering:
            return
        if levels > 1:
            raise InvalidConfig("Only one priority level is allowed when 'preserve_ordering' is true")
        for policy in self.policies:
            if policy.timeout_action is TimeoutAction.DELAY and policy.default_timeout_microseconds:
                raise InvalidConfig(
                    "Queue policy can not have DELAY as timeout action when 'preserve_ordering' is true"
                )

    @property
    def max_rows(self) -> int:
        """Maximum rows of a merged batch; 1 if requests are not merged."""
        return self.max_batch if self.batchable and not self.decoupled else 1
