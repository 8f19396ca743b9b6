"""How thin each layer becomes: chosen for all layers together, by measured milliseconds and the error of the model's outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from penstock.offline.compress.low_rank.convolution import SplitForm


class RankChoice(msgspec.Struct, frozen=True):
    """One way to run a layer."""

    ms: float
    """Measured, of the layer alone."""
    error: float
    """The estimated increase of the squared relative error of the model's outputs."""
    form: SplitForm | None = None
    """None: whole."""
    ranks: tuple[int, ...] = ()


def frontier(choices: Sequence[RankChoice]) -> list[RankChoice]:
    """The choices that no other beats in both time and error, from the slowest; none that another makes useless in a greedy
    descent, so that time is gained at a price that only rises (the lower convex hull).
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
    """Error added for each millisecond saved."""
    return (faster.error - slower.error) / (slower.ms - faster.ms)


def path(options: Sequence[Sequence[RankChoice]]) -> list[tuple[int, ...]]:
    """From all layers whole to all at their fastest, the cheapest step next: for each stop, a place on every layer's frontier.

    ``options`` holds each layer's frontier. The first stop takes the first choice of all.
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
    """The last of ``count`` stops that ``accept`` takes, by bisection: it is called on about log2(count) of them.

    Where acceptance comes and goes along the way, one stop that it takes and whose next tried it does not. Stop 0 is accepted unasked.
    """
    good, bad = 0, count
    while bad - good > 1:
        # The whole way first: often all of it is accepted.
        middle = count - 1 if bad == count and good == 0 else (good + bad) // 2
        if accept(middle):
            good = middle
        else:
            bad = middle
    return good
