"""Joins chains of steps on pixels into one step with the same result to the bit, so that fewer passes over the pixels are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from penstock.pipeline.function import Function, Work
from penstock.pipeline.graph import PipelineStep
from penstock.pipeline.steps.base import Step

_PIXELS = "penstock.pipeline.steps.image."
"""The modules of steps on pixels. Their packages are imported only if a pipeline has such steps."""


def fused(function: Function, outputs: Sequence[str]) -> Function:
    """``function`` with joined steps, if only ``outputs`` are wanted. Values between joined steps no longer exist. The function itself
    if no steps can be joined.
    """
    if sum(type(work).__module__.startswith(_PIXELS) for work in function.work.values()) < 2:
        return function
    from penstock.pipeline.steps.image.fuse import FUSABLE, fuse  # noqa: PLC0415 - see ``_PIXELS``

    uses = Counter([*outputs, *(value for step in function.graph.steps for value in step.reads)])
    chains: list[list[PipelineStep]] = []
    by_result: dict[str, list[PipelineStep]] = {}
    for step in function.graph.steps:
        can_join = isinstance(function.work[step.name], FUSABLE) and step.condition is None
        chain = by_result.pop(step.inputs["value"], None) if can_join else None
        if chain is None:
            chains.append(chain := [])
        chain.append(step)
        result = step.outputs.get("value", "")
        if can_join and uses[result] == 1 and result not in outputs:
            by_result[result] = chain
    steps, work = [], dict[str, Work](function.work)
    for chain in chains:
        first, last = chain[0], chain[-1]
        parts = [one for step in chain if isinstance(one := function.work[step.name], Step)]
        if len(chain) > 1:
            name = "+".join(step.name for step in chain)
            work[name] = fuse(parts)
            first = PipelineStep(name, first.inputs, last.outputs)
        steps.append(first)
    if len(steps) == len(function.graph.steps):
        return function
    graph = msgspec.structs.replace(function.graph, steps=tuple(steps))
    return msgspec.structs.replace(function, graph=graph, work=work)
