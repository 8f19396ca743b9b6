"""Pack an existing model into a bundle unchanged, without optimisation or measurement."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.artifact import TITLES, Artifact, file_entries
from penstock.bundle.manifest import Manifest, ServingConfig, SourceModel, Variant, check_name, check_version
from penstock.bundle.pack import pack, place
from penstock.engines.registry import engines_for, get_engine
from penstock.errors import Unsupported
from penstock.resources import machine_facts
from penstock.rows.proof import unproven

_MAX_BATCH = 64
"""Maximum batch size of a model that was not tuned, if its rows are proven to be independent."""


def pack_model(
    model: str | Path | Artifact,
    target: str | Path,
    engine: str = "",
    options: Mapping[str, Any] = {},
    name: str = "",
    version: str = "1",
) -> Manifest:
    """Write a bundle with the single variant ``model`` to ``target`` and return its manifest.

    ``model`` may have any format that an engine runs, and any number of files. ``engine`` defaults to the format's usual engine,
    ``name`` to the target's file name without its suffix. The model is loaded once, with ``options``, to read its signature.

    Raises NotFound, Unsupported, InvalidArgument, InvalidModel, InvalidConfig, EngineUnavailable, AlreadyExists, ResourceExhausted.
    """
    target = Path(target)
    check_name(name or target.stem)
    check_version(version)
    artifact = model if isinstance(model, Artifact) else Artifact.from_file(model)
    known = engines_for(artifact.format)
    if not known:
        raise Unsupported(f"{TITLES[artifact.format]} models cannot be in a bundle", "serve the model file")
    if engine and engine not in known:
        hint = f"use {', '.join(known)}"
        raise Unsupported(f"engine '{engine}' does not run {TITLES[artifact.format]} models", hint)
    engine = engine or known[0]
    loaded = get_engine(engine).load(artifact, options)
    signature = loaded.signature
    loaded.unload()
    files, machine = place(artifact), machine_facts()
    main, *beside = files
    variant = Variant(engine, main, engine, "fp32", dict(options), format=artifact.format, beside=tuple(beside))
    max_batch = signature.smallest_batch if unproven(artifact, signature) else _MAX_BATCH
    manifest = Manifest(
        name=name or target.stem,
        signature=signature,
        variants=(variant,),
        serving=ServingConfig(variant.name, options.get("threads") or machine.cores, 1, max_batch),
        machine=machine,
        files=file_entries(files),
        provenance=artifact.provenance,
        version=version,
        source=SourceModel(artifact.digest, artifact.format, artifact.name),
    )
    pack(manifest, files, target)
    return manifest
