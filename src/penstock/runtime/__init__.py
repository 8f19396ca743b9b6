"""Runtime: opens models and pipelines in the calling process and runs them without a server."""

from penstock.runtime.loading import open
from penstock.runtime.model import MODELS, Model, row_axis
from penstock.runtime.pipeline import Pipeline

__all__ = ["MODELS", "Model", "Pipeline", "open", "row_axis"]
