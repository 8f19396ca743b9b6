"""Queueing and merging of the requests of one model version, with the names of Triton's ``dynamic_batching``."""

from __future__ import annotations

import enum
from collections.abc import Mapping

import msgspec

from penstock.errors import InvalidConfig

_MAX_LEVELS = 1000


class TimeoutAction(enum.Enum):
    """What happens to a request whose queue timeout has passed."""

    REJECT = "REJECT"
    """The request fails."""
    DELAY = "DELAY"
    """The request moves behind all requests of its priority level whose timeout has not passed."""


class QueuePolicy(msgspec.Struct, frozen=True):
    """The settings of the queue of one priority level."""

    timeout_action: TimeoutAction = TimeoutAction.REJECT
    default_timeout_microseconds: int = 0
    """Maximum time in the queue; 0 means no limit."""
    allow_timeout_override: bool = False
    """True if requests may shorten the default timeout. Without a default, their timeouts are ignored."""
    max_queue_size: int = 0
    """Limit on the waiting requests of the level; with 0, only the model's limit applies."""

    def timeout_ns(self, asked_us: int) -> int:
        """The timeout in nanoseconds of a request with the timeout ``asked_us`` (0: the default); 0 means no limit."""
        timeout_us = self.default_timeout_microseconds
        if self.allow_timeout_override and 0 < asked_us < timeout_us:
            timeout_us = asked_us
        return timeout_us * 1000


class DynamicBatching(msgspec.Struct, frozen=True):
    """Triton's ``dynamic_batching``. If neither preferred sizes nor a delay are set, no request waits for others."""

    preferred_batch_size: tuple[int, ...] = ()
    """A batch of one of these sizes leaves immediately; empty means ``max_batch``."""
    max_queue_delay_microseconds: int = 0
    """Maximum time for which a request waits for others while an instance is free."""
    preserve_ordering: bool = False
    """True if responses are sent in the order of the requests."""
    priority_levels: int = 0
    """Number of levels, of which 1 is the most urgent; 0 means no levels."""
    default_priority_level: int = 0
    """The level of requests that have no valid level."""
    default_queue_policy: QueuePolicy = QueuePolicy()
    priority_queue_policy: Mapping[int, QueuePolicy] = {}
    """Queue policies that differ from the default policy, by level."""

    @property
    def policies(self) -> list[QueuePolicy]:
        """The policy of each level, the most urgent first; at least one."""
        levels = range(1, max(1, self.priority_levels) + 1)
        return [self.priority_queue_policy.get(level, self.default_queue_policy) for level in levels]


class BatchingConfig(DynamicBatching, frozen=True, kw_only=True):
    """The batching of one model version. Raises InvalidConfig for the configurations that Triton rejects."""

    batchable: bool
    """True if requests may be merged along the first axis; otherwise each runs alone."""
    max_batch: int = 1
    """Limit on the rows of a merged batch; a larger request runs alone."""
    max_queue: int = 4096
    """Limit on the requests that are accepted and not yet answered."""
    decoupled: bool = False
    """True if the model gives any number of responses to a request; such requests run alone."""
    instances: int = 1
    """Number of instances, for the prediction of queueing times."""
    stateful: bool = False
    """True if the model keeps state between requests; the requests of a failed batch are then not retried."""

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
        """Limit on the rows of a merged batch; 1 if requests are not merged."""
        return self.max_batch if self.batchable and not self.decoupled else 1
