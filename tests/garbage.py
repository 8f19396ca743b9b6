"""Whether objects are freed by reference counting alone, without the garbage collector."""

import gc
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def new_objects_only() -> Iterator[None]:
    """Disable the garbage collector, and let ``gc.collect`` visit only objects that are made from now on.

    The objects before stay frozen: ``gc.unfreeze`` would give the collector those of all imported modules, too.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def uncollected(*kinds: type) -> Iterator[Callable[[], Counter[str]]]:
    """Disable the garbage collector; gives a function that counts the objects of exactly ``kinds`` made since, by class name."""

    def count() -> Counter[str]:
        return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in kinds)

    gc.collect()
    gc.disable()
    before = count()
    try:
        yield lambda: count() - before
    finally:
        gc.enable()
