"""The check-up of a model repository: each model's configuration held against its files and its signature, and mended."""

from __future__ import annotations

import difflib
import os
import shutil
from pathlib import Path

import msgspec

from penstock.artifact import Artifact
from penstock.bundle.open import open_bundle
from penstock.engines.base import Finding, Severity
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig, NotFound, PenstockError, ResourceExhausted
from penstock.online.repository.auto_complete import declared_tensors, difference, differences, number_of
from penstock.online.repository.backend import Backend, backend_of, engine_options
from penstock.online.repository.config_check import examine
from penstock.online.repository.config_text import config_path, read_config, shown_path, to_text
from penstock.online.repository.source import DEFAULT_MAX_BATCH
from penstock.protocol.messages import Message, ModelConfig, ModelInstanceGroup
from penstock.tensor import Signature, TensorSpec


class Diagnosis(msgspec.Struct, frozen=True):
    """What was found of one model."""

    model: str
    path: Path
    """Of the configuration's file, which may be missing."""
    findings: list[Finding]
    before: str = ""
    """The file's text, empty if there is none."""
    mended: str | None = None
    """What it should be, None if nothing is to be changed or nobody can tell."""

    @property
    def is_sick(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.findings)

    def diff(self) -> str:
        """From the text that is there to the mended one, or that itself if there is none; empty if there is nothing to mend."""
        if self.mended is None or not self.before:
            return self.mended or ""
        before, after = self.before.splitlines(keepends=True), self.mended.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.path.name, f"{self.path.name} (mended)"))

    def write(self) -> None:
        """Put what is mended in the file's place, whole or not at all, and keep the old one as ``.bak``. Raises ResourceExhausted."""
        target = self.path.resolve()
        partial = target.with_name(f".{target.name}.partial")
        try:
            if self.before:
                shutil.copy2(target, target.with_name(f"{target.name}.bak"))
            partial.write_text(self.mended or "", encoding="utf-8")
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise ResourceExhausted(f"cannot write '{self.path}': {error.strerror}", "free space, or rights") from error


def model_folders(repository: Path) -> list[Path]:
    """The models' folders, by name. Raises NotFound."""
    if not repository.is_dir():
        raise NotFound(f"no model repository '{repository}'", "name a folder that holds one folder for each model")
    return sorted(folder for folder in repository.iterdir() if folder.is_dir() and not folder.name.startswith("."))


def diagnose(folder: Path, config_name: str = "") -> Diagnosis:
    """Read the configuration of the model in ``folder``, load the newest version's signature, and hold one against the other.

    A Python model is not started, since that would run its code. Raises InvalidConfig for a bad ``config_name``.
    """
    path = config_path(folder, config_name)
    try:
        given = read_config(folder, config_name)
    except InvalidConfig as error:
        return Diagnosis(folder.name, path, [Finding(Severity.ERROR, error.message, error.hint)])
    before = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    findings, backend, signature = list(examine(given, folder.name)), None, None
    if not given.HasField("ensemble_scheduling"):
        try:
            version = _newest(folder)
            backend = backend_of(given, folder.name, os.listdir(version), shown_path(folder, path))
            signature = _signature(given, folder.name, backend, version / backend.filename)
        except PenstockError as error:
            findings.append(Finding(Severity.ERROR, error.message, error.hint))
    decoupled = given.model_transaction_policy.decoupled and (backend is None or backend.engine == "python")
    findings += differences(given, signature, decoupled=decoupled)
    mended = mend(given, folder.name, backend, signature) if before else _written(folder.name, backend, signature)
    return Diagnosis(folder.name, path, findings, before, to_text(mended) if mended != given else None)


def mend(given: Message, name: str, backend: Backend | None, signature: Signature | None) -> Message:
    """``given`` without what contradicts the model, or asks for devices that are not here."""
    config = ModelConfig()
    config.CopyFrom(given)
    if given.name:
        config.name = name
    if given.max_batch_size < 0:
        config.ClearField("max_batch_size")
    for group in config.instance_group:
        if group.kind == ModelInstanceGroup.KIND_GPU:
            group.kind = ModelInstanceGroup.KIND_CPU
        for field in ("gpus", "secondary_devices", "profile"):
            group.ClearField(field)
    if signature is None or (backend is not None and backend.engine == "python"):
        return config
    if any("'max_batch_size'" in finding.message for finding in differences(config, signature)):
        config.max_batch_size = 0
    for field, specs in (("input", signature.inputs), ("output", signature.outputs)):
        tensors = list(getattr(config, field))
        kept = [tensor for tensor in tensors if _is_mended(config, field, tensor, specs, [one.name for one in tensors])]
        config.ClearField(field)
        getattr(config, field).extend(kept)
    return config


def _is_mended(config: Message, field: str, tensor: Message, specs: tuple[TensorSpec, ...], named: list[str]) -> bool:
    """Make ``tensor`` what the model has under its name or the one that was meant; False if the model has no such tensor."""
    by_name = {spec.name: spec for spec in specs}
    if tensor.name not in by_name:
        free = [name for name in by_name if name not in named]
        near = difflib.get_close_matches(tensor.name, free, n=1)
        if not near:
            return False
        tensor.name = near[0]
    spec = by_name[tensor.name]
    if any(difference(config, f"{field}[0]", tensor, spec)):
        _describe(config, tensor, spec)
    return True


def _describe(config: Message, tensor: Message, spec: TensorSpec) -> None:
    tensor.name, tensor.data_type = spec.name, number_of(spec.datatype)
    tensor.ClearField("reshape")
    tensor.dims[:] = spec.shape[1:] if config.max_batch_size > 0 else spec.shape
    if not tensor.dims:
        tensor.dims.append(1)
        tensor.reshape.SetInParent()


def _written(name: str, backend: Backend | None, signature: Signature | None) -> Message:
    """A configuration that says what would be filled in anyway, to begin with."""
    if backend is None or signature is None:
        return ModelConfig()
    config = ModelConfig(name=name, backend=backend.name)
    config.max_batch_size = DEFAULT_MAX_BATCH if signature.batchable else 0
    for field, specs in (("input", signature.inputs), ("output", signature.outputs)):
        for spec in specs:
            if spec.shape or config.max_batch_size:  # the schema has no scalars
                _describe(config, getattr(config, field).add(), spec)
    if config.max_batch_size:
        config.dynamic_batching.SetInParent()
    return config


def _newest(folder: Path) -> Path:
    versions = [each for each in folder.iterdir() if each.is_dir() and each.name.isdecimal() and each.name.isascii()]
    if not versions:
        raise NotFound(f"model '{folder.name}' has no version", "put its files in a folder with a number, as '1'")
    return max(versions, key=lambda each: int(each.name))


def _signature(given: Message, name: str, backend: Backend, path: Path) -> Signature | None:
    if backend.engine == "python":
        return None
    if not backend.engine:
        return open_bundle(path).manifest.signature
    engine, options = get_engine(backend.engine), engine_options(given, name, backend.engine)
    if getattr(engine, "takes_signature", False):
        options["inputs"], options["outputs"] = declared_tensors(given)
    model = engine.load(Artifact.from_file(path), options)
    try:
        return model.signature
    finally:
        model.unload()
