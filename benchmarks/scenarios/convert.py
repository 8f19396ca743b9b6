"""Conversion of the zoo (`benchmarks/zoo`): models of all frameworks whose packages are installed, with random weights. A certificate
says that the ONNX model gave the source's outputs in all calls, within the rounding error that double precision shows. Models of which
the zoo says that they cannot be converted must fail with a diagnosis. A false alarm is a failed comparison of a model that was
converted correctly, with any of five seeds. Faults are those of `benchmarks/faults.py`, injected one at a time. Times are ratios of
CPU seconds to those of the loader and the exporter alone, each in a process of its own, in turns.
"""

from __future__ import annotations

import contextlib
import io
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx

from benchmarks.convert_once import MODES
from benchmarks.fault_graphs import GRAPHS, make
from benchmarks.faults import FAULTS, inject
from benchmarks.onnx_source import OnnxSource
from benchmarks.pairs import geometric_mean
from benchmarks.results import Row, claim, fact, skipped
from benchmarks.rounds import interleave, ratio
from benchmarks.servers import penstock, split_cores
from benchmarks.zoo.catalog import frameworks, missing, models
from benchmarks.zoo.model import ZooModel, keywords
from penstock.artifact import Artifact
from penstock.errors import PenstockError
from penstock.inputs.meanings import meanings_of
from penstock.measurement import Interval
from penstock.offline.build import Recipe, build
from penstock.offline.convert.base import ConvertOptions, FrameworkModel
from penstock.offline.convert.convert import Conversion, ParityFailed, convert
from penstock.offline.convert.parity.cases import Maker
from penstock.offline.convert.parity.nodes import Nodes
from penstock.offline.convert.parity.parity import certify
from penstock.offline.convert.parity.tolerance import UNITS
from penstock.offline.convert.registry import get_converter
from penstock.offline.convert.repairs import repair
from penstock.offline.convert.source import resolve
from penstock.tensor import Array

_SEEDS = {True: 1, False: 5}
_PLACES = {True: 1, False: 2}
_SKIPPED = "without effect"
_EFFECT_SEED = 1_000
"""Seed of the calls that show whether a fault has an effect. It differs from those of the comparison, so that a fault without effect
in the calls of the comparison counts as missed."""
_KINDS = 30
"""Number of kinds of faults that the campaign must have."""
_ROUNDS = {True: 2, False: 3}
_CERTIFIED, _SLOWDOWN = 95.0, 1.5
_OUTPUT_ERROR = 1e-3
"""Relative to the largest value of the output."""
_RECIPE = Recipe(budget_s=10.0, synthetic=16, methods=(), name="model")
"""Without INT8, which may differ from the original within the contract."""
_SHOWN = 300
_TIMED = (
    "caffe/lenet",
    "huggingface/bert",
    "jax/mlp",
    "sklearn/forest_large",
    "tensorflow/keras_cnn",
    "torch/program_mobilenet",
    "xgboost/classes",
)
_LISTED = 6


class Outcome(msgspec.Struct, frozen=True):
    """The result of converting one model of the zoo."""

    name: str
    kind: str
    """``certified``, ``diagnosed`` as expected, ``failed`` or ``traceback``."""
    text: str
    seconds: float
    wants_diagnosis: bool
    """True if the zoo says that the model cannot be converted."""


def run(quick: bool) -> list[Row]:
    """Return the rows of all parts."""
    return [row for part in PARTS.values() for row in part(quick)]


def zoo(quick: bool) -> list[Row]:
    """Convert every model as a user would, and count certificates, diagnoses and tracebacks."""
    rows, all_outcomes = [], []
    for framework, found in frameworks():
        absent = {name: package for name, model in found.items() if (package := missing(model))}
        outcomes = []
        for name, model in found.items():
            if name not in absent:
                outcomes.append(outcome := _outcome(f"{framework}/{name}", model))
                _tell(f"{outcome.name}: {outcome.kind}, {outcome.seconds:.1f} s {outcome.text[:120]}")
        all_outcomes += outcomes
        if absent:
            packages = ", ".join(sorted(set(absent.values())))
            rows.append(skipped(f"{framework}: {len(absent)} models", f"{packages} is not installed"))
        if outcomes:
            certified = sum(outcome.kind == "certified" for outcome in outcomes)
            note = f"of {len(outcomes)} models; {_listed([one for one in outcomes if one.kind != 'certified'])}"
            rows.append(fact(f"{framework}: certificates", certified, "", note=note))
    return [*rows, *zoo_rows(all_outcomes)]


def zoo_rows(outcomes: Sequence[Outcome]) -> list[Row]:
    """The shares of certificates and diagnoses. Models that cannot be converted are in the zoo to test the diagnoses."""
    possible = [one for one in outcomes if not one.wants_diagnosis]
    impossible = [one for one in outcomes if one.wants_diagnosis]
    certified = sum(one.kind == "certified" for one in possible)
    wrong = [one for one in possible if one.kind != "certified"]
    undiagnosed = [one for one in impossible if one.kind != "diagnosed"]
    tracebacks = [one for one in outcomes if one.kind == "traceback"]
    noted = "; ".join(filter(None, [f"{certified} of {len(possible)}", _listed(wrong)]))
    share = 100 * certified / max(1, len(possible))
    return [
        claim("models of the zoo", len(outcomes), "", ">=", 80, note="whose packages are installed"),
        claim("convertible models with a certificate", share, "%", ">=", _CERTIFIED, note=noted),
        claim(
            "other models with the right diagnosis",
            len(impossible) - len(undiagnosed),
            "",
            ">=",
            len(impossible),
            note=_listed(undiagnosed),
        ),
        claim("tracebacks", len(tracebacks), "", "<=", 0, note=_listed(tracebacks)),
    ]


def false_alarms(quick: bool) -> list[Row]:
    """Compare every model that can be converted with several seeds."""
    alarms, compared, refused = [], 0, []
    for name, model in models().items():
        if model.diagnosis or missing(model):
            continue
        start, failed = time.perf_counter(), []
        try:
            with _exported(model) as (source, exported, artifact):
                for seed in range(_SEEDS[quick]):
                    compared += 1
                    certificate = certify(artifact, source, exported, model.options, seed=seed)
                    if not certificate.holds:
                        failed.append(f"{name} (seed {seed})")
                        _tell(f"{failed[-1]}: {'; '.join(certificate.notes)}")
        except PenstockError as error:
            refused.append(name)
            _tell(f"{name}: {error}")
            continue
        alarms += failed
        _tell(f"{name}: {f'{len(failed)} false alarms' if failed else 'holds'}, {time.perf_counter() - start:.1f} s")
    note = f"of {compared} comparisons, {_SEEDS[quick]} seed(s) per model; {', '.join(alarms[:_LISTED])}"
    rows = [claim("false alarms", len(alarms), "", "<=", 0, note=note)]
    return rows if not refused else [*rows, skipped("models that were not compared", ", ".join(refused))]


def faults(quick: bool, kinds: Sequence[str] = tuple(FAULTS), graphs: Sequence[str] = tuple(GRAPHS)) -> list[Row]:
    """Inject each fault into graphs to which it applies, and compare each result with the unchanged graph."""
    tried, missed, unnamed, skips = 0, [], [], 0
    for fault in kinds:
        verdicts = dict(_injections(fault, graphs, _PLACES[quick]))
        skips += len([graph for graph, verdict in verdicts.items() if verdict == _SKIPPED])
        tried += bool(set(verdicts.values()) - {_SKIPPED})
        wrong = {
            kind: [graph for graph, verdict in verdicts.items() if verdict == kind] for kind in ("missed", "unnamed")
        }
        missed += [f"{fault} in {graph}" for graph in wrong["missed"][:1]]
        unnamed += [f"{fault} in {graph}" for graph in (wrong["missed"] or wrong["unnamed"])[:1]]
        _tell(
            f"{fault}: {', '.join(f'{verdict} in {graph}' for graph, verdict in verdicts.items()) or 'no graph has it'}"
        )
    note = f"of {tried} kinds, each in up to {_PLACES[quick]} graphs; {skips} injections left out, because they change no output"
    return [
        claim("kinds of injected faults", tried, "", ">=", _KINDS, note="that exporters have had"),
        claim("injected faults that are found", tried - len(missed), "", ">=", tried, note=_noted(note, missed)),
        claim("guilty nodes that are named", tried - len(unnamed), "", ">=", tried, note=_noted(note, unnamed)),
    ]


def _injections(fault: str, graphs: Sequence[str], places: int) -> Iterator[tuple[str, str]]:
    """The graphs into which ``fault`` was injected, with the verdict: ``found``, ``unnamed``, ``missed`` or ``_SKIPPED``."""
    found = 0
    for graph in graphs:
        original = make(graph, 1)
        injected = inject(original, fault, np.random.default_rng(1))
        source = OnnxSource(Artifact.from_bytes(original.SerializeToString()), original)
        if injected is None:
            continue
        if not _has_effect(source, original, injected.model):
            yield graph, _SKIPPED
            continue
        changed = Artifact.from_bytes(injected.model.SerializeToString())
        certificate = certify(changed, source, source.exported, ConvertOptions())
        first = certificate.first_divergent
        if certificate.holds:
            yield graph, "missed"
        elif first is None or not any(label in first.node for label in injected.guilty):
            yield graph, "unnamed"
        else:
            yield graph, "found"
        found += 1
        if found == places:
            break


def _has_effect(source: OnnxSource, original: onnx.ModelProto, changed: onnx.ModelProto) -> bool:
    """False if the fault changes the outputs by less than their rounding, as the count of padded values where there are none."""
    before, after = Nodes(original), Nodes(changed)
    maker = Maker(source.signature, source.axes, meanings_of(source.signature), _EFFECT_SEED)
    shapes = list(maker.shapes())
    cases = [*map(maker.plausible, shapes), *maker.extremes(shapes[0]), *maker.many(shapes[0])]
    units = {name: UNITS[before.float_types.get(name, np.dtype(np.float32))] for name in before.outputs}
    for case in cases:
        try:
            want, got = (nodes.run(case.inputs, before.outputs, precise=True) for nodes in (before, after))
        except PenstockError:
            return True
        if any(
            want[name].shape != got[name].shape or not _error(got[name], want[name]) <= units[name] for name in units
        ):
            return True
    return False


def times(quick: bool) -> list[Row]:
    """The CPU time of a conversion in a process of its own, against the framework's loader and exporter alone."""
    ratios: dict[str, list[Interval]] = {mode: [] for mode in MODES[1:]}
    rows, all_models = [], models()
    for name in _TIMED:
        if name not in all_models:
            rows.append(skipped(f"{name}: time", "its framework is not installed"))
            continue
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            given = all_models[name].make(Path(folder))
            path = str(given) if isinstance(given, Path) else ""
            seconds = interleave({mode: partial(cpu_seconds, name, path, mode) for mode in MODES}, _ROUNDS[quick])
        found = {mode: ratio(seconds[mode], seconds["bare"]) for mode in ratios}
        for mode, each in found.items():
            ratios[mode].append(each)
        _tell(f"{name}: {', '.join(f'{mode} {each.value:.2f}x' for mode, each in found.items())}")
        note = f"{found['proved'].value:.3g} x with parity; {statistics.median(seconds['bare']):.3g} s alone"
        rows.append(fact(f"{name}: time without parity", found["plain"].value, "×", interval=found["plain"], note=note))
    if not ratios["plain"]:
        return rows
    proved = geometric_mean(ratios["proved"])
    return [
        *rows,
        claim("time without parity", geometric_mean(ratios["plain"]), "×", "<=", _SLOWDOWN, note="CPU seconds"),
        fact("time with parity", proved.value, "×", interval=proved, note="CPU seconds"),
    ]


def cpu_seconds(name: str, path: str, mode: str) -> float:
    """CPU seconds of a process, and of those that it starts, that converts one model. Raises RuntimeError if it fails."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "benchmarks.convert_once", name, path, mode]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode:
        raise RuntimeError(f"{name} is not converted: {done.stderr[-_SHOWN:]}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def straight(quick: bool) -> list[Row]:
    """Convert, build and serve one model of every format, and compare the answers of tritonclient with the framework's."""
    chosen: dict[str, tuple[str, ZooModel]] = {}
    for framework, found in frameworks():
        for name, model in found.items():
            if not model.diagnosis:
                chosen.setdefault(model.format, (f"{framework}/{name}", model))
    rows, served, refused = [], 0, []
    for format, (name, model) in chosen.items():
        row = f"{format}: built and served, largest error"
        if package := missing(model):
            rows.append(skipped(row, f"{package} is not installed"))
            continue
        start = time.perf_counter()
        try:
            rows.append(claim(row, _served_error(model), "", "<=", _OUTPUT_ERROR, note=name))
            served += 1
        except (PenstockError, RuntimeError, OSError) as failure:
            rows.append(skipped(row, failure))
            refused.append(f"{name}: {failure}")
        _tell(f"{name}: {rows[-1].value}, {time.perf_counter() - start:.1f} s")
    tried = served + len(refused)
    return [*rows, claim("formats that are built and served", served, "", ">=", tried, note="; ".join(refused))]


def _converted(model: ZooModel, given: Any, **more: Any) -> Conversion:
    return convert(given, None, **keywords(model.options), **more)


def _outcome(name: str, model: ZooModel) -> Outcome:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            _converted(model, model.make(Path(folder)))
            kind, text = ("failed", "converted, but a diagnosis was expected") if model.diagnosis else ("certified", "")
        except ParityFailed as error:
            kind, text = "failed", str(error)
        except PenstockError as error:
            kind, text = "diagnosed" if model.diagnosis and model.diagnosis in str(error) else "failed", str(error)
        except Exception as error:  # noqa: BLE001 - this is what is counted
            kind, text = "traceback", f"{type(error).__name__}: {error}"
    return Outcome(name, kind, text, time.perf_counter() - start, bool(model.diagnosis))


@contextlib.contextmanager
def _exported(model: ZooModel) -> Iterator[tuple[FrameworkModel, Any, Artifact]]:
    """The source, opened in this process, with its export and the repaired ONNX model."""
    with tempfile.TemporaryDirectory() as folder:
        found = resolve(model.make(Path(folder)), model.format, model.options.weights)
        target, source = Path(folder, "exported.onnx"), get_converter(found.format).open(found.given, model.options)
        try:
            exported = source.export(target, model.options.opset)
            yield source, exported, repair(Artifact.from_file(target))[0]
        finally:
            source.close()


def _served_error(model: ZooModel) -> float:
    """The largest error of an output, relative to the output's scale, after conversion, build and serving."""
    import tritonclient.http as client  # noqa: PLC0415 - only this part needs it

    with tempfile.TemporaryDirectory() as name:
        given = model.make(Path(name))
        artifact = _converted(model, given).artifact
        bundle = build(artifact, Path(name, "model.bundle"), recipe=_RECIPE).bundle
        found = resolve(given, model.format, model.options.weights)
        source = get_converter(found.format).open(found.given, model.options)
        inputs = _inputs(source, model)
        wanted = source.forward(inputs)
        source.close()
        with penstock(bundle, split_cores()[0]) as server:
            connection = client.InferenceServerClient(f"{server.address.host}:{server.address.port}")
            asked = []
            for spec in source.signature.inputs:
                asked.append(client.InferInput(spec.name, list(inputs[spec.name].shape), spec.datatype.value))
                asked[-1].set_data_from_numpy(inputs[spec.name])
            answer = connection.infer("model", asked)
            errors = [_error(answer.as_numpy(output), array) for output, array in wanted.items()]
            connection.close()
    return max(errors)


def _inputs(source: FrameworkModel, model: ZooModel) -> dict[str, Array]:
    """Inputs that the source accepts."""
    if model.options.sample:
        return dict(model.options.sample)
    maker = Maker(source.signature, source.axes, meanings_of(source.signature), 0)
    for shapes in maker.shapes():
        with contextlib.suppress(PenstockError):
            inputs = maker.plausible(shapes).inputs
            source.forward(inputs)
            return inputs
    raise RuntimeError("the source accepts none of the plausible inputs")


def _error(got: Array, want: Array) -> float:
    if want.dtype.kind not in "fiu":
        return float(not np.array_equal(got, want))
    scale = float(np.abs(want).max(initial=0)) or 1.0
    return float(np.abs(got.astype(np.float64) - want.astype(np.float64)).max(initial=0)) / scale


def _tell(line: str) -> None:
    """Show progress."""
    print(line, file=sys.stderr, flush=True)


def _noted(note: str, wrong: list[str]) -> str:
    return "; ".join([note, *wrong[:_LISTED]])


def _listed(outcomes: list[Outcome]) -> str:
    shown = [f"{one.name}: {one.kind}: {one.text[:120]}" for one in outcomes[:_LISTED]]
    return "; ".join([*shown, *([f"and {len(outcomes) - _LISTED} more"] if len(outcomes) > _LISTED else [])])


PARTS = {"zoo": zoo, "false-alarms": false_alarms, "faults": faults, "time": times, "straight": straight}
