"""Build: a trained model in, a bundle out. The composition root of the offline half.

::

    model.onnx ─ optimise ─ calibrate ─ quantise ─ (plan) ─ tune ─ pack ─ digits.bundle

A compression plan is made only if the recipe gives it time.

Nothing appears at the target before the last step, which is atomic: a build that is killed leaves what was there.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np

from penstock.artifact import Artifact, Format, file_entries
from penstock.bundle.coded import encode
from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest, ServingConfig, SourceModel, Variant, check_version
from penstock.bundle.open import is_bundle
from penstock.bundle.pack import check_folder, code_variants, pack, place
from penstock.dataset import Dataset, check_dataset, load_dataset
from penstock.engines.registry import available_engines, engines_for, get_engine
from penstock.errors import (
    AlreadyExists,
    InvalidArgument,
    InvalidConfig,
    InvalidData,
    InvalidModel,
    PenstockError,
)
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.planner.plan import CompressionPlan, PlanOptions, known_key, plan
from penstock.offline.compress.planner.plan_store import check_plan
from penstock.offline.compress.ptq.drift import about
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.versions import Version, integer_versions
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import ORIGINAL
from penstock.offline.judge.sample_size import unproved
from penstock.offline.model_store import keep_models
from penstock.offline.optimize.base import OptimizeReport
from penstock.offline.optimize.model import self_contained
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import signature_of
from penstock.offline.tune.space import (
    BASELINE_ENGINE,
    Candidate,
    candidates,
    fallback,
    originals,
    thread_counts,
)
from penstock.offline.tune.tuner import Tuner, TuneResult, TuningLimits
from penstock.resources import MachineFacts, machine_facts, usable_memory
from penstock.storage.atomic import check_writable
from penstock.tensor import Array, Signature
from penstock.version import __version__

Data = str | Path | Mapping[str, Array]

_log = logging.getLogger(__name__)

_HELD_OUT = 0.2
_KEPT_SHARE, _KEPT_BYTES = 4, 4 << 30
"""Parsed models and sessions are kept in a quarter of the usable memory, or in this many bytes where that is unknown."""
_SHORT_CALL_MS = 1.0
_THROUGHPUT_ROWS = 16
_FEW_CALLS = 100
_PACKAGES = ("numpy", "onnx", "onnx_ir", "onnxruntime", "openvino")


class Compression(msgspec.Struct, frozen=True):
    """How to compress: the planner composes the methods under the recipe's contract."""

    budget_s: float = 600.0
    """Seconds in which steps are started. A step that is running then may take half as much again, at least 30 s, before it is
    stopped. Optimising, quantising and tuning take their own time."""
    epochs: float = 10.0
    """Passes over the calibration data of each training."""
    seed: int = 0
    folder: Path | None = None
    """Folder for the results of steps, from which an interrupted plan continues; None keeps nothing."""


class Recipe(msgspec.Struct, frozen=True):
    """How to build. The defaults suit most users."""

    contract: Contract = Contract()
    name: str = ""
    """Name under which the model is served; empty: the name of the bundle file without its suffix."""
    version: str = "1"
    """Version under which the model is served: a whole number from 1."""
    engines: tuple[str, ...] = ()
    """Engines to try; empty: all that are installed."""
    threads: tuple[int, ...] = ()
    """Thread counts to try; empty: one, all cores, and the powers of two between."""
    methods: tuple[RangeMethod, ...] = tuple(RangeMethod)
    """INT8 calibration methods to try."""
    careful: bool = True
    """Also try INT8 with equalised channels, ranges chosen tensor by tensor, and corrected biases."""
    objective: Literal["latency", "throughput", "size"] = "latency"
    """The goal: the time of a call of one row, rows per second in calls of sixteen rows, or the bytes of the bundle."""
    compression: Compression | None = None
    """Also compress the model; None: do not."""
    budget_s: float = 20.0
    """Seconds to spend on timing candidates at most; timing ends earlier once their speeds are known precisely."""
    overwrite: bool = False
    """Overwrite a target that is not a bundle; a bundle is always overwritten."""
    folder: bool = False
    """Write the bundle as a folder instead of one file."""


class BuildResult(msgspec.Struct, frozen=True):
    """The path and size of a bundle, and its manifest with the evidence."""

    bundle: Path
    bundle_bytes: int
    manifest: Manifest

    @property
    def evidence(self) -> Evidence:
        assert self.manifest.evidence is not None
        return self.manifest.evidence

    @property
    def chosen(self) -> CandidateRecord:
        return self.evidence.candidate(self.evidence.chosen)


def build(
    model: str | Path | Artifact,
    output: str | Path,
    calibrate: Data | None = None,
    evaluate: Data | None = None,
    recipe: Recipe = Recipe(),  # noqa: B008 - immutable
    on_progress: OnProgress = lambda *_: None,
) -> BuildResult:
    """Build ``model`` into a bundle at ``output``.

    ``calibrate`` and ``evaluate`` are npz files, or mappings, of arrays named after the model's inputs, one row per
    sample; ``labels`` are class numbers. Without ``calibrate`` INT8 is not tried; without ``evaluate`` a fifth of
    ``calibrate`` is held out for it. Raises InvalidModel, InvalidData, InvalidConfig, ContractUnmet, AlreadyExists,
    ResourceExhausted.
    """
    with keep_models(usable_memory() // _KEPT_SHARE or _KEPT_BYTES):
        return _build(model, Path(output), calibrate, evaluate, recipe, on_progress)


def _build(
    model: str | Path | Artifact,
    output: Path,
    calibrate: Data | None,
    evaluate: Data | None,
    recipe: Recipe,
    on_progress: OnProgress,
) -> BuildResult:
    _check_target(output, recipe)
    machine = machine_facts()
    engines, threads = _engines(recipe), _threads(recipe, machine)
    options = _plan_options(recipe, threads)
    original, source = _opened(model)
    signature = _signature(original)
    calibration, evaluation = _data(calibrate, evaluate, signature)
    _check_plan(original, calibration, options, recipe)

    on_progress("optimize", 0, 1)
    sample = evaluation.rows(0, signature.smallest_batch)
    fp32, optimization = optimize(original, [sample])
    on_progress("optimize", 1, 1)
    warnings = about(fp32, calibration, evaluation, recipe.contract.max_accuracy_loss, signature.smallest_batch)
    for warning in warnings:
        _log.warning("%s", warning)
    with _blaming(calibrate):
        anywhere = recipe.objective == "size"
        int8, notes = integer_versions(
            fp32, calibration, recipe.methods, recipe.careful, machine, on_progress, anywhere=anywhere
        )
    planned = _plan(fp32, original, calibration, options, recipe, on_progress)
    versions = _stored(_distinct([Version(fp32), *int8, *planned.versions]), recipe)
    tried = _lonely(candidates(versions, engines, threads, machine), recipe)
    rows = _THROUGHPUT_ROWS if recipe.objective == "throughput" and signature.batchable else signature.smallest_batch
    limits = TuningLimits(machine.memory_bytes, recipe.budget_s, rows, smallest=recipe.objective == "size")
    tuner = Tuner(originals(original, threads), tried, evaluation, recipe.contract, limits, on_progress)
    with _blaming(evaluate if evaluate is not None else calibrate):
        tuned = tuner.run(machine.cores)

    on_progress("pack", 0, 1)
    data = {"evaluate": evaluation.digest, **({"calibrate": calibration.digest} if calibration else {})}
    if calibration is not None and calibration.digest == evaluation.digest:
        notes = (*notes, "calibration and evaluation used the same samples: the accuracy of INT8 may be flattered")
    notes = (*notes, *warnings, *planned.notes, *_disappointed(planned, tuned), *_caveats(recipe, tuned))
    evidence = _evidence(recipe, tuned, optimization, data, notes)
    evidence = msgspec.structs.replace(evidence, attempts=planned.attempts)
    variants, files = _variants(tuned.chosen, fp32)
    manifest = Manifest(
        name=recipe.name or output.stem,
        signature=signature,
        variants=variants,
        serving=_serving(variants[0], tuned, recipe, machine),
        machine=machine,
        files=file_entries(files),
        provenance=tuned.chosen.artifact.provenance,
        evidence=evidence,
        version=recipe.version,
        source=source,
        tools={"penstock": __version__, **{package: version(package) for package in _PACKAGES if _installed(package)}},
    )
    if recipe.objective == "size":
        manifest, files = code_variants(manifest, files)
    pack(manifest, files, output, overwrite=True, folder=recipe.folder)
    on_progress("pack", 1, 1)
    return BuildResult(output, _size(output), manifest)


def _check_target(output: Path, recipe: Recipe) -> None:
    """Refuse now a target that ``pack`` would refuse at the end."""
    check_version(recipe.version)
    if not output.stem or output.name == "..":
        raise InvalidArgument(f"'{output}' cannot be the name of a bundle", "name a file, e.g. -o model.bundle")
    check_writable(output, or_folder=True)
    if not output.exists():
        return
    if is_bundle(output):
        if output.is_dir():
            check_folder(output)
        return
    if output.is_dir() and any(output.iterdir()):
        raise AlreadyExists(f"'{output}' is a folder that holds no bundle", "choose another name")
    if not recipe.overwrite and not output.is_dir():
        raise AlreadyExists(f"'{output}' exists and is not a bundle", "choose another name, or use --force")


def _opened(model: str | Path | Artifact) -> tuple[Artifact, SourceModel]:
    """The model with its external data embedded, and the identity of the one that was given."""
    given = model if isinstance(model, Artifact) else Artifact.from_file(model)
    return self_contained(given), SourceModel(given.digest, given.format, given.name)


@contextmanager
def _blaming(data: Data | None) -> Iterator[None]:
    """Report an error of a running model as unsuitable ``data``: the model did load."""
    try:
        yield
    except PenstockError as error:
        if type(error) is not PenstockError:
            raise
        name = f"'{data}'" if isinstance(data, str | Path) else "the data"
        raise InvalidData(f"{error.message}, on samples of {name}", "check that the values suit the model") from error


def _engines(recipe: Recipe) -> tuple[str, ...]:
    """The requested engines; raises at once if one is missing."""
    for name in recipe.engines:
        if Format.ONNX not in get_engine(name).formats:
            raise InvalidArgument(
                f"engine '{name}' does not run ONNX models", f"known: {', '.join(engines_for(Format.ONNX))}"
            )
    return recipe.engines or tuple(available_engines())


def _threads(recipe: Recipe, machine: MachineFacts) -> tuple[int, ...]:
    for count in recipe.threads:
        if count < 1:
            raise InvalidConfig(f"a thread count must be at least 1, not {count}")
        if count > machine.cores:
            raise InvalidConfig(f"{count} threads are more than this machine's {machine.cores} core(s)", "give fewer")
    return tuple(sorted(set(recipe.threads))) or thread_counts(machine.cores)


def _signature(original: Artifact) -> Signature:
    """The inputs and outputs of the model. ONNX Runtime refuses a corrupt file here, before any long work."""
    signature = signature_of(original)
    if not signature.inputs:
        raise InvalidModel("the model has no inputs: its answer is a constant", "export it with its inputs")
    return signature


def _data(calibrate: Data | None, evaluate: Data | None, signature: Signature) -> tuple[Dataset | None, Dataset]:
    calibration = _dataset(calibrate, signature) if calibrate is not None else None
    if evaluate is not None:
        return calibration, _dataset(evaluate, signature)
    if calibration is None:
        raise InvalidData(
            "there is no data to judge accuracy on", "give --evaluate FILE.npz, and --calibrate FILE.npz for INT8"
        )
    return calibration.split(_HELD_OUT, signature.smallest_batch)


def _dataset(data: Data, signature: Signature) -> Dataset:
    if isinstance(data, str | Path):
        return load_dataset(data, signature)
    return check_dataset({name: np.asarray(array) for name, array in data.items()}, signature)


def _caveats(recipe: Recipe, tuned: TuneResult) -> list[str]:
    """Notes on how to read the figures of the chosen candidate."""
    records = (tuned.baseline, *tuned.records)
    chosen = next(record for record in records if record.name == tuned.chosen.name)
    found = []
    if recipe.engines and chosen.engine not in recipe.engines:
        found.append(
            f"nothing on {', '.join(recipe.engines)} was provably faster: the original is served on {chosen.engine}"
        )
    if chosen.accuracy is not None and (chosen.precision != "fp32" or chosen.compression):
        found += unproved(chosen.accuracy, recipe.contract.max_accuracy_loss)
    if chosen.calls < _FEW_CALLS:
        found.append(f"the p99 is the longest of only {chosen.calls} calls; a larger --budget makes it firmer")
    widest = max((r for r in records if r.name.startswith(ORIGINAL)), key=lambda record: record.threads)
    if widest.threads > chosen.threads and widest.latency_ms and chosen.latency_ms:
        pace = widest.latency_ms / chosen.latency_ms
        found.append(
            f"held against the original at {widest.threads} threads instead of {chosen.threads}, it is {pace:.2f}x as fast"
        )
    return found


def _evidence(
    recipe: Recipe, tuned: TuneResult, optimization: OptimizeReport, data: dict[str, str], notes: tuple[str, ...]
) -> Evidence:
    return Evidence(
        max_accuracy_loss=recipe.contract.max_accuracy_loss,
        p99_ms=recipe.contract.p99_ms,
        rows_per_call=tuned.rows_per_call,
        baseline=tuned.baseline,
        chosen=tuned.chosen.name,
        candidates=tuned.records,
        conditions=tuned.conditions,
        baseline_latency=tuned.baseline_latency,
        optimization=msgspec.to_builtins(optimization),
        data=data,
        notes=notes,
    )


def _plan_options(recipe: Recipe, threads: Sequence[int]) -> PlanOptions | None:
    """The options of the plan, if the recipe asks for one. Raises InvalidConfig."""
    asked = recipe.compression
    if asked is None:
        return None
    target: Literal["size", "latency"] = "size" if recipe.objective == "size" else "latency"
    options = PlanOptions(recipe.contract, target, asked.budget_s, asked.epochs, min(threads), asked.seed)
    options.check()
    return options


def _check_plan(original: Artifact, data: Dataset | None, options: PlanOptions | None, recipe: Recipe) -> None:
    """Refuse a folder of another plan before all the work, and a plan without data."""
    if options is None or recipe.compression is None:
        return
    if data is None:
        raise InvalidData("there is no data to compress the model on", "give --train FILE.npz, some hundred samples")
    if recipe.compression.folder is not None:
        check_plan(recipe.compression.folder, known_key(original, data, options))


def _plan(
    fp32: Artifact,
    original: Artifact,
    data: Dataset | None,
    options: PlanOptions | None,
    recipe: Recipe,
    on_progress: OnProgress,
) -> CompressionPlan:
    """The plan for the optimised model; an empty one if compression was not asked for."""
    if options is None or recipe.compression is None or data is None:
        return CompressionPlan((), ())
    return plan(fp32, data, options, original=original, folder=recipe.compression.folder, on_progress=on_progress)


def _distinct(versions: Sequence[Version]) -> list[Version]:
    """Each model once: a plan may make what was there already."""
    return list({version.artifact.digest: version for version in reversed(versions)}.values())[::-1]


def _disappointed(planned: CompressionPlan, tuned: TuneResult) -> tuple[str, ...]:
    """A note if nothing that the plan kept stood its ground on the evaluation data."""
    ours = {version.compression for version in planned.versions}
    records = [record for record in tuned.records if record.compression in ours]
    if not records or any(record.status != "rejected" for record in records):
        return ()
    note = (
        f"the plan kept {len(planned.versions)} model(s), and the evaluation data rejected them all: give more training data, "
        "a quarter of which is what the plan decides on"
    )
    return (note,)


def _lonely(tried: list[Candidate], recipe: Recipe) -> list[Candidate]:
    """Where size is the aim, those that a bundle can hold alone: any other takes a model to fall back to, which is not small."""
    alone = [one for one in tried if one.engine == BASELINE_ENGINE and not one.requires]
    return alone if recipe.objective == "size" and alone else tried


def _stored(versions: Sequence[Version], recipe: Recipe) -> list[Version]:
    """Where size is the aim, each version with its bytes as coded, and none that needs another to fall back to."""
    if recipe.objective != "size":
        return list(versions)
    return [
        msgspec.structs.replace(version, stored_bytes=version.stored_bytes or len(encode(version.artifact.data)))
        for version in versions
        if not version.requires
    ]


def _serving(variant: Variant, tuned: TuneResult, recipe: Recipe, machine: MachineFacts) -> ServingConfig:
    threads = tuned.chosen.threads
    return ServingConfig(
        variant=variant.name,
        threads=threads,
        instances=instances(machine.cores, threads, tuned.latency[0].p50_ms),
        max_batch=tuned.max_batch,
        latency=tuned.latency,
        p99_ms=recipe.contract.p99_ms,
    )


def _variants(chosen: Candidate, fp32: Artifact) -> tuple[tuple[Variant, ...], dict[str, bytes]]:
    """The chosen variant, and behind it FP32 on ONNX Runtime, unless the chosen one runs on any machine itself."""
    kept = (
        [chosen]
        if not chosen.requires and chosen.engine == BASELINE_ENGINE
        else [chosen, fallback(fp32, chosen.threads)]
    )
    files: dict[str, bytes] = {}
    variants = []
    for one in kept:
        # Variants of the same model share its files, e.g. OpenVINO's FP32 and the FP32 to fall back to.
        placed = place(one.artifact)
        main, *beside = placed
        files |= placed
        variant = Variant(one.name, main, one.engine, one.precision, one.options, one.requires)
        variants.append(msgspec.structs.replace(variant, format=one.artifact.format, beside=tuple(beside)))
    return tuple(variants), files


def instances(cores: int, threads: int, call_ms: float) -> int:
    """Copies to run side by side: as many as there are cores for, but one where a call is so short that threads would
    spend more time on handing over than on running."""
    return 1 if call_ms < _SHORT_CALL_MS else max(1, cores // threads)


def _size(path: Path) -> int:
    if path.is_file():
        return path.stat().st_size
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def _installed(package: str) -> bool:
    try:
        version(package)
    except ImportError:
        return False
    return True
