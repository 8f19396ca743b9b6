"""Build: turns a trained model into a bundle. This module connects the parts of the offline half.

::

    model ─ (convert) ─ optimise ─ calibrate ─ quantise ─ (plan) ─ tune ─ pack ─ digits.bundle

The plan is optional: see ``Recipe.compression``. The last step writes the bundle atomically, so a build that is killed leaves an
earlier bundle intact.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Literal

import msgspec

from penstock.artifact import Artifact, Format, file_entries
from penstock.bundle.evidence import CandidateRecord, Evidence
from penstock.bundle.manifest import Manifest, ServingConfig, SourceModel, Variant
from penstock.bundle.pack import code_variants, pack, place
from penstock.bundle.target import check_target
from penstock.bundle.titles import precision_title
from penstock.dataset import Dataset
from penstock.engines.registry import available_engines, engines_for, get_engine
from penstock.errors import (
    InvalidArgument,
    InvalidConfig,
    InvalidData,
    InvalidModel,
)
from penstock.offline.build_data import blaming, read_data
from penstock.offline.compress.fp32.fp32 import IN_FP32, converted
from penstock.offline.compress.keep_float import keep_float
from penstock.offline.compress.method import OnProgress
from penstock.offline.compress.planner.gain import stored_bytes
from penstock.offline.compress.planner.plan import CompressionPlan, PlanOptions, known_key, plan
from penstock.offline.compress.planner.plan_store import check_plan
from penstock.offline.compress.ptq.drift import about
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.compress.versions.versions import Version, derived_versions
from penstock.offline.compress.versions.ways import IntegerChoice
from penstock.offline.convert.cached import read_model
from penstock.offline.deadline import BuildDeadline
from penstock.offline.judge.contract import Contract, is_faster
from penstock.offline.judge.judge import Judge, coupling_notes, judging
from penstock.offline.judge.overlap import overlap_notes
from penstock.offline.judge.sample_size import unproved
from penstock.offline.model_store import keep_models
from penstock.offline.optimize.base import OptimizeReport
from penstock.offline.optimize.model import check_one_file, self_contained
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import signature_of
from penstock.offline.synthetic import synthetic_notes
from penstock.offline.tune.look import make_look
from penstock.offline.tune.space import (
    BASELINE_ENGINE,
    Candidate,
    candidates,
    fallback,
    instances,
    originals,
    thread_counts,
)
from penstock.offline.tune.tuner import Tuner, TuneResult, TuningLimits
from penstock.resources import MachineFacts, machine_facts
from penstock.samples.open import Data
from penstock.tensor import Signature
from penstock.version import __version__

_log = logging.getLogger(__name__)

_KEPT_BYTES = 256 << 20
"""Maximum size of the cache for parsed models and sessions."""
_THROUGHPUT_ROWS, _FEW_CALLS = 16, 100
_LOOK_S = 1.0
"""Seconds for a first look at the speed of INT8, per layout and engine, but at least three loads."""
_TIMING_PART = 6
"""Part of the budget for timing candidates."""
_COMPARED_SHARE = 0.02
"""Maximum part of the budget for comparing calibration and evaluation data."""
_PACKAGES = ("numpy", "onnx", "onnx_ir", "onnxruntime", "openvino")


class Compression(msgspec.Struct, frozen=True):
    """Options of the compression plan, which runs under the recipe's contract."""

    budget_s: float = 600.0
    """Time limit in seconds for starting steps. A step that is running at the limit may take extra time: half the limit, or 30 s if
    that is longer. Optimising, quantising and tuning are not included."""
    epochs: float = 10.0
    """Passes over the calibration data in each training run."""
    seed: int = 0
    folder: Path | None = None
    """Folder that stores finished steps, so that an interrupted plan can continue. None: steps are not stored."""


class Recipe(msgspec.Struct, frozen=True):
    """Options of a build. The defaults suit most users."""

    contract: Contract = Contract()
    name: str = ""
    """Name of the model on the server. Empty: the name of the bundle file without its suffix."""
    version: str = "1"
    """Version of the model on the server: a whole number of at least 1."""
    engines: tuple[str, ...] = ()
    """Engines to try. Empty: all installed engines."""
    threads: tuple[int, ...] = ()
    """Thread counts to try. Empty: 1, the number of cores, and the powers of two between them."""
    methods: tuple[RangeMethod, ...] = tuple(RangeMethod)
    """INT8 calibration methods to try."""
    careful: bool = True
    """Also try INT8 with equalised channels, ranges chosen for each tensor, and corrected biases."""
    dynamic: bool = True
    """If matrix products hold most of the weights, also try dynamic INT8 (ranges computed at run time). Rows of a call then influence
    each other, so this is tried only for calls of one row (objective ``latency``), besides calibrated INT8."""
    objective: Literal["latency", "throughput", "size"] = "latency"
    """The quantity to optimise: latency of calls with one row, throughput of calls with sixteen rows, or size of the bundle."""
    compression: Compression | None = None
    """Options of the compression plan. None: no plan is made."""
    keep_float: tuple[str, ...] = ()
    """Patterns of names of operators and tensors to keep in float; ``*`` stands for any text."""
    synthetic: int | None = None
    """Without data, calibrate on this many synthetic samples, and judge on as many others. 0: as many as fit in 64 MiB, from 16 to
    256. Accuracy then means fidelity to the original on these samples."""
    budget_s: float = 120.0
    """Seconds for the whole build, without the compression plan. The step that is running when they are over is finished, and the best
    candidate so far is packed. Most builds need less time."""
    timing_s: float | None = None
    """Maximum seconds for timing candidates, but each pair is loaded at least three times. None: a sixth of the budget."""
    overwrite: bool = False
    """Overwrite an existing file or folder that is not a bundle. An existing bundle is always overwritten."""
    folder: bool = False
    """Write the bundle as a folder instead of one file."""


class BuildResult(msgspec.Struct, frozen=True):
    """The result of a build: the path and size of the bundle, and its manifest with the evidence."""

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
    deadline: BuildDeadline | None = None,
) -> BuildResult:
    """Build ``model`` into a bundle at ``output``. Any source of ``convert`` may be given; it is converted first.

    ``calibrate`` and ``evaluate`` are samples of any kind: files, folders, mappings of arrays, or iterables (``samples/open.py``); an
    array named ``labels`` contains the labels. Without ``calibrate``, INT8 is not tried. Without ``evaluate``, a fifth of
    ``calibrate`` is held out for evaluation. By default, the build ends after ``recipe.budget_s``. With ``deadline``, another thread
    or a signal handler can end it earlier, with the best candidate so far. Raises InvalidModel, InvalidData, InvalidConfig,
    ContractUnmet, AlreadyExists, ResourceExhausted.
    """
    with keep_models(_KEPT_BYTES):
        return _build(
            model, Path(output), calibrate, evaluate, recipe, on_progress, deadline or BuildDeadline(recipe.budget_s)
        )


def _build(
    model: str | Path | Artifact,
    output: Path,
    calibrate: Data | None,
    evaluate: Data | None,
    recipe: Recipe,
    on_progress: OnProgress,
    deadline: BuildDeadline,
) -> BuildResult:
    check_target(output, recipe.name or output.stem, recipe.version, overwrite=recipe.overwrite, folder=recipe.folder)
    machine = machine_facts()
    engines, threads = _engines(recipe), _threads(recipe, machine)
    known = _plan_options(recipe, threads)
    given = read_model(model, on_progress)
    original, source = self_contained(given), SourceModel(given.digest, given.format, given.name)
    signature = _signature(original)
    on_progress("read", 0, 1)
    calibration, evaluation = read_data(
        original, calibrate, evaluate, recipe.contract, recipe.synthetic, (recipe.compression or Compression()).seed
    )
    _check_plan(original, calibration, known, recipe)
    with blaming(evaluate if evaluate is not None else calibrate):
        # Reject labels or a metric that do not fit the model before any long work.
        judge = Judge(original, evaluation, min(threads), contract=recipe.contract)
    compared = _COMPARED_SHARE * deadline.budget_s * evaluation.count / max(deadline.used_s, 1e-9)
    rows = _timed_rows(recipe, signature, evaluation)
    warnings = _warned((*judging(judge.reference, recipe.contract), *coupling_notes(judge.coupling)))
    # One cut between two classes holds for every candidate, on whatever samples it is judged.
    recipe = msgspec.structs.replace(
        recipe, contract=judge.contract, synthetic=0 if recipe.synthetic is None else evaluation.count
    )

    on_progress("optimize", 0, 1)
    optimized, optimization = optimize(original, [call.inputs for call in evaluation.mix(signature.smallest_batch)])
    fp32, unconverted = converted(optimized, original, evaluation)
    on_progress("optimize", 1, 1)
    seen, overlap = overlap_notes(evaluation, calibration)
    warnings += _warned(
        (*about(fp32, calibration, evaluation, signature.smallest_batch, compared), *overlap, *unconverted)
    )
    with blaming(calibrate):
        look = make_look(engines, evaluation.mix(rows), min(threads), _LOOK_S) if recipe.objective != "size" else None
        start, choice = keep_float(fp32, original, recipe.keep_float), _integer_choice(recipe, engines)
        made, notes = derived_versions(start, calibration, choice, machine, on_progress, look=look, deadline=deadline)
    with deadline.paused():
        planned = _plan(fp32, original, calibration, _plan_options(recipe, threads), recipe, on_progress)
    tried = candidates(_versions(optimized, fp32, (*made, *planned.versions), recipe), engines, threads, machine)
    with blaming(evaluate if evaluate is not None else calibrate):
        tuned = _tuner(originals(original, threads), tried, judge, rows, recipe, deadline, on_progress).run(
            machine.cores
        )
    notes = (*notes, *warnings, *tuned.notes, *planned.notes, *_disappointed(planned, tuned), *_caveats(recipe, tuned))
    data = {"evaluate": evaluation.digest, **({"calibrate": calibration.digest} if calibration else {})}
    variants, files = _variants(tuned.chosen, optimized)
    manifest = Manifest(
        name=recipe.name or output.stem,
        signature=signature,
        variants=variants,
        serving=_serving(tuned, recipe, machine),
        machine=machine,
        files=file_entries(files),
        provenance=tuned.chosen.artifact.provenance,
        evidence=_evidence(recipe, tuned, planned, optimization, data, notes, seen),
        version=recipe.version,
        source=source,
        tools={"penstock": __version__, **{name: version(name) for name in _PACKAGES if find_spec(name)}},
    )
    return _written(manifest, files, output, recipe, on_progress)


def _written(
    manifest: Manifest, files: Mapping[str, bytes], output: Path, recipe: Recipe, on_progress: OnProgress
) -> BuildResult:
    on_progress("pack", 0, 1)
    if recipe.objective == "size":
        manifest, files = code_variants(manifest, files)
    pack(manifest, files, output, overwrite=True, folder=recipe.folder)
    on_progress("pack", 1, 1)
    written = [output] if output.is_file() else [file for file in output.rglob("*") if file.is_file()]
    return BuildResult(output, sum(file.stat().st_size for file in written), manifest)


def _tuner(
    bases: Sequence[Candidate],
    tried: Sequence[Candidate],
    judge: Judge,
    rows: int,
    recipe: Recipe,
    deadline: BuildDeadline,
    on_progress: OnProgress,
) -> Tuner:
    timing_s = deadline.budget_s / _TIMING_PART if recipe.timing_s is None else recipe.timing_s
    limits = TuningLimits(min(timing_s, deadline.left_s), rows, recipe.objective == "size", deadline)
    return Tuner(bases, tried, judge, limits, on_progress)


def _warned(notes: tuple[str, ...]) -> tuple[str, ...]:
    """``notes``, after printing them as warnings."""
    for note in notes:
        _log.warning("%s", note)
    return notes


def _engines(recipe: Recipe) -> tuple[str, ...]:
    """The engines to try. Raises EngineUnavailable, InvalidArgument."""
    for name in recipe.engines:
        if Format.ONNX not in get_engine(name).formats:
            raise InvalidArgument(
                f"engine '{name}' does not run ONNX models", f"use one of: {', '.join(engines_for(Format.ONNX))}"
            )
    engines = recipe.engines or tuple(available_engines())
    # When optimising for size, a variant for another engine is too large, because it needs a fallback variant.
    return (BASELINE_ENGINE,) if recipe.objective == "size" and BASELINE_ENGINE in engines else engines


def _threads(recipe: Recipe, machine: MachineFacts) -> tuple[int, ...]:
    for count in recipe.threads:
        if not 1 <= count <= machine.cores:
            raise InvalidConfig(
                f"a thread count must be from 1 to {machine.cores}, the number of cores of this machine, got {count}",
                "change --threads",
            )
    return tuple(sorted(set(recipe.threads))) or thread_counts(machine.cores)


def _signature(original: Artifact) -> Signature:
    """The inputs and outputs of the model. ONNX Runtime rejects a corrupt file here, before any long work."""
    signature = signature_of(original)
    if not signature.inputs:
        raise InvalidModel("the model has no inputs, so its output is constant", "export it with inputs")
    return signature


def _integer_choice(recipe: Recipe, engines: tuple[str, ...]) -> IntegerChoice:
    return IntegerChoice(
        recipe.methods,
        recipe.careful,
        dynamic=recipe.dynamic and recipe.objective == "latency",
        smallest=recipe.objective == "size",
        engines=engines,
    )


def _timed_rows(recipe: Recipe, signature: Signature, evaluation: Dataset) -> int:
    """The number of samples in a timed call."""
    is_batched = recipe.objective == "throughput" and signature.batchable and evaluation.joins
    return _THROUGHPUT_ROWS if is_batched else signature.smallest_batch


def _caveats(recipe: Recipe, tuned: TuneResult) -> list[str]:
    """Warnings about the measurements of the chosen candidate."""
    records = (tuned.baseline, *tuned.records)
    chosen = next(record for record in records if record.name == tuned.chosen.name)
    found = [*synthetic_notes(recipe.synthetic or 0)]
    if recipe.engines and chosen.engine not in recipe.engines:
        found.append(
            f"no candidate on {', '.join(recipe.engines)} is provably faster than the original, which is served on {chosen.engine}"
        )
    if chosen.accuracy is not None and (chosen.precision != "fp32" or chosen.compression):
        found += unproved(chosen.accuracy, recipe.contract.limit(chosen.accuracy.metric))
    if chosen.precision != "fp32" and chosen.speedup is not None and not is_faster(chosen.speedup):
        found.append(
            f"{precision_title(chosen.precision)} was chosen for its size: on this machine it has {chosen.speedup.value:.2f}x the "
            f"original's speed (95 %: {chosen.speedup.low:.2f} … {chosen.speedup.high:.2f})"
        )
    if tuned.chosen.mixes_rows:
        found.append(
            "dynamic INT8 was chosen: the outputs for a row depend on the other rows of its request, and the server does not merge "
            "requests; --method best does not try it"
        )
    if recipe.keep_float:
        found.append(f"operators and tensors kept in float by --keep-float: {', '.join(recipe.keep_float)}")
    if recipe.contract.trust_labels:
        found.append(
            "the labels were accepted as they are: whether the original is better than chance on them is unknown"
        )
    if chosen.calls < _FEW_CALLS:
        found.append(f"the p99 is the maximum of only {chosen.calls} calls; a larger --budget allows more calls")
    return found


def _evidence(
    recipe: Recipe,
    tuned: TuneResult,
    planned: CompressionPlan,
    optimization: OptimizeReport,
    data: dict[str, str],
    notes: tuple[str, ...],
    seen_rows: int,
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
        attempts=planned.attempts,
        metric=tuned.choice.metric.name,
        metric_outputs=tuned.choice.outputs,
        metric_reason=tuned.choice.reason,
        metric_cut=tuned.choice.cut,
        max_output_error=recipe.contract.max_output_error if isfinite(recipe.contract.max_output_error) else None,
        prove_accuracy=recipe.contract.prove_accuracy,
        trust_labels=recipe.contract.trust_labels,
        seen_rows=seen_rows,
        synthetic=recipe.synthetic or 0,
        by_size=tuned.by_size,
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
    """Before any work, raise an error if the plan has no data, or if its folder holds another plan."""
    if options is None or recipe.compression is None:
        return
    check_one_file(original, "a compression plan")
    if data is None:
        raise InvalidData("compressing the model requires data", "give --train DATA with a few hundred samples")
    data.check_stacks("the compression plan")
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
    """The plan for the optimised model; empty if the recipe has no compression."""
    if options is None or recipe.compression is None or data is None:
        return CompressionPlan((), ())
    return plan(fp32, data, options, original=original, folder=recipe.compression.folder, on_progress=on_progress)


def _disappointed(planned: CompressionPlan, tuned: TuneResult) -> tuple[str, ...]:
    """A note if every model that the plan kept failed the contract on the evaluation data."""
    ours = {version.compression for version in planned.versions}
    records = [record for record in tuned.records if record.compression in ours]
    if not records or any(record.status != "rejected" for record in records):
        return ()
    return (
        f"the plan kept {len(planned.versions)} model(s), but all failed the contract on the evaluation data: give more training data",
    )


def _versions(optimized: Artifact, fp32: Artifact, made: Sequence[Version], recipe: Recipe) -> list[Version]:
    """The models to tune, without duplicates. For the objective ``size``, models that need a fallback are left out."""
    found = [Version(optimized), Version(fp32, compression=IN_FP32), *made]
    distinct = list({version.artifact.digest: version for version in reversed(found)}.values())[::-1]
    if recipe.objective != "size":
        return distinct
    kept = [one for one in distinct if not one.requires]
    sizes = [one.stored_bytes or stored_bytes(one.artifact, "size") for one in kept]
    return [msgspec.structs.replace(one, stored_bytes=size) for one, size in zip(kept, sizes, strict=True)]


def _serving(tuned: TuneResult, recipe: Recipe, machine: MachineFacts) -> ServingConfig:
    return ServingConfig(
        variant=tuned.chosen.name,
        threads=tuned.chosen.threads,
        instances=instances(machine.cores, tuned.chosen.threads, tuned.latency[0].p50_ms),
        max_batch=tuned.max_batch,
        latency=tuned.latency,
        p99_ms=recipe.contract.p99_ms,
    )


def _variants(chosen: Candidate, optimized: Artifact) -> tuple[tuple[Variant, ...], dict[str, bytes]]:
    """The variants of the bundle, and their files. Unless the chosen variant runs anywhere, the optimised original on ONNX Runtime is
    the fallback.
    """
    runs_anywhere = not chosen.requires and chosen.engine == BASELINE_ENGINE
    kept = [chosen] if runs_anywhere else [chosen, fallback(optimized, chosen.threads)]
    files: dict[str, bytes] = {}
    variants = []
    for one in kept:
        placed = place(one.artifact)  # variants of the same model share their files
        main, *beside = placed
        files |= placed
        variant = Variant(one.name, main, one.engine, one.precision, one.options, one.requires)
        variants.append(msgspec.structs.replace(variant, format=one.artifact.format, beside=tuple(beside)))
    return tuple(variants), files
