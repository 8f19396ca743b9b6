"""What takes minutes to make and does not depend on the quiet of the machine, kept between runs."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from penstock.artifact import sha256
from penstock.resources import machine_facts

CACHE = Path(__file__).parent / ".cache"
T = TypeVar("T")


def kept(name: str, key: str, make: Callable[[Path], T]) -> T:
    """What ``make`` returned, in an earlier run on this machine with the same ``key`` or now; it may keep files in its folder."""
    folder = CACHE / f"{name}-{sha256(f'{key} {machine_facts()}'.encode())[:16]}"
    file = folder / "kept.pickle"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(".partial")
        partial.write_bytes(pickle.dumps(make(folder)))
        partial.replace(file)
    found: T = pickle.loads(file.read_bytes())
    return found
