from __future__ import annotations

from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.measurement import Interval
from penstock.offline.compress.method import Aim, Made
from penstock.offline.compress.outcome import Outcome
from penstock.offline.judge.judge import Comparison


def outcome(aims: tuple[Aim, ...], before: int, after: int, speed: tuple[float, float, float] | None = None) -> Outcome:
    interval = Interval(0.0, 0.0, 0.0)
    accuracy = Accuracy("top-1", 1.0, interval, 0.0, 10)
    comparison = Comparison(before, after, 1.0, accuracy, 1.0, 1.0, Interval(*speed), 1, 1) if speed else None
    original = Artifact.from_bytes(bytes(before))
    return Outcome(original, Made(original.derive(bytes(after), "step", {}, {}), aims), comparison)


def test_a_result_that_does_not_pay_says_so() -> None:
    size: tuple[Aim, ...] = ("size",)
    both: tuple[Aim, ...] = ("size", "speed")
    assert outcome(size, 10, 5).pays is True
    assert outcome(both, 10, 5).pays is None
    assert outcome(both, 10, 5, (2.0, 1.5, 2.5)).pays is True
    same = outcome(size, 10, 10)
    assert same.shortfalls == {"size": "the file is not smaller than the original: 10 → 10 bytes"}
    slower = outcome(both, 10, 5, (0.5, 0.4, 0.6))
    assert slower.shortfalls["speed"].startswith("slower than the original here: 0.50x")
    unsure = outcome(both, 10, 5, (1.1, 0.9, 1.2))
    assert unsure.shortfalls["speed"].startswith("not provably faster than the original here")
    found = slower.summary()
    assert (found["pays"], found["short_of"], found["size_ratio"]) == (False, ["speed"], 2.0)
