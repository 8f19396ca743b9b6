"""Random declarations of pipelines, also with mistakes, as YAML, TOML and JSON: they are the same, and the JSON Schema agrees."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from declaration_forms import check_forms, check_meaning, mistaken
from pipeline_parts import catalogue
from random_pipelines import RandomPipeline
from tests.fuzz.mutator import Seed
from tests.fuzz.target import Target


class PipelineTextsTarget(Target):
    """A message is the seed of a declaration and its mistakes."""

    seeds: Sequence[Seed] = [(bytes([number]), b"-declaration") for number in range(16)]
    growth_factor = 4
    slice_runs = 30

    def run(self, data: bytes) -> None:
        random = Random(data)
        right = RandomPipeline(random, catalogue().traits).data
        for one in (right, mistaken(random, right), mistaken(random, right)):
            try:
                declaration = check_forms(one)
                error = "" if declaration is None else check_meaning(declaration)
                assert one is not right or (declaration is not None and not error), f"refused: {error}"
            except Exception as error:
                raise type(error)(f"{error}\n{one}") from error
