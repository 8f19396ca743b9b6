"""Check the meaning of a declaration: follow names, types and shapes of all values through the steps.

A pipeline fails when it is packed, not at its first request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from penstock.config import did_you_mean
from penstock.errors import InvalidConfig
from penstock.pipeline.condition import Condition
from penstock.pipeline.declaration import Declaration, DeclaredInput, DeclaredStep, Wiring, all_steps, options_as
from penstock.pipeline.function import Function, MapStep, ModelStep, ModelTraits, Work
from penstock.pipeline.graph import Graph, PipelineStep, declare
from penstock.pipeline.python_step import PythonStep, read_python_step
from penstock.pipeline.source import Located
from penstock.pipeline.steps.base import Step, StepResources
from penstock.pipeline.steps.registry import step_class
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType, Signature, TensorSpec

ENCODED = (Media.IMAGE, Media.AUDIO, Media.FILE)
"""Media whose inputs are files."""


def checked(
    declaration: Declaration, models: Mapping[str, ModelTraits], resources: StepResources, allow_python: bool = False
) -> Function:
    """Check ``declaration``, whose labels and files are in ``resources``.

    Raises InvalidConfig, with line, step and fix: for unknown names, cycles, values that are not used, options that are wrong, and
    types that do not fit. Steps in Python run only with ``allow_python``.
    """
    error = declaration.error
    run = {step.target for step in all_steps(declaration.steps) if step.kind == "model"}
    for name in declaration.models:
        if name not in run:
            raise error(("models", name), f"no step runs the model '{name}'", "remove it, or add a step")
    for output in declaration.optional:
        if output not in declaration.outputs:
            hint = did_you_mean(output, declaration.outputs)
            raise error(("optional",), f"'{output}' is not an output", hint)
    if len(set(declaration.outputs)) < len(declaration.outputs):
        raise error(("outputs",), "an output is listed twice", "remove one")
    inputs = {name: _input_type(declaration, name, given) for name, given in declaration.inputs.items()}
    constants = [
        DeclaredStep(
            name=f"constant {name}",
            kind="step",
            target="constant",
            outputs=name,
            options={"value": value},
            path=("constants", name),
        )
        for name, value in declaration.constants.items()
    ]
    checker = _Checker(declaration, models, resources, allow_python)
    function = checker.function(
        declaration.name, inputs, (*constants, *declaration.steps), declaration.outputs, declaration.optional
    )
    return msgspec.structs.replace(function, description=declaration.description)


def _input_type(declaration: Declaration, name: str, given: DeclaredInput) -> ValueType:
    if given.media is Media.TENSOR:
        return ValueType(Media.TENSOR, given.datatype or DataType.FP32, given.shape)
    if given.datatype is not None or given.shape:
        hint = "remove datatype and shape, or declare media: tensor"
        raise declaration.error(("inputs", name), f"input '{name}' is {given.media.value}, which has no shape", hint)
    return ValueType(given.media, DataType.BYTES)


class _Checker:
    """Turns declared steps into a graph, and computes the types of all values."""

    def __init__(
        self, declaration: Declaration, models: Mapping[str, ModelTraits], resources: StepResources, allow_python: bool
    ) -> None:
        self._declaration = declaration
        self._models = models
        self._resources = resources
        self._allow_python = allow_python

    def function(
        self,
        name: str,
        inputs: Mapping[str, ValueType],
        declared: Sequence[DeclaredStep],
        outputs: Sequence[str],
        optional: Sequence[str] = (),
    ) -> Function:
        """Check the steps ``declared`` as a pipeline."""
        by_name = {one.name: one for one in declared}
        work: dict[str, Work] = {}
        steps: list[PipelineStep] = []
        names = {*inputs, *(value for one in declared for value in _names(one.outputs))}
        for one in declared:
            with self._located(one):
                if one.as_ in names:
                    raise InvalidConfig(
                        f"'{one.as_}' is also a value outside", "give the element another name with 'as'"
                    )
                prepared, step = self._prepared(one)
                steps.append(step)
                if prepared is not None:
                    work[one.name] = prepared
        graph = self._graph(inputs, steps, outputs, optional, by_name)
        types = {
            value: FILE if given.media in ENCODED and given.datatype is DataType.BYTES else given
            for value, given in inputs.items()
        }
        # The steps are in topological order, so that the types of their inputs are known.
        for step in graph.steps:
            one = by_name[step.name]
            with self._located(one):
                _check_condition(step.condition, types)
                given = {own: types[value] for own, value in step.inputs.items()}
                if one.kind == "map":
                    work[one.name], found = self._mapped(one, given)
                else:
                    found = _output_types(one, work[one.name], given)
                _add_types(types, step, found)
        return Function(name, dict(inputs), {value: types[value] for value in outputs}, graph, work, types)

    def _prepared(self, one: DeclaredStep) -> tuple[Work | None, PipelineStep]:
        """What ``one`` runs, and its wiring. The steps of a map are checked later, when the type of its list is known."""
        condition = Condition.parse(one.when) if one.when else None
        work: Work | None = None
        optional = frozenset[str]()
        if one.kind == "step":
            cls = step_class(one.target)
            work = options_as(self._declaration.source, one.path, f"step '{one.target}'", one.options, cls).bound(
                self._resources
            )
            owns, gives, optional = cls.inputs, cls.outputs, cls.optional
        elif one.kind == "model":
            work = self._model(one)
            owns, gives = tuple(work.signature.input_names), tuple(work.signature.output_names)
        elif one.kind == "python":
            work = read_python_step(one.target, self._resources.files, self._allow_python)
            owns, gives = tuple(work.inputs), tuple(work.outputs)
        else:
            outside = {value: value for value in _reads(one)}
            return None, PipelineStep(one.name, outside, _wired(one, "output", one.outputs, ()), condition)
        inputs = _wired(one, "input", one.inputs, owns)
        if missing := [own for own in owns if own not in inputs and own not in optional]:
            raise InvalidConfig(f"input {_list(missing)} has no value", "map a value to it with 'in'")
        return work, PipelineStep(one.name, inputs, _wired(one, "output", one.outputs, gives), condition, optional)

    def _model(self, one: DeclaredStep) -> ModelStep:
        if one.target not in self._models:
            raise InvalidConfig(
                f"there is no model '{one.target}'",
                did_you_mean(one.target, self._models) if self._models else "declare it under 'models'",
            )
        facts = self._models[one.target]
        signature = facts.signature
        whole = one.options.get("batch") is False
        with_batch = frozenset() if whole else _with_batch(signature)
        batchable = signature.batchable and facts.max_batch > 1 and not whole
        return ModelStep(one.target, signature, batchable, facts.max_batch if batchable else 1, with_batch)

    def _mapped(self, one: DeclaredStep, given: Mapping[str, ValueType]) -> tuple[MapStep, dict[str, ValueType]]:
        over = given[one.target]
        if not over.many:
            raise InvalidConfig(
                f"'{one.target}' is {over}, not a list", "map runs its steps for each element of a list"
            )
        element = msgspec.structs.replace(over, many=False, count=-1)
        inputs = {one.as_: element, **given}
        wired = _wired(one, "output", one.outputs, ())
        inner = self.function(one.name, inputs, one.steps, tuple(wired))
        for name, kind in inner.outputs.items():
            if kind.many:
                raise InvalidConfig(f"'{name}' is already a list for each element", "lists of lists are not supported")
        many = {
            name: msgspec.structs.replace(kind, many=True, count=over.count) for name, kind in inner.outputs.items()
        }
        return MapStep(one.target, one.as_, inner), many

    def _graph(
        self,
        inputs: Mapping[str, ValueType],
        steps: Sequence[PipelineStep],
        outputs: Sequence[str],
        optional: Sequence[str],
        by_name: Mapping[str, DeclaredStep],
    ) -> Graph:
        """The graph of ``steps``, in which every input and every step is used."""
        try:
            graph = declare(_names_only(inputs, outputs), steps, optional=frozenset(optional))
        except InvalidConfig as error:
            named = [
                one
                for name, one in by_name.items()
                if f"step '{name}'" in error.message or f"'{name}' ->" in error.message
            ]
            place = named[0].path if named else ("outputs",)
            raise self._declaration.error(place, error.message.replace("tensor '", "value '"), error.hint) from None
        plan = graph.plan(tuple(outputs))
        kept = {step.name for step in plan.steps}
        for step in graph.steps:
            if step.name not in kept:
                one = by_name[step.name]
                raise self._declaration.error(
                    one.path,
                    f"step '{step.name}' is not needed for any output",
                    "remove it, or list its result in 'outputs'",
                )
        for name in self._declaration.inputs.keys() & inputs.keys():
            if not plan.uses.get(name):
                raise self._declaration.error(("inputs", name), f"no step reads the input '{name}'", "remove it")
        return graph

    @contextmanager
    def _located(self, one: DeclaredStep) -> Iterator[None]:
        """Put the line and the step in front of an error about ``one``."""
        try:
            yield
        except InvalidConfig as error:
            if isinstance(error, Located):
                raise
            message = error.message.removeprefix(f"step '{one.target}' ").removeprefix(f"step '{one.name}': ")
            raise self._declaration.error(one.path, f"step '{one.name}': {message}", error.hint) from None


def _with_batch(signature: Signature) -> frozenset[str]:
    """The tensors whose first axis is a batch axis: those of size 1, and free ones if an input has a free first axis."""
    free = any(spec.shape[:1] == (-1,) for spec in signature.inputs)
    sizes = (1, -1) if free else (1,)
    return frozenset(
        spec.name for spec in signature.inputs + signature.outputs if spec.shape and spec.shape[0] in sizes
    )


def _wired(one: DeclaredStep, kind: str, given: Wiring, owns: Sequence[str]) -> dict[str, str]:
    """The step's own names with the values they stand for. Raises InvalidConfig."""
    if one.kind == "map":  # any value of the inner steps
        return dict(given) if isinstance(given, dict) else {name: name for name in _names(given)}
    if isinstance(given, dict):
        for own in given:
            if own not in owns:
                raise InvalidConfig(f"there is no {kind} '{own}'", did_you_mean(own, owns) if owns else "")
        return given
    names = _names(given)
    if isinstance(given, str) and kind == "output" and len(owns) > 1:
        raise InvalidConfig(
            f"there are several outputs: {_list(owns)}", f"name those you need, e.g. out: {{{owns[0]}: {given}}}"
        )
    if len(names) > len(owns):
        raise InvalidConfig(f"{len(names)} {kind}s are given, but there are {len(owns)}: {_list(owns) or 'none'}")
    return dict(zip(owns, names, strict=False))


def _names(given: Wiring) -> tuple[str, ...]:
    """The values of the pipeline in ``given``."""
    return (given,) if isinstance(given, str) else tuple(given.values()) if isinstance(given, dict) else given


def _reads(one: DeclaredStep) -> list[str]:
    """The values that ``one`` reads; for a map, the values outside that its steps and their conditions read."""
    found = [one.target] if one.kind == "map" else list(_names(one.inputs))
    made = {one.as_}.union(*(_names(inner.outputs) for inner in one.steps))
    for inner in one.steps:
        decides = [Condition.parse(inner.when).tensor] if inner.when else []
        found += (name for name in (*_reads(inner), *decides) if name not in made)
    return list(dict.fromkeys(found))


def _list(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names)


def _names_only(inputs: Iterable[str], outputs: Iterable[str]) -> Signature:
    """A signature for the check of names. Types are checked separately, because values need not be tensors."""
    one, two = (tuple(TensorSpec(name, DataType.FP32, ()) for name in names) for names in (inputs, outputs))
    return Signature(one, two)


def _check_condition(condition: Condition | None, types: Mapping[str, ValueType]) -> None:
    if condition is None:
        return
    given = types[condition.tensor]
    if given.many or given.datatype is DataType.BYTES or any(dim not in (1, -1) for dim in given.shape):
        raise InvalidConfig(f"'{condition}' needs one number, but '{condition.tensor}' is {given}")


def _output_types(one: DeclaredStep, work: Work, given: Mapping[str, ValueType]) -> dict[str, ValueType]:
    """The types of the outputs of ``one`` by its own names. Raises InvalidConfig if it cannot read the types ``given``."""
    if isinstance(work, Step):
        return work.check(given)
    if isinstance(work, PythonStep):
        for name, wanted in work.inputs.items():
            if not given[name].fits(wanted):
                raise InvalidConfig(f"parameter '{name}' is {wanted}, but the value is {given[name]}")
        return dict(work.outputs)
    assert isinstance(work, ModelStep)
    for spec in work.signature.inputs:
        wanted, found = _type_of(spec, work), given[spec.name]
        if not found.fits(wanted):
            raise InvalidConfig(
                f"input '{spec.name}' of model '{work.model}' is {wanted}, but the value is {found}",
                _advice(found, wanted),
            )
        colour = one.options.get("colour")
        if colour and found.colour not in ("", colour):
            hint = f"decode the picture with 'colour: {colour}', or convert it"
            raise InvalidConfig(
                f"model '{work.model}' needs channels in the order {colour}, but they are {found.colour}", hint
            )
    return {spec.name: _type_of(spec, work) for spec in work.signature.outputs}


def _type_of(spec: TensorSpec, step: ModelStep) -> ValueType:
    """The type of a model's tensor as a value."""
    shape = spec.shape[1:] if spec.name in step.with_batch else spec.shape
    return TEXT if spec.datatype is DataType.BYTES and not shape else ValueType(Media.TENSOR, spec.datatype, shape)


def _advice(found: ValueType, wanted: ValueType) -> str:
    """How to make a value of the type ``found`` fit a model's input."""
    if found.many:
        return "run the model for each element with 'map'"
    if found.media in (Media.FILE, Media.TEXT) and wanted.datatype is not DataType.BYTES:
        return "decode it first, e.g. with decode_image or tokenise"
    if len(found.shape) == len(wanted.shape) + 1:
        return "if the first axis counts items that the model reads together, set 'batch: false'"
    if found.datatype is not wanted.datatype and DataType.UINT8 is found.datatype:
        return "turn the pixels into floating-point numbers with the step normalise"
    if len(found.shape) == 3 and found.shape[2] in (1, 3) and wanted.shape[:1] == found.shape[2:]:
        return "the channels are last; move them with the step layout"
    return ""


def _add_types(types: dict[str, ValueType], step: PipelineStep, found: Mapping[str, ValueType]) -> None:
    """Record the types of the outputs of ``step``, ``found`` by its own names."""
    for own, value in step.outputs.items():
        if own not in found:
            raise InvalidConfig(f"there is no output '{own}'", did_you_mean(own, found))
        known = types.setdefault(value, found[own])
        if not found[own].fits(known):
            raise InvalidConfig(f"'{value}' is {found[own]} here, but {known} as the result of another step")
        types[value] = known.joined(found[own])
