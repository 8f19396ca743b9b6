"""What `penstock build` chooses against what other tools make of the same model and data: each network by itself."""

from __future__ import annotations

import contextlib
import logging
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from onnxruntime.quantization import QuantType, quantize_dynamic, quantize_static
from onnxruntime.quantization.shape_inference import quant_pre_process

from benchmarks import models
from benchmarks.compression.int8 import CalibrationRows
from benchmarks.compression.train import TASKS, trained
from benchmarks.kept import kept
from benchmarks.pairs import versus
from benchmarks.results import Row, claim, fact, skipped
from penstock.artifact import Artifact
from penstock.bundle.evidence import Accuracy
from penstock.bundle.open import open_bundle
from penstock.dataset import Dataset, make_dataset
from penstock.engines.base import Engine
from penstock.engines.registry import get_engine
from penstock.errors import PenstockError
from penstock.measurement import Interval
from penstock.offline.build import Recipe, build
from penstock.offline.compress.ptq.ranges.ranges import RangeMethod
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import Judge
from penstock.resources import machine_facts

RANDOM: dict[str, tuple[Callable[[Path], Path], tuple[int, ...]]] = {
    "CNN at 64": (models.small_cnn, (3, 64, 64)),
    "ResNet-18": (models.resnet18, (3, 224, 224)),
    "ResNet-50": (models.resnet50, (3, 224, 224)),
    "MobileNet-v2-like": (models.mobilenet, (3, 224, 224)),
    "6-layer encoder": (models.encoder, (128, 384)),
}
NAMES = (*TASKS, *RANDOM)
_CONTRACT = Contract(max_accuracy_loss=0.01)
_SIMILAR = Contract(max_accuracy_loss=0.01, metric="cosine", max_output_error=float("inf"))
"""For random weights, whose classes mean nothing: the cosine between the outputs and the original's."""
_PRECISION = 0.01
"""Half of the relative width that the interval of a comparison should have."""
_WITHIN = 0.98
_TIMED_SAMPLES = 8


class Way(msgspec.Struct, frozen=True):
    """A model, and what runs it."""

    artifact: Artifact
    engine: str
    options: Mapping[str, Any]

    @contextlib.contextmanager
    def loaded(self, calls: Sequence[Mapping[str, np.ndarray]], plain: bool) -> Iterator[Callable[[], object]]:
        model = _engine(self.engine, plain).load(self.artifact, self.options)
        try:
            yield lambda: [model.forward(call) for call in calls]
        finally:
            model.unload()


class Case(msgspec.Struct, frozen=True):
    """A network with its data and its contract."""

    original: Artifact
    calibrate: Dataset
    validate: Dataset
    test: Dataset
    contract: Contract


class Contestants(msgspec.Struct, frozen=True):
    """Every model that takes part."""

    case: Case
    chosen: str
    """The name of the candidate that the build chose."""
    ours: Way
    theirs: dict[str, Way]
    missing: list[str]
    """Rivals that could not make a model, with the reason."""


def rivals(names: Sequence[str], quick: bool) -> list[Row]:
    """The rows of ``names``; a network that fails is named and left out."""
    rows = []
    for name in names:
        try:
            rows += against_rivals(name, contestants(name, quick), quick).rows
        except PenstockError as error:
            rows.append(skipped(f"{name}: speed over the best rival", error.message))
    return rows


def prepared(quick: bool) -> list[Row]:
    """Make every model, so that a later run only measures."""
    found = {name: contestants(name, quick) for name in NAMES}
    return [fact(f"{name}: rivals", len(one.theirs), "", note=", ".join(one.missing)) for name, one in found.items()]


def contestants(name: str, quick: bool) -> Contestants:
    """The models of network ``name``, from the cache, or made now: it takes minutes for large networks."""
    with tempfile.TemporaryDirectory() as folder:
        case = make_case(name, Path(folder))
    return kept(
        f"rivals-{name}",
        f"{case.original.digest} {quick} {find_spec('nncf') is not None}",
        partial(_make, name, case, quick),
    )


def _make(name: str, case: Case, quick: bool, folder: Path) -> Contestants:
    chosen, ours = our_way(case, folder, quick, is_large=name in RANDOM)
    theirs, missing = their_ways(case, folder)
    return Contestants(case, chosen, ours, theirs, missing)


class Against(NamedTuple):
    """The rows of a comparison, and its ratio of speeds."""

    rows: list[Row]
    gain: Interval


def against_rivals(name: str, found: Contestants, quick: bool) -> Against:
    """Ours against the best of theirs that meets the same contract on the validation data; the test data tell the accuracy."""
    case, ours = found.case, found.ours
    allowed = {way: one for way, one in found.theirs.items() if not _objection(case, one)}
    calls = timed_calls(case.test)
    loads = {way: partial(one.loaded, calls, True) for way, one in allowed.items()}
    ours_load = partial(ours.loaded, calls, False)
    brief, crashed = dict[str, Interval](), list[str]()
    for way, load in loads.items():
        try:
            brief[way] = versus(load, ours_load, 0.2 if quick else 0.8, loads=4)
        except BrokenProcessPool:
            crashed.append(f"{way}: ended its process")
    best = min(brief, key=lambda way: brief[way].value)
    gain = versus(loads[best], ours_load, 1.0 if quick else 6.0, loads=12, within=math.inf if quick else _PRECISION)
    figures = ", ".join(f"{way} {one.value:.2f}x" for way, one in sorted(brief.items(), key=lambda x: x[1].value))
    left_out = ", ".join(
        [*(f"{way}: loses more" for way in found.theirs if way not in allowed), *crashed, *found.missing]
    )
    note = f"{found.chosen} against {best}. Over {figures}" + (f". Left out: {left_out}" if left_out else "")
    rows = [claim(f"{name}: speed over the best rival", gain, "×", ">=", _WITHIN, note=note)]
    for whose, way, plain in (("ours", ours, False), ("theirs", allowed[best], True)):
        lost = accuracy(case, case.test, way, plain).loss
        title, note = f"{name}: loss of {whose}", f"{case.test.count} test samples"
        rows.append(fact(title, lost.value, "", interval=lost, note=note))
    return Against(rows, gain)


def timed_calls(data: Dataset) -> list[dict[str, np.ndarray]]:
    """The calls to time: one of a single sample or, if samples differ in size, one of each of a few samples, evenly spaced."""
    if data.sizes == 1:
        return [data.call()]
    return [data.sample(number) for number in range(0, data.count, -(-data.count // _TIMED_SAMPLES))]


def make_case(name: str, folder: Path) -> Case:
    """The network ``name``: trained with its data, or with random weights and random inputs."""
    if name in TASKS:
        data = TASKS[name].data()
        return Case(trained(name), make_dataset(data.calibrate.inputs, None), data.validate, data.test, _CONTRACT)
    make, shape = RANDOM[name]
    rng = np.random.default_rng(0)
    parts = [
        make_dataset({"input": rng.standard_normal((count, *shape)).astype(np.float32)}, None) for count in (16, 16, 16)
    ]
    return Case(Artifact.from_file(make(folder / "original.onnx")), *parts, _SIMILAR)


def our_way(case: Case, folder: Path, quick: bool, *, is_large: bool) -> tuple[str, Way]:
    """What the build chooses for one thread."""
    # How ranges are found decides about accuracy, not about speed: for random weights one way is enough.
    methods = (RangeMethod.MIN_MAX,) if is_large else tuple(RangeMethod)
    recipe = Recipe(case.contract, threads=(1,), methods=methods, careful=not is_large, timing_s=3.0 if quick else 15.0)
    evaluation = dict(case.validate.inputs)
    if case.validate.labels is not None:
        evaluation["labels"] = case.validate.labels
    built = build(case.original, folder / "ours.bundle", dict(case.calibrate.inputs), evaluation, recipe)
    bundle = open_bundle(built.bundle)
    variant = bundle.choose(machine_facts())
    return built.chosen.name, Way(bundle.artifact(variant), variant.engine, variant.options)


def their_ways(case: Case, folder: Path, threads: int = 1) -> tuple[dict[str, Way], list[str]]:
    """Every rival's model for as many threads, and which could not be made, with the reason."""
    source = folder / "source.onnx"
    source.write_bytes(case.original.data)
    options = {"threads": threads}
    ways = {
        "ONNX Runtime": Way(case.original, "onnxruntime", options),
        "OpenVINO": Way(case.original, "openvino", options | {"precision": "f32"}),
    }
    if "BF16" in _capabilities():
        ways["OpenVINO's default, BF16"] = Way(case.original, "openvino", options | {"precision": "bf16"})
    makers: dict[str, Callable[[], Path]] = {
        "quantize_static": lambda: _static(source, case.calibrate),
        "quantize_static U8S8, per channel": lambda: _static(
            source, case.calibrate, activation_type=QuantType.QUInt8, weight_type=QuantType.QInt8, per_channel=True
        ),
        "quantize_dynamic": lambda: _dynamic(source),
        "NNCF": lambda: _nncf(case, folder),
    }
    missing = []
    for way, make in makers.items():
        logging.disable(logging.WARNING)  # they advise on the root logger
        try:
            artifact = Artifact.from_file(make())
        except Exception as error:  # noqa: BLE001 - whatever another tool raises
            missing.append(f"{way}: {type(error).__name__} {' '.join(str(error).split())[:80]}")
            continue
        finally:
            logging.disable(logging.NOTSET)
        for engine in ("openvino",) if way == "NNCF" else ("onnxruntime", "openvino"):
            ways[way if way == "NNCF" else f"{way} in {engine}"] = Way(artifact, engine, options)
    return ways, missing


def _static(source: Path, samples: Dataset, **options: Any) -> Path:
    prepared, target = source.with_name("prepared.onnx"), source.with_name(f"static-{len(options)}.onnx")
    quant_pre_process(source, prepared, skip_symbolic_shape=True)
    if options and not machine_facts().has_integer_dot_product:
        options["reduce_range"] = True  # as its guide says
    quantize_static(prepared, target, CalibrationRows(samples), **options)
    return target


def _dynamic(source: Path) -> Path:
    target = source.with_name("dynamic.onnx")
    quantize_dynamic(source, target)
    return target


def _nncf(case: Case, folder: Path) -> Path:
    import nncf  # noqa: PLC0415 - measured where it is installed
    import openvino  # noqa: PLC0415

    samples = case.calibrate
    model = openvino.Core().read_model(case.original.data, b"")
    is_transformer = any(node.get_type_name() == "Softmax" for node in model.get_ops())
    kind = {"model_type": nncf.ModelType.TRANSFORMER} if is_transformer else {}
    dataset = nncf.Dataset([samples.sample(row) for row in range(samples.count)])
    target = folder / "nncf.xml"
    openvino.save_model(nncf.quantize(model, dataset, **kind), target, compress_to_fp16=False)
    return target


def _engine(name: str, plain: bool) -> Engine:
    """Engine ``name``; ``plain``: as it is by itself, without the exact kernels that Penstock asks for on CPUs without VNNI."""
    engine = get_engine(name)
    if not plain:
        return engine
    machine = machine_facts()
    kind: Any = type(engine)
    return kind(msgspec.structs.replace(machine, isa=(*machine.isa, "avx512_vnni")))  # type: ignore[no-any-return]


def _capabilities() -> set[str]:
    from penstock.engines.openvino import capabilities  # noqa: PLC0415 - a package that may be missing

    return capabilities()


def _objection(case: Case, way: Way) -> str:
    """Why the rival ``way`` does not count; empty if it meets the contract on the validation data, and does not provably lose more on
    the test data."""
    try:
        on_test = accuracy(case, case.test, way, plain=True)
        if case.contract.accuracy_objection(on_test) and on_test.loss.low > case.contract.max_accuracy_loss:
            return f"loses {on_test.loss.value:.2%} on the test data"
        return case.contract.accuracy_objection(accuracy(case, case.validate, way, plain=True))
    except PenstockError as error:
        return error.message


def accuracy(case: Case, samples: Dataset, way: Way, plain: bool) -> Accuracy:
    """The accuracy of ``way`` against the original on ``samples``."""
    model = _engine(way.engine, plain).load(way.artifact, way.options)
    try:
        return Judge(case.original, samples, contract=case.contract).assess_loaded(model, way.artifact).accuracy
    finally:
        model.unload()
