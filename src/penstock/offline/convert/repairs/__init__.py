"""Repairs of known faults that exporters leave in ONNX models. Each file repairs one fault."""

from penstock.offline.convert.repairs.table import repair

__all__ = ["repair"]
