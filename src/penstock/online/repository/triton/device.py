"""Whether the instances of a model run on the CPU or on a GPU. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.errors import InvalidConfig
from penstock.protocol.messages import Message, ModelInstanceGroup

ON_CPU = (ModelInstanceGroup.KIND_CPU, ModelInstanceGroup.KIND_MODEL)
"""Kinds whose instances run on the CPU always; with KIND_AUTO they do if the group names no GPU."""


def gpu_of(groups: Iterable[Message], gpus: int) -> int | None:
    """The number of the GPU that the instances of ``groups`` run on, None for the CPU. ``gpus`` is how many the engine has here.

    A group of KIND_GPU that names none means the first. Raises InvalidConfig that begins with the field.
    """
    wanted: set[int | None] = set()
    for number, group in enumerate(groups):
        path = f"'instance_group[{number}]"
        if group.kind != ModelInstanceGroup.KIND_GPU and (group.kind in ON_CPU or not group.gpus):
            wanted.add(None)
            continue
        if not gpus:
            field = "gpus' names devices" if group.gpus else "kind' is KIND_GPU"
            raise InvalidConfig(f"{path}.{field}, but instances run on the CPU only", "write KIND_CPU, or leave it out")
        for gpu in group.gpus or [0]:
            if not 0 <= gpu < gpus:
                raise InvalidConfig(f"{path}.gpus' names GPU {gpu}, and there are {gpus}", "they are counted from 0")
            wanted.add(gpu)
    if len(wanted) > 1:
        raise InvalidConfig("'instance_group' names several devices", "all instances of a model run on one")
    return next(iter(wanted), None)
