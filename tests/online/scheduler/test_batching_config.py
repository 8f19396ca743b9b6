from typing import Any

import pytest

from penstock.errors import InvalidConfig
from penstock.online.scheduler.batching_config import BatchingConfig, QueuePolicy, TimeoutAction


@pytest.mark.parametrize(
    ("default_us", "override", "asked_us", "expected_us"),
    [
        (0, True, 5, 0),
        (9, False, 5, 9),
        (9, True, 5, 5),
        (9, True, 1, 1),
        (9, True, 20, 9),
        (9, True, 0, 9),
        (0, False, 0, 0),
    ],
)
def test_a_request_may_only_shorten_its_time_and_only_where_allowed(
    default_us: int, override: bool, asked_us: int, expected_us: int
) -> None:
    policy = QueuePolicy(default_timeout_microseconds=default_us, allow_timeout_override=override)
    assert policy.timeout_ns(asked_us) == 1000 * expected_us


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"preferred_batch_size": (0,)}, "must be positive"),
        ({"preferred_batch_size": (9,)}, "must be <= max batch size"),
        ({"priority_levels": 2}, r"default priority level must be in range \[1, 2\]"),
        ({"priority_levels": 2, "default_priority_level": 3}, "default priority level"),
        ({"priority_queue_policy": {1: QueuePolicy()}}, "priority queue policy must have priority level in range"),
        ({"preserve_ordering": True, "priority_levels": 2, "default_priority_level": 1}, "Only one priority level"),
        (
            {"preserve_ordering": True, "default_queue_policy": QueuePolicy(TimeoutAction.DELAY, 5)},
            "can not have DELAY",
        ),
    ],
)
def test_what_triton_refuses_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidConfig, match=message):
        BatchingConfig(batchable=True, max_batch=8, **settings)


def test_each_level_has_its_policy_or_the_default() -> None:
    own, default = QueuePolicy(max_queue_size=3), QueuePolicy(max_queue_size=7)
    config = BatchingConfig(
        batchable=True,
        max_batch=8,
        priority_levels=3,
        default_priority_level=2,
        default_queue_policy=default,
        priority_queue_policy={2: own},
    )
    assert config.policies == [default, own, default]
    assert BatchingConfig(batchable=True, max_batch=8).policies == [QueuePolicy()]


@pytest.mark.parametrize(("batchable", "decoupled", "rows"), [(True, False, 8), (False, False, 1), (True, True, 1)])
def test_what_is_not_merged_has_one_row(batchable: bool, decoupled: bool, rows: int) -> None:
    assert BatchingConfig(batchable=batchable, max_batch=8, decoupled=decoupled).max_rows == rows


@pytest.mark.parametrize(
    "settings",
    [
        {"preferred_batch_size": (1, 8)},
        {
            "priority_levels": 2,
            "default_priority_level": 1,
            "priority_queue_policy": {1: QueuePolicy(), 2: QueuePolicy()},
        },
        {"priority_levels": 2, "default_priority_level": 2},
        {"priority_levels": 1000, "default_priority_level": 1000},
        {"preserve_ordering": True, "priority_levels": 1, "default_priority_level": 1},
        {"preserve_ordering": True, "default_queue_policy": QueuePolicy(TimeoutAction.DELAY)},
        {"preserve_ordering": True, "default_queue_policy": QueuePolicy(TimeoutAction.REJECT, 5)},
    ],
)
def test_what_triton_accepts_is_accepted(settings: dict[str, Any]) -> None:
    BatchingConfig(batchable=True, max_batch=8, **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"priority_levels": 2, "default_priority_level": 1, "priority_queue_policy": {0: QueuePolicy()}},
        {"priority_levels": 2, "default_priority_level": 1, "priority_queue_policy": {3: QueuePolicy()}},
        {"preferred_batch_size": (4, 0)},
        {"preferred_batch_size": (9, 4)},
        {"priority_levels": 1001, "default_priority_level": 1},
    ],
)
def test_one_setting_out_of_bounds_is_enough(settings: dict[str, Any]) -> None:
    with pytest.raises(InvalidConfig):
        BatchingConfig(batchable=True, max_batch=8, **settings)


def test_without_settings_requests_run_alone_and_at_once() -> None:
    config = BatchingConfig(batchable=True)
    assert (config.max_rows, config.max_batch, config.max_queue, config.instances) == (1, 1, 4096, 1)
    assert (config.decoupled, config.stateful, config.preserve_ordering) == (False, False, False)
    assert (config.max_queue_delay_microseconds, config.priority_levels, config.default_priority_level) == (0, 0, 0)
    assert QueuePolicy().timeout_ns(5) == QueuePolicy().max_queue_size == 0
    assert [QueuePolicy(default_timeout_microseconds=9).timeout_ns(asked) for asked in (5, 9)] == [9000, 9000]
