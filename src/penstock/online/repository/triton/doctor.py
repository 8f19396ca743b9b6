"""Checks the models of a repository. Compares each model's configuration with its files and signature, and proposes corrections."""

from __future__ import annotations

import difflib
import itertools
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import msgspec

from penstock.config import did_you_mean
from penstock.engines.base import Finding, Severity
from penstock.engines.registry import get_engine
from penstock.errors import InvalidConfig, NotFound, PenstockError, ResourceExhausted
from penstock.online.repository.layout import versions_in
from penstock.online.repository.loading.labels import read_labels
from penstock.online.repository.loading.merging import unmerged
from penstock.online.repository.loading.scheduling import layout_of, sequencing
from penstock.online.repository.loading.warm_up_samples import read_samples
from penstock.online.repository.model_source import ModelSource
from penstock.online.repository.resolved_version import DEFAULT_MAX_BATCH, ResolvedVersion, find
from penstock.online.repository.triton.auto_complete import complete, difference, differences, signature_of
from penstock.online.repository.triton.backend import PYTHON, gpus_here
from penstock.online.repository.triton.check import examine
from penstock.online.repository.triton.rules import ON_CPU, error, gpu_of
from penstock.online.repository.triton.schema import number_of, to_message, typed
from penstock.online.repository.triton.text import config_path, read_config, to_text
from penstock.protocol.messages import Message, ModelConfig, ModelInstanceGroup
from penstock.storage.atomic import write_whole
from penstock.tensor import Signature, TensorSpec


class Diagnosis(msgspec.Struct, frozen=True):
    """The findings about one model."""

    model: str
    path: Path
    """The path of the configuration file. The file may be missing."""
    findings: list[Finding]
    before: str = ""
    """The file's text; empty if there is no file."""
    mended: str | None = None
    """The corrected text; None if nothing has to change, or no correction is known."""

    @property
    def is_sick(self) -> bool:
        return any(finding.severity is Severity.ERROR for finding in self.findings)

    def diff(self) -> str:
        """Unified diff from the file's text to the corrected text; without a file, the corrected text itself."""
        if self.mended is None or not self.before:
            return self.mended or ""
        before, after = self.before.splitlines(keepends=True), self.mended.splitlines(keepends=True)
        return "".join(difflib.unified_diff(before, after, self.path.name, f"{self.path.name} (mended)"))

    def write(self) -> None:
        """Replace the file atomically, and keep the old file as ``.bak``, ``.bak1`` …. Raises ResourceExhausted."""
        target = self.path.resolve()
        try:
            if self.before:
                copies = (target.with_name(f"{target.name}.bak{number or ''}") for number in itertools.count())
                shutil.copy2(target, next(copy for copy in copies if not copy.exists()))
        except OSError as wrong:
            raise ResourceExhausted(
                f"cannot write '{self.path}': {wrong.strerror}", "free space or change permissions"
            ) from wrong
        write_whole(target, (self.mended or "").encode())


def diagnose(models: Mapping[str, Path | PenstockError], name: str, config_name: str = "") -> Diagnosis:
    """Compare the configuration of ``models[name]``, a model of a ``Layout``, with the signature of its newest version.

    Does not load Python models, because this would run their code. Raises InvalidConfig for an invalid ``config_name``.
    """
    folder = models[name]
    if isinstance(folder, PenstockError):
        return Diagnosis(name, Path(name), [_finding(folder)])
    path = config_path(folder, config_name)
    try:
        given = read_config(folder, config_name)
    except InvalidConfig as wrong:
        return Diagnosis(name, path, [_finding(wrong)])
    before = path.read_text(encoding="utf-8-sig") if path.exists() else ""
    findings, resolved, signature = list(examine(given, name)), None, None
    gpus, whole = 0, given
    try:
        if given.HasField("ensemble_scheduling"):
            findings += _missing_parts(given, models)
        else:
            resolved = _newest(name, folder, given)
            gpus = gpus_here(resolved.backend.engine)
            gpu_of(given.instance_group, gpus)
    except PenstockError as wrong:
        findings.append(_finding(wrong))
    try:
        signature, reason = _signature(resolved) if resolved else (None, "")
        if reason:
            findings.append(Finding(Severity.WARNING, reason))
        is_python = resolved is not None and resolved.engine == PYTHON
        findings += differences(given, signature, decoupled=is_python and given.model_transaction_policy.decoupled)
        if not any(finding.severity is Severity.ERROR for finding in findings):
            whole = _check_whole(given, name, folder, resolved, signature, is_merged=not reason)
    except PenstockError as wrong:
        findings.append(_finding(wrong))
    # For a model without a file, propose the complete configuration as a starting point.
    mended = mend(given, name, signature, gpus) if before else whole if signature else given
    return Diagnosis(name, path, findings, before, to_text(mended) if mended != given else None)


def mend(given: Message, name: str, signature: Signature | None, gpus: int) -> Message:
    """``given``, corrected to match the model's signature and an engine that can use ``gpus`` GPUs."""
    config = ModelConfig()
    config.CopyFrom(given)
    if given.name:
        config.name = name
    if given.max_batch_size < 0:
        config.ClearField("max_batch_size")
    for group in config.instance_group:
        try:
            gpu_of([group], gpus)
        except InvalidConfig:
            group.kind = ModelInstanceGroup.KIND_CPU
        if group.kind in ON_CPU:
            group.ClearField("gpus")
        for field in ("secondary_devices", "profile"):
            group.ClearField(field)
    if signature is None:
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
    """Correct ``tensor`` to match the model's tensor of the same or a similar name. Returns False if the model has no such tensor."""
    by_name = {spec.name: spec for spec in specs}
    if tensor.name not in by_name:
        free = [name for name in by_name if name not in named]
        near = difflib.get_close_matches(tensor.name, free, n=1)
        if not near:
            return False
        tensor.name = near[0]
    spec = by_name[tensor.name]
    if any(difference(config, f"{field}[0]", tensor, spec)):
        tensor.data_type = number_of(spec.datatype)
        tensor.ClearField("reshape")
        tensor.dims[:] = spec.shape[1:] if config.max_batch_size > 0 else spec.shape
        if not tensor.dims:
            tensor.dims.append(1)
            tensor.reshape.SetInParent()
    return True


def _finding(wrong: PenstockError) -> Finding:
    return Finding(Severity.ERROR, wrong.message, wrong.hint)


def _missing_parts(given: Message, known: Collection[str]) -> Iterator[Finding]:
    for number, step in enumerate(given.ensemble_scheduling.step):
        if step.model_name not in known:
            path = f"ensemble_scheduling.step[{number}].model_name"
            yield error(path, f"is '{step.model_name}', which does not exist", did_you_mean(step.model_name, known))


def _newest(name: str, folder: Path, given: Message) -> ResolvedVersion:
    """Resolve the newest version, for one instance on the CPU."""
    versions = versions_in(folder)
    if not versions:
        raise NotFound(f"model '{name}' has no version", "put its files into a folder named by a number, e.g. '1'")
    for number in given.version_policy.specific.versions:
        if str(number) not in versions:
            raise NotFound(
                f"'version_policy.specific.versions' names {number}, which model '{name}' does not have",
                f"use one of: {', '.join(versions)}",
            )
    plain = ModelConfig()
    plain.CopyFrom(given)
    for field in ("instance_group", "dynamic_batching", "ensemble_scheduling", "model_warmup"):
        plain.ClearField(field)  # these fields do not affect the choice of the engine, and may be invalid
    return find(ModelSource(name, folder, {versions[-1]: folder / versions[-1]}, typed(plain)), versions[-1])


def _signature(resolved: ResolvedVersion) -> tuple[Signature | None, str]:
    """The model's signature, and the reason why its requests are not merged."""
    if resolved.engine == PYTHON:
        return None, ""
    model = get_engine(resolved.engine).load(resolved.artifact, resolved.options)
    try:
        return signature_of(model, resolved.given), unmerged(resolved, model)
    finally:
        model.unload()


def _check_whole(
    given: Message,
    name: str,
    folder: Path,
    resolved: ResolvedVersion | None,
    signature: Signature | None,
    *,
    is_merged: bool,
) -> Message:
    """Complete the configuration. Raises the errors that the server would raise for it and for the files that it names."""
    rows = DEFAULT_MAX_BATCH if signature is None or (signature.batchable and is_merged) else None
    config = complete(typed(given), name, resolved.platform if resolved else "ensemble", signature, rows, 1)
    layout_of(config)
    if signature is not None and config.sequence_batching is not None:
        sequencing(config, signature, folder, 1, merges=True)
    deque(read_samples(config, folder), 0)
    read_labels(config, folder)
    return to_message(config)
