"""Write the JSON Schema of pipelines into the reference, from the declaration and the steps.

Run ``python docs/pipeline_schema.py`` after a step has changed; ``tests/docs/test_pipeline_schema.py`` fails while it is out of date.
"""

from __future__ import annotations

import json
from pathlib import Path

from penstock.pipeline.schema import schema

TARGET = Path(__file__).resolve().parent / "reference" / "pipeline.schema.json"


def text() -> str:
    """The content of the file."""
    return json.dumps(schema(), indent=1) + "\n"


if __name__ == "__main__":
    TARGET.write_text(text())
