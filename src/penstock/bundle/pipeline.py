"""The bundle of a pipeline: the declaration, the bundles of its models, its files and its golden samples.

::

    manifest.json     digests of all files
    pipeline.json     the declaration, with its labels
    models/NAME.bundle
    files/…           files that steps read, such as tokenizer.json, and Python steps
    golden.json       inputs and results of the examples; their files are in examples/
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from penstock.artifact import Artifact, local_path
from penstock.bundle.local import NO_LIMITS, DeviceLimits, LocalVariant, load_variant
from penstock.bundle.manifest import Manifest, PipelineManifest
from penstock.bundle.open import Bundle, Contents, as_model, may_be_bundle, read_bundle, read_inner
from penstock.errors import IntegrityError, InvalidConfig, NotFound, PermissionDenied, Unsupported
from penstock.pipeline import golden
from penstock.pipeline.check import checked
from penstock.pipeline.declaration import Declaration, parse
from penstock.pipeline.function import Function, ModelTraits
from penstock.pipeline.golden import Golden, ItemRunner
from penstock.pipeline.source import read_json
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.streaming.models import LocalModel, guarded

PIPELINE, GOLDEN = "pipeline.json", "golden.json"
FILES, EXAMPLES = "files/", "examples/"
_OTHER_TOLERANCE = 0.05
"""Tolerance of models that are not in FP32."""
# Created at import: msgspec is not safe if several threads first use a type at the same time.
_decode_golden = msgspec.json.Decoder(Golden).decode


class PipelineBundle:
    """An opened bundle of a pipeline, all verified. No code of the pipeline has run."""

    def __init__(self, contents: Contents, manifest: PipelineManifest) -> None:
        """Raises IntegrityError if the contents contradict each other."""
        self.path, _, self.digest, files = contents
        self.manifest = manifest
        self.models = {
            name: _inner(contents, name, packed.file, packed.digest) for name, packed in manifest.models.items()
        }
        # The files of the inner bundles are held by their own objects.
        inner = {packed.file for packed in manifest.models.values()}
        self.files: Mapping[str, bytes] = {path: data for path, data in files.items() if path not in inner}
        try:
            self.declaration: Declaration = parse(read_json(self.files[manifest.pipeline], manifest.pipeline))
            labels = {name: given for name, given in self.declaration.labels.items() if isinstance(given, tuple)}
            own = {path.removeprefix(FILES): data for path, data in self.files.items() if path.startswith(FILES)}
            self.resources = StepResources(labels, own)
            self.golden = _decode_golden(self.files[manifest.golden]) if manifest.golden else Golden((), {})
        except (InvalidConfig, msgspec.DecodeError, RecursionError) as error:
            raise IntegrityError(f"bundle '{self.path.name}' cannot be read: {error}") from None
        needed = {given.file for example in self.golden.examples for given in example.inputs.values() if given.file}
        if missing := sorted(needed - self.files.keys()):
            raise IntegrityError(f"bundle '{self.path.name}' lacks the file '{missing[0]}' of an example")

    @property
    def name(self) -> str:
        return self.manifest.name

    def function(self, allow_python: bool = False) -> Function:
        """The checked pipeline. Its Python steps run only with ``allow_python``. Raises IntegrityError if it is wrong."""
        facts = {name: facts_of(bundle) for name, bundle in self.models.items()}
        try:
            return checked(self.declaration, facts, self.resources, allow_python)
        except InvalidConfig as error:
            raise IntegrityError(
                f"bundle '{self.path.name}' contains a wrong pipeline: {error.message}", error.hint
            ) from None

    def check_python(self, allow_python: bool) -> None:
        """Raise PermissionDenied if the pipeline runs Python code, unless it is allowed."""
        if self.manifest.python and not allow_python:
            raise PermissionDenied(
                f"bundle '{self.path.name}' runs Python code: {', '.join(self.manifest.python)}",
                "look at it with `penstock inspect`; if you trust it, allow it with --allow-python or allow_python=True",
            )

    def replay(self, runner: ItemRunner, variants: Mapping[str, str]) -> None:
        """Run the golden samples. ``runner`` runs one of ``golden.replayed`` of the bundle's function, and its models ``variants``.
        Raises IntegrityError, naming the first step that differs.
        """
        tolerances = {name: tolerance_of(bundle, variants[name]) for name, bundle in self.models.items()}
        try:
            golden.replay(runner, self.golden, self.files, variants, tolerances)
        except IntegrityError as error:
            raise IntegrityError(f"bundle '{self.path.name}' is refused: {error.message}", error.hint) from error


def _inner(contents: Contents, name: str, file: str, digest: str) -> Bundle:
    """The bundle of the model ``name``, verified."""
    inner = read_inner(contents.path / file, contents.files[file])
    if inner.digest != digest:
        raise IntegrityError(
            f"model '{name}' of bundle '{contents.path.name}' does not match its digest", "copy it again"
        )
    try:
        return as_model(inner)
    except Unsupported as error:
        raise IntegrityError(
            f"model '{name}' of bundle '{contents.path.name}' is not a model: {error.message}"
        ) from None


def facts_of(bundle: Bundle) -> ModelTraits:
    """What a pipeline must know about the model of ``bundle``."""
    return ModelTraits(bundle.manifest.signature, bundle.manifest.serving.max_batch)


def tolerance_of(bundle: Bundle, variant: str) -> float:
    """The tolerance of golden samples for this variant of a model."""
    return golden.TOLERANCE if bundle.manifest.variant(variant).precision == "fp32" else _OTHER_TOLERANCE


def open_pipeline(path: str | Path) -> PipelineBundle:
    """Read and verify the bundle of a pipeline, and the bundles in it. Raises the errors of ``read_bundle``, and Unsupported if it is
    the bundle of a model.
    """
    opened = _opened(read_bundle(path))
    if isinstance(opened, Bundle):
        raise Unsupported(f"'{opened.path.name}' contains a model, not a pipeline", "name the bundle of a pipeline")
    return opened


def open_any(path: str | Path) -> Bundle | PipelineBundle | Artifact:
    """Open the bundle, model file or model folder at ``path``. Raises the errors of ``read_bundle`` and ``Artifact.from_file``."""
    path = local_path(path)
    if not path.exists():
        raise NotFound(f"no bundle or model '{path}'", "check the path, or make a bundle with `penstock build`")
    return _opened(read_bundle(path)) if may_be_bundle(path) else Artifact.from_file(path)


def _opened(contents: Contents) -> Bundle | PipelineBundle:
    if isinstance(contents.manifest, PipelineManifest):
        return PipelineBundle(contents, contents.manifest)
    return as_model(contents)


def load_models(models: Mapping[str, Bundle], limits: DeviceLimits = NO_LIMITS) -> dict[str, LocalVariant]:
    """Load all models in this process. Raises the errors of ``load_variant``; then no model stays loaded."""
    found: dict[str, LocalVariant] = {}
    try:
        for name, bundle in models.items():
            used_bytes = sum(one.memory_bytes for one in found.values())
            found[name] = load_variant(bundle, limits, used_bytes, shares_cores=True)
    except BaseException:
        for one in found.values():
            one.loaded.unload()
        raise
    return found


def local_models(models: Mapping[str, Bundle], loaded: Mapping[str, LocalVariant]) -> dict[str, LocalModel]:
    """The ``loaded`` models as parts of a pipeline, which several threads may call."""
    return {name: guarded(_local(models[name].manifest, one)) for name, one in loaded.items()}


def _local(manifest: Manifest, one: LocalVariant) -> LocalModel:
    calls = 0 if one.loaded.reentrant else 1
    return LocalModel(one.loaded.forward, manifest.serving.max_batch, calls, manifest.evidence is not None)
