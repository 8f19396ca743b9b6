"""scikit-learn: estimators and pipelines from skops files and, if they are trusted, pickles; also with boosters of other libraries.

skl2onnx converts most estimators. ``estimators.py`` replaces its converters for trees, scalers and text. Boosters of other libraries
are converted by their own files.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import skl2onnx
import sklearn
import skops.io
from onnx import helper
from skl2onnx._parse import sklearn_parsers_map
from skl2onnx._supported_operators import sklearn_operator_name_map
from skl2onnx.common import data_types
from skl2onnx.common._registration import _converter_pool, _shape_calculator_pool, get_converter
from sklearn.base import is_classifier, is_clusterer, is_outlier_detector, is_regressor
from sklearn.exceptions import NotFittedError
from sklearn.pipeline import Pipeline
from sklearn.utils.validation import check_is_fitted

from penstock.errors import InvalidArgument, InvalidInput, InvalidModel, PenstockError, PermissionDenied, Unsupported
from penstock.offline.convert.base import (
    Axis,
    ConvertOptions,
    Exported,
    Probes,
    TensorLink,
    UnsupportedOperator,
    UnsupportedOperators,
)
from penstock.offline.convert.tables.booster import Booster, arrays_of, as_tensor
from penstock.offline.convert.tables.estimators import (
    is_linear_classifier,
    is_tree,
    read_trees,
    write_linear_classifier,
    writer_of,
)
from penstock.offline.convert.tables.forest import Forest, GraphWriter
from penstock.offline.convert.tables.pickles import SKLEARN, load_trusted
from penstock.offline.convert.tables.steps import recorded, steps_of, walk
from penstock.offline.convert.tables.table import declared, first_step, table_of
from penstock.offline.convert.tree_arrays import TreeArrays
from penstock.tensor import Array, DataType, Signature, TensorSpec

_BOOSTERS = ("xgboost", "lightgbm", "catboost")
_TYPES = {
    DataType.FP32: data_types.FloatTensorType,
    DataType.FP64: data_types.DoubleTensorType,
    DataType.INT64: data_types.Int64TensorType,
    DataType.INT32: data_types.Int32TensorType,
    DataType.BOOL: data_types.BooleanTensorType,
    DataType.BYTES: data_types.StringTensorType,
}
_OTHER_WIDTH = "Buffer dtype mismatch"
"""Part of the error of an estimator, such as KMeans, that takes only the type that it was fitted with."""
_FAULTS = (ArithmeticError, AssertionError, AttributeError, LookupError, NameError, RuntimeError, TypeError, ValueError)
_WAY_OUT = "leave the step out of the pipeline, and compute it before the call"
_CALLABLE = "if you trust it, load it in a function of your own, and give that function as module:callable"


class SklearnConverter:
    name = "sklearn"
    version = sklearn.__version__

    def open(self, source: Any, options: ConvertOptions) -> SklearnModel:
        model = _loaded(Path(source), options) if isinstance(source, (str, Path)) else source
        if not hasattr(model, "get_params") or isinstance(model, type):
            raise InvalidArgument(
                f"{type(model).__name__} is not an estimator of scikit-learn", "give a fitted estimator"
            )
        try:
            check_is_fitted(model)
        except NotFittedError:
            raise InvalidModel(f"{type(model).__name__} is not fitted", "call fit before the conversion") from None
        return SklearnModel(model, options)


CONVERTER = SklearnConverter()


class SklearnModel:
    """The ``FrameworkModel`` of an estimator."""

    def __init__(self, model: Any, options: ConvertOptions) -> None:
        self._model, self._table = _prepared(model), table_of(model)
        self._forests: list[Forest] = []
        self._steps = dict(steps_of(self._model))
        self._types: dict[str, DataType] = {}
        inputs = declared(self._table, options)
        self._methods = _methods(model)
        self.axes: Mapping[str, tuple[Axis, ...]] = {spec.name: (Axis(0, "N", low=1),) for spec in inputs}
        self.signature = Signature(inputs, ())
        outputs = []
        example = options.sample or self._plausible(np.random.default_rng(0))
        for name, value in self._results(example, self._methods).items():
            narrow = value.dtype == np.float64 and all(spec.datatype is not DataType.FP64 for spec in inputs)
            datatype = DataType.FP32 if narrow else DataType.from_numpy(value.dtype)
            outputs.append(TensorSpec(name, datatype, (-1, *value.shape[1:])))
        self.signature = Signature(inputs, tuple(outputs))

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        found = self._results(inputs, self._methods)
        return {spec.name: as_tensor(found[spec.name], spec.datatype) for spec in self.signature.outputs}

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        method = next(iter(self._methods.values()))
        with recorded(self._steps) as made:
            self._results(inputs, {method: method})
        kinds = {name: self._types[name] for name in names if name in self._types and len(made[name]) == 1}
        return {name: as_tensor(_dense(made[name][0]), kind) for name, kind in kinds.items()}

    def trees(self) -> tuple[TreeArrays, ...]:
        """The trees that the last ``export`` has read."""
        return arrays_of(self._forests)

    def probes(self, seed: int, *, brief: bool = False) -> Probes:
        rng = np.random.default_rng(seed)
        plausible, first = self._plausible(rng), first_step(self._model)
        booster = _booster(first)
        if booster is None:
            return Probes((plausible,))
        (spec,) = self.signature.inputs
        missing = getattr(first.__sklearn_tags__().input_tags, "allow_nan", False)
        found = booster.probes(spec, rng, missing=missing, brief=brief)
        return Probes((plausible, *found.calls), found.notes)

    def export(self, target: Path, opset: int) -> Exported:
        _check_supported(self._model)
        types = [(spec.name, _TYPES[spec.datatype]([None, spec.shape[1]])) for spec in self.signature.inputs]
        self._forests.clear()
        try:
            with _quiet(), _registrations():
                converted, topology = skl2onnx.convert_sklearn(
                    self._model,
                    "model",
                    types,
                    target_opset={"": opset, "ai.onnx.ml": 3},
                    custom_conversion_functions=_conversions(self._model, self._forests),
                    options=_options(self._model),
                    intermediate=True,
                )
        except PenstockError:
            raise
        except _FAULTS as error:
            reason = str(error).split(". You may raise")[0].splitlines()[0]
            raise Unsupported(f"skl2onnx cannot convert the estimator: {reason}", _WAY_OUT) from error
        _finish(converted.graph, self.signature)
        try:
            onnx.checker.check_model(converted, full_check=True)
        except (onnx.checker.ValidationError, onnx.shape_inference.InferenceError) as error:
            raise Unsupported(f"skl2onnx writes an invalid model: {error}", "declare inputs of float32") from error
        onnx.save(converted, target)
        links = tuple(self._links(converted.graph, topology))
        return Exported(
            f"skl2onnx {skl2onnx.__version__}", links, warnings=tuple(dict.fromkeys(_warnings(self._model)))
        )

    def close(self) -> None: ...

    def _plausible(self, rng: np.random.Generator) -> dict[str, Array]:
        inputs = zip(self.signature.inputs, self._table.columns, strict=True)
        return {spec.name: column.probe(rng, 32).astype(spec.datatype.dtype) for spec, column in inputs}

    def _links(self, graph: onnx.GraphProto, topology: Any) -> Iterator[TensorLink]:
        made = {name for node in graph.node for name in node.output}
        operators = list(topology.unordered_operator_iterator())
        for name, step in self._steps.items():
            found = [one.outputs[0] for one in operators if one.raw_operator is step]
            if len(found) == 1 and found[0].onnx_name in made:
                self._types[name] = _datatype(found[0])
                yield TensorLink(found[0].onnx_name, name, f"step '{name}' of the pipeline", is_compared=True)

    def _checked(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        self.signature.check(inputs)
        return {spec.name: inputs[spec.name] for spec in self.signature.inputs}

    def _results(self, inputs: Mapping[str, Array], methods: Mapping[str, str]) -> dict[str, Array]:
        x = self._table.rows(self._checked(inputs))
        try:
            try:
                return self._called(x, methods)
            except ValueError as error:
                if _OTHER_WIDTH not in str(error) or not isinstance(x, np.ndarray):
                    raise
                return self._called(x.astype(np.float64), methods)
        except _FAULTS as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise InvalidInput(f"{type(self._model).__name__} rejects the input: {reason}", "give --sample") from error

    def _called(self, x: Any, methods: Mapping[str, str]) -> dict[str, Array]:
        with _quiet():
            return {name: _dense(getattr(self._model, method)(x)) for name, method in methods.items()}


def _methods(model: Any) -> dict[str, str]:
    """The outputs, and the methods that compute them, in the order of skl2onnx."""
    if is_regressor(model):
        return {"prediction": "predict"}
    if is_outlier_detector(model):
        return {"label": "predict", "scores": "decision_function"}
    if hasattr(model, "predict_proba") and isinstance(getattr(model, "classes_", None), list):
        what = f"{type(model).__name__} with more than one output"
        raise Unsupported(f"{what} has no converter", "train one classifier for each output")
    if hasattr(model, "predict_proba"):
        return {"label": "predict", "probabilities": "predict_proba"}
    if is_clusterer(model) and hasattr(model, "transform"):
        return {"label": "predict", "scores": "transform"}
    if hasattr(model, "predict"):
        return {"label": "predict"}
    if hasattr(model, "transform"):
        return {"transformed": "transform"}
    raise Unsupported(f"{type(model).__name__} has neither predict nor transform", "give an estimator that has one")


def _prepared(model: Any) -> Any:
    """``model`` without steps that do nothing, and with dense results, which skl2onnx needs. Raises Unsupported."""
    if any(getattr(one, "indicator_", None) is not None for one in walk(model)):
        raise Unsupported("an imputer with add_indicator=True has no converter", "use add_indicator=False")
    if type(model) is Pipeline:
        steps = [(name, step) for name, step in model.steps if step is not None and not isinstance(step, str)]
        model = Pipeline(steps) if steps else model
    if any(getattr(one, "flatten_transform", False) for one in walk(model)):
        model = copy.deepcopy(model)
        for one in walk(model):
            if getattr(one, "flatten_transform", False):
                one.flatten_transform = False
    return model


def _booster(estimator: Any) -> Booster | None:
    """The trees of ``estimator``; None if it has none."""
    library = type(estimator).__module__.partition(".")[0]
    if library in _BOOSTERS:
        read = importlib.import_module(f"penstock.offline.convert.frameworks.{library}").read
        return read(estimator)  # type: ignore[no-any-return]
    return read_trees(estimator) if is_tree(estimator) else None


def _convert_trees(forests: list[Forest], scope: Any, operator: Any, container: Any) -> None:
    """Writes the nodes of trees into the graph of skl2onnx, and appends the trees to ``forests``."""
    booster = _booster(operator.raw_operator)
    assert booster is not None
    forests.append(booster.forest)
    (given,) = operator.inputs
    writer = GraphWriter(scope.get_unique_operator_name("Trees"))
    wide = is_tree(operator.raw_operator) and _datatype(given) is DataType.FP64 and _may_be_wide(operator)
    names = booster.write(writer, given.full_name, _datatype(given), wide=wide)
    results = [name for key, name in names.items() if key != "raw"]
    if booster.classes is None and len(booster.forest.base) == 1:
        results = [writer("Reshape", results[0], np.array([-1, 1]))]
    _embed(writer, results, operator, container)


def _may_be_wide(operator: Any) -> bool:
    """True if the readers of the result accept float64. skl2onnx declares float32 for probabilities, which ``_finish`` corrects."""
    return isinstance(operator.outputs[-1].type, data_types.DoubleTensorType) or operator.outputs[-1].is_leaf


def _convert_by(write: Callable[..., str], scope: Any, operator: Any, container: Any) -> None:
    """Converts a transformer by a function of ``estimators.py``."""
    writer = GraphWriter(scope.get_unique_operator_name(type(operator.raw_operator).__name__))
    (given,) = operator.inputs
    _embed(writer, [write(operator.raw_operator, writer, given.full_name, _datatype(given))], operator, container)


def _convert_linear(scope: Any, operator: Any, container: Any) -> None:
    writer = GraphWriter(scope.get_unique_operator_name("Linear"))
    (given,) = operator.inputs
    label, probabilities = write_linear_classifier(operator.raw_operator, writer, given.full_name, _datatype(given))
    if not isinstance(operator.outputs[1].type, data_types.DoubleTensorType):
        probabilities = writer("Cast", probabilities, to=DataType.FP32.onnx)
    _embed(writer, [label, probabilities], operator, container)


def _datatype(variable: Any) -> DataType:
    return next((kind for kind, one in _TYPES.items() if isinstance(variable.type, one)), DataType.FP32)


def _embed(writer: GraphWriter, results: Sequence[str], operator: Any, container: Any) -> None:
    for result, output in zip(results, operator.outputs, strict=False):
        double = isinstance(output.type, data_types.DoubleTensorType)
        writer.rename(writer("Cast", result, to=11) if double else writer("Identity", result), output.full_name)
    for domain in {node.domain for node in writer.nodes}:
        container.node_domain_version_pair_sets.add((domain, container.target_opset_any_domain(domain)))
    container.nodes += writer.nodes
    container.initializers += writer.constants


def _convert_imputer(scope: Any, operator: Any, container: Any) -> None:
    """An imputer of texts replaces one text. A text of ONNX cannot be missing, so an imputer of missing texts copies them."""
    if not isinstance(operator.inputs[0].type, data_types.StringTensorType):
        get_converter("SklearnSimpleImputer")(scope, operator, container)
        return
    writer = GraphWriter(scope.get_unique_operator_name("Imputer"))
    names = [one.full_name for one in operator.inputs]
    joined, imputer = writer("Concat", *names, axis=1), operator.raw_operator
    if isinstance(imputer.missing_values, str):
        is_missing = writer("Equal", joined, np.array(imputer.missing_values, np.object_))
        joined = writer("Where", is_missing, imputer.statistics_.astype(np.object_), joined)
    _embed(writer, [joined], operator, container)


def _warnings(model: Any) -> Iterator[str]:
    """Differences from the source for inputs that ONNX does not have."""
    for one in walk(model):
        texts = np.asarray(getattr(one, "statistics_", ()))
        of_texts = type(one).__name__ == "SimpleImputer" and texts.dtype.kind in "OU"
        if of_texts and not isinstance(one.missing_values, str):
            told = ", ".join(repr(str(text)) for text in texts[:3])
            yield (
                "SimpleImputer replaces missing texts, but a text of an ONNX model cannot be missing: "
                f"send the replacement ({told}) instead of a missing text; '' and 'nan' are ordinary texts"
            )


def _parse(scope: Any, model: Any, inputs: Any, custom_parsers: Any = None) -> Any:
    """Declares the outputs of a booster of another library."""
    operator = scope.declare_local_operator(f"Penstock{type(model).__name__}", model)
    operator.inputs = inputs
    classes = getattr(model, "classes_", None) if is_classifier(model) else None
    if classes is None:
        operator.outputs.append(scope.declare_local_variable("variable", data_types.FloatTensorType([None, 1])))
        return operator.outputs
    kind = _TYPES.get(DataType.from_numpy(np.asarray(classes).dtype), data_types.Int64TensorType)
    operator.outputs.append(scope.declare_local_variable("label", kind([None])))
    probabilities = data_types.FloatTensorType([None, len(classes)])
    operator.outputs.append(scope.declare_local_variable("probabilities", probabilities))
    return operator.outputs


def _keep(operator: Any) -> None:
    """The outputs have their shapes already."""


def _conversions(model: Any, forests: list[Forest]) -> dict[type, Any]:
    """Our converters of the classes in ``model``, which append the trees they convert to ``forests``.

    Registers boosters with skl2onnx, which does not know them.
    """
    convert_trees = partial(_convert_trees, forests)
    found: dict[type, Any] = {}
    for one in walk(model):
        kind = type(one)
        if is_tree(one):
            found[kind] = convert_trees
        elif (write := writer_of(one)) is not None:
            found[kind] = partial(_convert_by, write)
        elif is_linear_classifier(one):
            found[kind] = _convert_linear
        elif kind.__name__ == "SimpleImputer":
            found[kind] = _convert_imputer
        elif kind.__module__.partition(".")[0] in _BOOSTERS:
            skl2onnx.update_registered_converter(
                kind,
                f"Penstock{kind.__name__}",
                _keep,
                convert_trees,
                parser=_parse,
                options={"zipmap": [True, False]},
            )
    return found


def _options(model: Any) -> dict[int, dict[str, Any]]:
    """Probabilities as a tensor instead of a list of dictionaries, for each classifier that has this option."""
    kinds = {id(one): sklearn_operator_name_map.get(type(one)) for one in walk(model) if not hasattr(one, "steps")}
    allowed = {key: (get_converter(kind).get_allowed_options() if kind else None) or {} for key, kind in kinds.items()}
    return {key: {"zipmap": False} for key, names in allowed.items() if "zipmap" in names}


def _check_supported(model: Any) -> None:
    """Raise UnsupportedOperators for the estimators in ``model`` that have no converter."""
    unknown = {type(one).__name__: one for one in walk(model) if type(one) not in sklearn_operator_name_map}
    missing = [name for name, one in unknown.items() if type(one).__module__.partition(".")[0] not in _BOOSTERS]
    if missing:
        where = "" if type(model).__name__ in missing else f"a step of {type(model).__name__}"
        raise UnsupportedOperators.of([UnsupportedOperator(name, where, _WAY_OUT) for name in missing])


def _finish(graph: onnx.GraphProto, signature: Signature) -> None:
    """Give inputs and outputs the names, types and shapes of ``signature``. skl2onnx has its own, and declares some shapes wrongly."""
    outputs = signature.outputs
    writer = GraphWriter("Final")
    for spec, output in zip(outputs, list(graph.output), strict=False):
        inner = f"{output.name}_inner"
        for node in graph.node:
            for names in (node.input, node.output):
                names[:] = [inner if name == output.name else name for name in names]
        result = writer("Reshape", inner, np.array([-1, *spec.shape[1:]]))
        if output.type.tensor_type.elem_type != spec.datatype.onnx:
            result = writer("Cast", result, to=spec.datatype.onnx)
        writer.rename(result, spec.name)
    del graph.output[:]
    graph.node.extend(writer.nodes)
    graph.initializer.extend(writer.constants)
    graph.output.extend(
        helper.make_tensor_value_info(one.name, one.datatype.onnx, ["N", *one.shape[1:]]) for one in outputs
    )
    for given, spec in zip(graph.input, signature.inputs, strict=True):
        for node in graph.node:
            node.input[:] = [spec.name if name == given.name else name for name in node.input]
        given.name = spec.name
        given.type.tensor_type.shape.dim[0].dim_param = "N"


def _loaded(path: Path, options: ConvertOptions) -> Any:
    with path.open("rb") as stream:
        archive = stream.read(4) == b"PK\x03\x04"
    if not archive:
        if not options.trust_pickle:
            hint = "save it with skops.io.dump, or add --trust-pickle if you trust the file"
            raise PermissionDenied(f"'{path.name}' is not a skops file, and loading it as a pickle can run code", hint)
        return load_trusted(path, SKLEARN)
    try:
        names = sorted(set(skops.io.get_untrusted_types(file=path)))
        foreign = [name for name in names if not SKLEARN.admits(*name.rpartition(".")[::2])]
        if foreign:
            raise PermissionDenied(
                f"'{path.name}' contains types that are not trusted: {', '.join(foreign)}", _CALLABLE
            )
        return skops.io.load(path, trusted=names)
    except PenstockError:
        raise
    except Exception as error:
        raise InvalidModel(f"'{path.name}' is not a skops file: {error}", "save it again with skops.io.dump") from error


def _dense(value: Any) -> Array:
    return np.asarray(value.toarray() if hasattr(value, "toarray") else value)


@contextlib.contextmanager
def _registrations() -> Iterator[None]:
    """Undoes the registrations with skl2onnx at the end, because they hold for the whole process."""
    tables = (sklearn_operator_name_map, sklearn_parsers_map, _converter_pool, _shape_calculator_pool)
    before = [dict(table) for table in tables]
    try:
        yield
    finally:
        for table, entries in zip(tables, before, strict=True):
            table.clear()
            table.update(entries)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
