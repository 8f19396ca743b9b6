"""The declaration of a pipeline: what a user writes in ``pipeline.yaml``, and what a bundle stores as ``pipeline.json``.

``parse`` checks the form: keys, types and limits, with errors that name line, step and fix. ``penstock.pipeline.function`` checks the
meaning: names, types and shapes.
"""

from __future__ import annotations

import enum
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec

from penstock.config import did_you_mean, field_docs
from penstock.errors import InvalidConfig, quoted
from penstock.pipeline.source import Path, SourceText
from penstock.pipeline.value import Media
from penstock.tensor import DataType

_Struct = TypeVar("_Struct", bound=msgspec.Struct)

Kind = Literal["step", "model", "map", "python"]
"""What a step runs: a standard step, a model, steps for each element of a list, or a function in Python."""
KINDS: tuple[Kind, ...] = get_args(Kind)
Wiring = str | tuple[str, ...] | dict[str, str]
"""Names of values: one, several in the order of the step's own names, or a dict from the step's own names to values."""
MAX_STEPS = MAX_EXAMPLES = 1_000
_Dimension = Annotated[int, msgspec.Meta(ge=-1, le=2**31)]
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]{0,99}")
"""Names of values, steps, models, constants and lists of labels."""
_LONGEST_DEFAULT = 90
"""Length of a step's default name, to which a number may be added."""
_STEP_KEYS = ("in", "out", "name", "when", "description")
"""Keys of every step. All other keys of a standard step are its options."""
_OTHER_KEYS: dict[Kind, tuple[str, ...]] = {
    "step": (),
    "model": ("colour", "batch"),
    "map": ("as", "steps"),
    "python": (),
}


class DeclaredInput(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """An input of the pipeline."""

    media: Media = Media.TENSOR
    """``image``, ``audio`` and ``file`` are files, such as a JPEG. ``text`` is UTF-8 text, and ``tensor`` an array."""
    datatype: DataType | None = None
    """Datatype of a tensor; the default is FP32."""
    shape: tuple[_Dimension, ...] = ()
    """Shape of a tensor, without batch dimension. A dimension of -1 may have any size."""
    description: str = ""


class DeclaredStep(msgspec.Struct, frozen=True, kw_only=True):
    """One step."""

    name: str
    """Unique in the pipeline. The default is what the step runs, with a number if several steps run the same."""
    kind: Kind
    target: str
    """Name of the standard step, of the model or of the list, or ``FILE.py:FUNCTION``."""
    inputs: Wiring = ()
    """The values that the step reads."""
    outputs: Wiring = ()
    """The values that the step produces."""
    when: str = ""
    """Condition under which the step runs. Otherwise its outputs are absent."""
    options: Mapping[str, Any] = {}
    as_: str = ""
    """For ``map``: name of the element in ``steps``."""
    steps: tuple[DeclaredStep, ...] = ()
    description: str = ""
    path: Path = ()
    """Place in the declaration, for errors."""

    def to_data(self) -> dict[str, Any]:
        """The step as a user would write it."""
        data: dict[str, Any] = {self.kind: self.target, "name": self.name, "in": self.inputs, "out": self.outputs}
        if self.kind == "map":
            data |= {"as": self.as_, "steps": [step.to_data() for step in self.steps]}
            del data["in"]
        return (
            data | {key: text for key in ("when", "description") if (text := getattr(self, key))} | dict(self.options)
        )


class Declaration(msgspec.Struct, frozen=True, kw_only=True):
    """A pipeline as it was declared."""

    name: str
    inputs: Mapping[str, DeclaredInput]
    models: Mapping[str, str] = {}
    """Paths of models or bundles by name, below the folder of the declaration."""
    labels: Mapping[str, tuple[str, ...] | str] = {}
    """Lists of labels by name: the labels, or the path of a text file with one label a line."""
    constants: Mapping[str, Any] = {}
    """Values by name: a number, a text, or a list of numbers."""
    steps: tuple[DeclaredStep, ...]
    outputs: tuple[str, ...]
    optional: tuple[str, ...] = ()
    """Outputs that are absent if the conditions of their steps do not hold."""
    examples: tuple[Mapping[str, Any], ...] = ()
    """Inputs to record with their outputs: files below the folder of the declaration, texts, or numbers."""
    description: str = ""
    source: SourceText = SourceText("pipeline", None, {})
    """The text from which the declaration was read."""

    def error(self, path: Iterable[str | int], message: str, hint: str = "") -> InvalidConfig:
        """An error about the place ``path``."""
        return self.source.error(path, message, hint)

    def to_data(self) -> dict[str, Any]:
        """The declaration as plain data, which ``parse`` reads back."""
        data: dict[str, Any] = {
            "name": self.name,
            "description": self.description,
            "inputs": msgspec.to_builtins(self.inputs),
            "models": self.models,
            "labels": self.labels,
            "constants": self.constants,
            "steps": [step.to_data() for step in self.steps],
            "outputs": self.outputs,
            "optional": self.optional,
            "examples": self.examples,
        }
        return {key: value for key, value in data.items() if value or key == "inputs"}


def all_steps(steps: Iterable[DeclaredStep]) -> Iterator[DeclaredStep]:
    """The ``steps``, each followed by the steps that it runs for each element."""
    for step in steps:
        yield step
        yield from all_steps(step.steps)


_KEYS = tuple(field.name for field in msgspec.structs.fields(Declaration) if field.name != "source")
_Text = Annotated[str, msgspec.Meta(max_length=10_000)]
_Label = str | int
KEY_TYPES: dict[str, Any] = {
    "name": Annotated[str, msgspec.Meta(min_length=1, max_length=200)],
    "description": _Text,
    "models": dict[str, str],
    "labels": dict[str, str | list[_Label]],
    "constants": dict[str, Any],
    "outputs": Annotated[list[str], msgspec.Meta(min_length=1)],
    "optional": list[str],
    "examples": Annotated[list[dict[str, Any]], msgspec.Meta(max_length=MAX_EXAMPLES)],
    "inputs": dict[str, dict[str, Any]],
    "steps": Annotated[list[dict[str, Any]], msgspec.Meta(min_length=1, max_length=MAX_STEPS)],
}
_STEP_TYPES: dict[str, Any] = {
    "in": str | list[str] | dict[str, str],
    "out": str | list[str] | dict[str, str],
    "name": str,
    "when": str,
    "description": _Text,
    "as": str,
    "steps": KEY_TYPES["steps"],
    "colour": Literal["rgb", "bgr", "grey", "rgba"],
    "batch": bool,
}


def parse(source: SourceText) -> Declaration:
    """Read a declaration. Raises InvalidConfig with the line, the step and the fix."""
    data = source.data
    if not isinstance(data, dict):
        raise source.error((), "the file has no keys", "write name, inputs, steps and outputs")
    for key in data:
        if key not in _KEYS:
            raise source.error((key,), f"unknown key {quoted(key)}", did_you_mean(key, _KEYS))
    for key in ("name", "inputs", "steps", "outputs"):
        if key not in data:
            raise source.error((), f"the key '{key}' is missing", _MISSING[key] + _toml_hint(source, key))
    read = {key: _typed(source, (key,), data[key], kind) for key, kind in KEY_TYPES.items() if key in data}
    for key in ("inputs", "models", "labels", "constants"):
        for name in read.get(key, {}):
            _check_name(source, (key, name), name)
    names: Counter[str] = Counter()
    for key in ("outputs", "optional"):
        read[key] = tuple(read.get(key, ()))
    return Declaration(
        **read
        | {
            "inputs": {
                name: _typed(source, ("inputs", name), given, DeclaredInput) for name, given in read["inputs"].items()
            },
            "labels": {
                name: given if isinstance(given, str) else tuple(map(str, given))
                for name, given in read.get("labels", {}).items()
            },
            "steps": _steps(source, ("steps",), read["steps"], names),
            "examples": tuple(read.get("examples", ())),
            "source": source,
        }
    )


def _toml_hint(source: SourceText, key: str) -> str:
    return f"; in TOML, write {key} = … before the first [table]" if source.name.endswith(".toml") else ""


_MISSING = {
    "name": "write the name of the pipeline, e.g. name: digits",
    "inputs": "declare the inputs, e.g. inputs: {image: {media: image}}",
    "steps": "write the list of steps",
    "outputs": "list the values to return, e.g. outputs: [label]",
}


def _steps(source: SourceText, path: Path, given: list[Any], names: Counter[str]) -> tuple[DeclaredStep, ...]:
    return tuple(_step(source, (*path, number), one, names) for number, one in enumerate(given))


def _step(source: SourceText, path: Path, data: dict[str, Any], names: Counter[str]) -> DeclaredStep:
    kinds = [kind for kind in KINDS if kind in data]
    if len(kinds) != 1:
        if not kinds and (
            near := [key for key in data if did_you_mean(key, KINDS).startswith("did") and key not in _STEP_TYPES]
        ):
            raise source.error(path, f"unknown key {quoted(near[0])} in a step", did_you_mean(near[0], KINDS))
        raise source.error(path, f"a step needs one of the keys {', '.join(KINDS)}, but it has {len(kinds)} of them")
    kind = kinds[0]
    target = _typed(source, (*path, kind), data[kind], str)
    own = {*_STEP_KEYS, *_OTHER_KEYS[kind]}
    rest = {key: value for key, value in data.items() if key != kind and key not in own}
    if kind != "step":
        for key in rest:
            raise source.error(
                (*path, key), f"{kind} '{target}': unknown key {quoted(key)}", did_you_mean(key, sorted(own - {"in"}))
            )
        rest = {
            key: _typed(source, (*path, key), data[key], _STEP_TYPES[key]) for key in ("colour", "batch") if key in data
        }
    read = {
        key: _typed(source, (*path, key), data[key], _STEP_TYPES[key]) for key in own & data.keys() if key not in rest
    }
    needed = ("as", "steps", "out") if kind == "map" else ("out",)
    for key in needed:
        if key not in read:
            raise source.error(path, f"{kind} '{target}': the key '{key}' is missing", _STEP_MISSING[key])
    for values in (read.get("in", ()), read["out"], read.get("as", ()), read.get("name", ())):
        for name in (values,) if isinstance(values, str) else values.values() if isinstance(values, dict) else values:
            _check_name(source, path, name)
    if kind == "map" and "in" in read:
        raise source.error((*path, "in"), f"map '{target}': unknown key 'in'", "the key 'map' names the list")
    default = target.rpartition(":")[2]
    if len(default) > _LONGEST_DEFAULT or not NAME.fullmatch(default):
        default = kind  # such as a function whose name has other letters
    names[default] += "name" not in read
    count = names[default]
    name = read.get("name") or (default if count == 1 else f"{default}-{count}")
    return DeclaredStep(
        name=name,
        kind=kind,
        target=target,
        inputs=_frozen(read.get("in", ())),
        outputs=_frozen(read["out"]),
        when=read.get("when", ""),
        options=rest,
        as_=read.get("as", ""),
        steps=_steps(source, (*path, "steps"), read.get("steps", []), names),
        description=read.get("description", ""),
        path=path,
    )


_STEP_MISSING = {
    "out": "name the value that the step produces, e.g. out: result",
    "as": "name the element of the list, e.g. as: crop",
    "steps": "write the list of steps for each element",
}


def _frozen(names: Any) -> Any:
    return tuple(names) if isinstance(names, list) else names


def _check_name(source: SourceText, path: Path, name: str) -> None:
    if not NAME.fullmatch(name):
        raise source.error(path, f"{quoted(name)} is not a valid name", "use letters, digits, '_', '-' and '.'")


def _typed(source: SourceText, path: Path, value: Any, kind: Any) -> Any:
    """``value``, converted to ``kind``. Raises InvalidConfig with the line."""
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return options_as(source, path, f"{str(path[-2]).removesuffix('s')} '{path[-1]}'", value, kind)
    try:
        return msgspec.convert(value, kind)
    except msgspec.ValidationError as error:
        message, inner = _reason(error)
        hint = _MISSING.get(str(path[-1]), "") if len(path) == 1 else ""
        raise source.error((*path, *inner), f"'{path[-1]}' is wrong: {message}", hint) from None


def options_as(source: SourceText, path: Path, what: str, value: Mapping[str, Any], kind: type[_Struct]) -> _Struct:
    """``value``, the options of ``what``, converted to ``kind``. Raises InvalidConfig with the line and the fix."""
    fields = {field.encode_name: field for field in msgspec.structs.fields(kind)}
    for key in value:
        if key not in fields:
            hint = did_you_mean(key, fields) if fields else "remove it"
            raise source.error((*path, key), f"{what} has no option {quoted(key)}", hint)
    for key, field in fields.items():
        if field.required and key not in value:
            raise source.error(path, f"{what} needs the option '{key}'", f"write {key}: …")
    try:
        return msgspec.convert(dict(value), kind)
    except msgspec.ValidationError as error:
        message, inner = _reason(error)
        option = f"option '{inner[0]}'" if inner else "an option"
        hint = _option_help(kind, fields, str(inner[0]), value) if inner else ""
        raise source.error((*path, *inner), f"{option} of {what} is wrong: {message}", hint) from None


def _option_help(kind: type[msgspec.Struct], fields: Mapping[str, Any], key: str, value: Mapping[str, Any]) -> str:
    """The values that the option ``key`` may have, or its documentation."""
    choices = _choices(fields[key].type)
    if choices and isinstance(value[key], str):
        return did_you_mean(value[key], choices)
    return field_docs(kind).get(fields[key].name, "").replace("``", "'")


def _choices(kind: Any) -> list[str]:
    """The texts that the type ``kind`` allows; empty if it allows any."""
    if get_origin(kind) is Literal:
        return [one for one in get_args(kind) if isinstance(one, str) and one]
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        return [str(one.value) for one in kind]
    return [one for part in get_args(kind) for one in _choices(part)]


_WORDS = {
    r" \| null`": "`",
    r"(`|\| )array\b": r"\1list",
    r"(`|\| )object\b": r"\1map",
    r"(`|\| )str\b": r"\1text",
    r"(`|\| )int\b": r"\1whole number",
    r"(`|\| )float\b": r"\1number",
    "enum value": "value",
}
"""Words of msgspec's errors, as patterns, and those of a declaration."""


def _reason(error: msgspec.ValidationError) -> tuple[str, Path]:
    """The message of ``error``, and the place in the value."""
    message, _, place = str(error).partition(" - at `$")
    inner = re.findall(r"\.([^.\[\]`]+)|\[(\d+)\]", place)
    for theirs, ours in _WORDS.items():
        message = re.sub(theirs, ours, message)
    return message.replace("`", "'"), tuple(int(index) if index else key for key, index in inner)
