"""Small bundles for tests."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.artifact import ProvenanceStep, file_entries
from penstock.bundle.manifest import Manifest, ServingConfig, Variant
from penstock.bundle.pack import pack
from penstock.measurement import LatencyPoint
from penstock.resources import MachineFacts
from penstock.testing import DOUBLER

MACHINE = MachineFacts(
    cpu="Test CPU",
    architecture="x86_64",
    isa=("avx2", "avx512_vnni"),
    cores=2,
    memory_bytes=1 << 30,
    numa_nodes=1,
    system="Linux 6",
    python="3.11.0",
)
FILES = {"model.onnx": b"model", "report/index.html": b"<p>"}


def manifest_for(files: Mapping[str, bytes], **changes: object) -> Manifest:
    """A manifest that lists ``files`` and serves ``model.onnx``, with ``changes`` to its fields."""
    manifest = Manifest(
        name="test",
        signature=DOUBLER,
        variants=(Variant("fp32", "model.onnx", "onnxruntime", "fp32", options={"threads": 1}),),
        serving=ServingConfig("fp32", 1, 1, max_batch=8, latency=(LatencyPoint(1, 0.1, 0.2),), p99_ms=5.0),
        machine=MACHINE,
        files=file_entries(files),
        provenance=(ProvenanceStep("fold", "0" * 64, {"level": 1}, {"nodes": 3}),),
        tools={"penstock": "0.1.0"},
    )
    return msgspec.structs.replace(manifest, **changes)


def packed(target: Path, files: Mapping[str, bytes] = FILES, folder: bool = False, **changes: object) -> Path:
    """``target``, after a bundle of ``files`` was packed there."""
    pack(manifest_for(files, **changes), files, target, folder=folder)
    return target
