"""Choose the ranks of all layers together, by measured milliseconds and the error of the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.offline.compress.low_rank.convolution import SplitForm


class RankChoice(msgspec.Struct, frozen=True):
    """One way to run a layer."""

    ms: float
    """Milliseconds, measured for the layer alone."""
    error: float
    """The estimated increase of the squared relative error of the model's outputs."""
    form: SplitForm | None = None
    """The form of the split; None: unsplit."""
    ranks: tuple[int, ...] = ()


def frontier(choices: Sequence[RankChoice]) -> list[RankChoice]:
    """The lower convex hull of the choices over time and error, starting with the slowest choice.

    Along the hull, each further millisecond saved adds more error than the previous one.
    """
    best: list[RankChoice] = []
    for choice in sorted(choices, key=lambda choice: (choice.error, choice.ms)):
        if best and choice.ms >= best[-1].ms:
            continue
        while len(best) > 1 and price(best[-2], best[-1]) >= price(best[-2], choice):
            best.pop()
        best.append(choice)
    return best


def price(slower: RankChoice, faster: RankChoice) -> float:
    """The error that a step adds for each millisecond that it saves."""
    return (faster.error - slower.error) / (slower.ms - faster.ms)


def path(options: Sequence[Sequence[RankChoice]]) -> list[tuple[int, ...]]:
    """The path from all layers unsplit to each layer at its fastest choice. Each step adds the least error per millisecond saved.

    ``options`` has the frontier of each layer. Each point of the path has one index into each frontier.
    """
    at = [0] * len(options)
    stops = [tuple(at)]
    while True:
        steps = [
            (price(choices[here], choices[here + 1]), layer)
            for layer, (choices, here) in enumerate(zip(options, at, strict=True))
            if here + 1 < len(choices)
        ]
        if not steps:
            return stops
        at[min(steps)[1]] += 1
        stops.append(tuple(at))


def furthest(count: int, accept: Callable[[int], bool]) -> int:
    """The last of ``count`` points that ``accept`` accepts, found by bisection with about log2(count) calls.

    Point 0 is always accepted. If ``accept`` is not monotone, the result is an accepted point whose successor is rejected.
    """
    good, bad = 0, count
    while bad - good > 1:
        # Try the last point first, which is often accepted.
        middle = count - 1 if bad == count and good == 0 else (good + bad) // 2
        if accept(middle):
            good = middle
        else:
            bad = middle
    return good
