from collections.abc import Iterator

import pytest

from penstock.pipeline.streaming.step_process import StepProcess


@pytest.fixture(scope="package")
def process() -> Iterator[StepProcess]:
    """A process that runs steps, ready."""
    process = StepProcess()
    try:
        process.wait()
        yield process
    finally:
        process.close()
        process.close()  # idempotent
