"""Turns the meanings of a model's inputs into hints for reading samples."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from penstock.inputs.meaning import Meaning, Role
from penstock.samples.hints import ImageForm, InputHints, SoundForm
from penstock.tensor import Array

_USUAL_RATES = {8_000, 16_000}


def hints_for(
    meanings: Mapping[str, Meaning],
    forward: Callable[[Mapping[str, Array]], Mapping[str, Array]] = lambda _: {},
    missing: frozenset[str] = frozenset(),
) -> InputHints:
    """The hints for a model whose inputs have these meanings. ``forward`` runs the model. ``missing`` is from ``takes_missing``."""
    by_role: dict[Role, list[str]] = {}
    for name, one in meanings.items():
        by_role.setdefault(one.role, []).append(name)
    states = {name: meanings[name].partner for name in by_role.get(Role.STATE, ()) if meanings[name].partner}
    images, sounds, rates = (by_role.get(role, []) for role in (Role.IMAGE, Role.AUDIO, Role.SAMPLING_RATE))
    return InputHints(
        states if len(states) < len(meanings) else {},
        forward,
        _images(images[0], meanings[images[0]]) if len(images) == 1 and not sounds else None,
        _sounds(sounds[0], rates, meanings) if len(sounds) == 1 and not images else None,
        missing,
    )


def _images(name: str, meaning: Meaning) -> ImageForm | None:
    if not {"C", "H", "W"} <= set(meaning.layout):
        return None
    low, high = (meaning.low or (0.0,))[0], (meaning.high or (1.0,))[0]
    return ImageForm(name, meaning.layout, low, high, meaning.reason)


def _sounds(name: str, rates: list[str], meanings: Mapping[str, Meaning]) -> SoundForm:
    known = {int(one) for one in meanings[rates[0]].choices} if rates else set()
    # A graph that compares the rate with one value distinguishes it from the other usual one.
    return SoundForm(name, rates[0] if rates else "", tuple(sorted(known | _USUAL_RATES if known else known)))
