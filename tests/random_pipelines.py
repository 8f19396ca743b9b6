"""Random valid pipelines: standard steps with options drawn from their classes, models, Python steps, maps and conditions.

Values are wired by types: a step is kept if its ``check`` accepts the values drawn for it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.errors import InvalidConfig
from penstock.pipeline.check import ENCODED
from penstock.pipeline.function import ModelTraits
from penstock.pipeline.python_step import PythonStep, read_python_step
from penstock.pipeline.steps.base import StepResources
from penstock.pipeline.steps.registry import NAMES, step_class
from penstock.pipeline.value import FILE, TEXT, Media, ValueType
from penstock.tensor import DataType
from pipeline_parts import LABEL_LISTS, PYTHON, PYTHON_FUNCTIONS, TOKENIZER
from random_chains import Chain, Link, random_chain

Types = Mapping[str, ValueType]

RESOURCES = StepResources(LABEL_LISTS, {"tokenizer.json": TOKENIZER, "own/steps.py": PYTHON})
ODD_NAMES = ("not", "null", "true", "a.b", "x-1", "_", "in", "value", "steps", "no", "None", "n" * 100)
TEXTS = ("", "a: b", "# no comment", 'it\'s "quoted"', "two\nlines", "1.5", "null", "Ünïcode 🐟", "\\", "{x}", "- a")
_SHAPES = (
    *((), (), (1,), (3,), (4,), (-1,), (-1, 4), (-1, 4), (-1, 5), (7, -1), (-1, -1), (-1, -1, 3), (2, 3), (-1, 4, 2)),
)
_DATATYPES = (
    ("FP32",) * 8 + ("INT64",) * 3 + ("UINT8", "FP16", "FP64", "BOOL", "INT8", "INT32", "BF16", "BYTES", "UINT64")
)
_NUMBERS = (0, 0, 1, 1, 2, 3, 4, 5, 7, 8, 10, 16, 33, -1, -2)
_FLOATS = (0.0, 0.25, 0.5, 0.5, 0.9, 1.0, 1.5, 1 / 255, 2.0, -1.0, 10.0, 1e-3, 3)
_BOUNDS = ("0", "0.5", "1", "-1", "2", "3e0", "100")
_TRIES = 25
_DECODERS = {"image": ("decode_image",), "audio": ("decode_audio",)}


class Step(NamedTuple):
    """A drawn step, and the values that it reads and produces."""

    data: dict[str, Any]
    reads: frozenset[str]
    gives: Types

    def told(self, **more: Any) -> Step:
        return self._replace(data=self.data | more)

    def when(self, tensor: str, text: str) -> Step:
        return self._replace(data=self.data | {"when": text}, reads=self.reads | {tensor})


class RandomPipeline:
    """One declaration. ``models`` are the models that its steps may run."""

    def __init__(self, random: Random, models: Mapping[str, ModelTraits]) -> None:
        self._random = random
        self._models = models
        self._media: Mapping[str, str] = {}
        """Of the inputs."""
        self._count = 0
        self.data = self._declaration()

    def _declaration(self) -> dict[str, Any]:
        random = self._random
        chain = random_chain(random) if random.random() < 0.6 else Chain([])
        roles = {role: self._name() for role in (*chain.inputs, *chain.constants)}
        inputs = {roles[role]: one for role, one in chain.inputs.items()}
        inputs |= {self._name(): self._input() for _ in range(random.choice((0, 1) if chain.links else (1, 1, 2, 3)))}
        if random.random() < 0.1:
            boxes = {"media": "tensor", "shape": [-1, 4]}, {"media": "tensor", "shape": [-1]}
            inputs |= {self._name(): one for one in ({"media": "image"}, *boxes)}
        constants = {roles[role]: one for role, one in chain.constants.items()}
        constants |= {self._name(): self._constant() for _ in range(random.choice((0, 0, 1, 2)))}
        self._media = {name: one["media"] for name, one in inputs.items()}
        types = {name: _input_type(given) for name, given in inputs.items()}
        types |= {name: _constant_type(value) for name, value in constants.items()}
        linked = self._linked(chain, roles, types)
        steps, maybe = list[Step](), set[str]()
        while not (steps or linked):
            steps, maybe = self._steps(types, random.randint(2, 9), 2)
        if linked and random.random() < 0.5:
            known = types | {name: kind for step in linked for name, kind in step.gives.items()}
            steps, maybe = self._steps(known, random.randint(1, 4), 2)
        steps = linked + steps
        given = {name: kind for step in steps for name, kind in step.gives.items()}
        outputs = random.sample(list(given), min(len(given), random.choice((1, 1, 2, 3, 8))))
        if linked and random.random() < 0.8:
            outputs = list(dict.fromkeys((*linked[-1].gives, *outputs[1:])))
        outputs += random.choices(list(inputs), k=random.random() < 0.1)
        steps = _needed(steps, outputs)
        read = {*outputs, *(name for step in steps for name in step.reads)}
        used = {name for step in steps for name in _models_of(step.data)}
        data: dict[str, Any] = {
            "name": random.choice(("random", "a b", "p-1", "x" * 200)),
            "inputs": {name: one for name, one in inputs.items() if name in read},
            "models": {name: f"models/{name}.bundle" for name in used},
            "labels": {"pair": ["no", "yes"], "ten": list(range(10)), "file": "labels.txt"},
            "constants": {name: one for name, one in constants.items() if name in read},
            "steps": [step.data for step in steps],
            "outputs": outputs,
            "optional": [name for name in outputs if name in maybe],
            "description": random.choice(TEXTS),
        }
        return {key: value for key, value in data.items() if value or key == "inputs" or random.random() < 0.1}

    def _input(self) -> dict[str, Any]:
        random = self._random
        media = random.choice(
            ("image", "image", "audio", "text", "text", "tensor", "tensor", "tensor", "tensor", "file")
        )
        if media != "tensor":
            return {"media": media}
        given: dict[str, Any] = {"media": media, "shape": list(random.choice(_SHAPES))}
        if (datatype := random.choice(_DATATYPES)) != "FP32":
            given["datatype"] = datatype
        if random.random() < 0.2:
            given["description"] = random.choice(TEXTS)
        return given

    def _constant(self) -> Any:
        random = self._random
        return random.choice(
            (1, 0, -3, 0.5, True, "text", "", "no", [1, 2, 3], [0.5, 1], [[1, 2], [3, 4.5]], [[1.5] * 4] * 3)
        )

    def _name(self) -> str:
        self._count += 1
        if self._random.random() < 0.04:
            return f"{self._random.choice(ODD_NAMES)[:90]}{self._count if self._count > 1 else ''}"
        return f"v{self._count}"

    def _steps(self, types: Types, count: int, depth: int) -> tuple[list[Step], set[str]]:
        """At most ``count`` steps that read ``types``, and the values that may be absent."""
        known, steps, maybe = dict(types), list[Step](), set[str]()
        for name, kind in types.items():
            if kind in (FILE,) and self._random.random() < 0.9:
                target = self._random.choice(
                    _DECODERS.get(self._media.get(name, "file"), ("decode_image", "decode_audio"))
                )
                if (step := self._standard(target, {name: kind})) is not None:
                    steps.append(step)
                    known |= step.gives
        while len(steps) < count:
            if not (added := self._some(known, depth)):
                return steps, maybe
            conditions = [step for step in added if "when" in step.data]
            for step in added:
                if len(conditions) == 1 or not maybe.isdisjoint(step.reads):
                    maybe.update(step.gives)
                steps.append(step)
                for name, kind in step.gives.items():
                    known[name] = known[name].joined(kind) if name in known else kind
        return steps, maybe

    def _linked(self, chain: Chain, roles: Mapping[str, str], types: Types) -> list[Step]:
        """The steps of ``chain``, without those that do not fit."""
        known, steps, names = dict(types), list[Step](), dict(roles)
        for link in chain.links:
            if not all(role in names for role in link.reads.split()):
                continue
            for _ in range(_TRIES):
                if (step := self._link(link, [names[role] for role in link.reads.split()], known)) is not None:
                    steps.append(step)
                    known |= step.gives
                    names |= dict(zip(link.roles, step.gives, strict=False))
                    break
        return steps

    def _link(self, link: Link, reads: Sequence[str], known: Types) -> Step | None:
        kind, _, target = link.step.partition(" ")
        given = [known[name] for name in reads]
        if kind == "map":
            return self._map(known, 1, reads[0])
        if kind in ("model", "python"):
            only = dict(zip(reads, given, strict=True))
            return self._model(only, target) if kind == "model" else self._python(only, target)
        cls, drawn = step_class(kind), self._options(kind, given)
        if self._random.random() < 0.6:
            drawn = {field.name: drawn[field.name] for field in _fields(kind) if field.required and field.name in drawn}
        wired, options = dict(zip(cls.inputs, reads, strict=False)), {**drawn, **link.options}
        found = _types_of(kind, options, dict(zip(cls.inputs, given, strict=False)))
        if not isinstance(found, dict):
            return None
        return self._wiring({"step": kind}, wired, cls.inputs, found, options, len(found))

    def _some(self, known: Types, depth: int) -> list[Step]:
        """One further step, perhaps with a condition, or two steps for the same value."""
        random = self._random
        for _ in range(_TRIES):
            kind = random.choice(("step",) * 7 + ("model",) * 2 + ("python",) + ("map",) * 3)
            step = self._step(kind, known, depth)
            if step is None:
                continue
            scalars = [name for name, one in known.items() if _is_number(one)]
            if not scalars or random.random() < 0.8:
                return [self._named(step)]
            tensor, bound = random.choice(scalars), random.choice(_BOUNDS)
            yes, no = random.choice(
                (
                    (f"{tensor} >= {bound}", f"{tensor} < {bound}"),
                    (f" {tensor}", f"not {tensor} "),
                    (f"{tensor}=={bound}", f"{tensor} !={bound}"),
                )
            )
            if random.random() < 0.5:
                return [step.when(tensor, random.choice((yes, no)))]
            return [step.when(tensor, yes), self._other(step, known).when(tensor, no)]
        return []

    def _other(self, step: Step, known: Types) -> Step:
        """A step with the outputs of ``step`` and perhaps other options."""
        if "step" in step.data:
            cls = step_class(step.data["step"])
            for _ in range(5):
                own = set(cls.__struct_fields__)
                given = (
                    [known[name] for name in _wired(step.data["in"], cls.inputs).values()] if "in" in step.data else []
                )
                options = self._options(step.data["step"], given)
                other = {key: value for key, value in step.data.items() if key not in own} | options
                wired = _wired(other.get("in", {}), cls.inputs)
                found = _types_of(step.data["step"], options, {own: known[name] for own, name in wired.items()})
                outs = _wired(step.data["out"], cls.outputs)
                if isinstance(found, dict) and all(found[own].fits(step.gives[name]) for own, name in outs.items()):
                    return step._replace(data=other, gives={name: found[own] for own, name in outs.items()})
        return step

    def _named(self, step: Step) -> Step:
        random, more = self._random, dict[str, Any]()
        if random.random() < 0.1:
            more["name"] = self._name()
        if random.random() < 0.05:
            more["description"] = random.choice(TEXTS)
        return step.told(**more)

    def _step(self, kind: str, known: Types, depth: int) -> Step | None:
        if kind == "step":
            return self._standard(self._random.choice(NAMES), known)
        if kind == "model":
            return self._model(known)
        if kind == "python":
            return self._python(known)
        return self._map(known, depth) if depth else None

    def _standard(self, name: str, known: Types) -> Step | None:
        cls = step_class(name)
        for _ in range(_TRIES if len(cls.inputs) == 1 else 2):
            owns = [own for own in cls.inputs if own not in cls.optional or self._random.random() < 0.5]
            wired = {own: self._random.choice(list(known)) for own in owns}
            medium = next((self._media.get(value) for value in wired.values()), None)
            if name not in _DECODERS.get(medium or "", (name,)) and known[wired[owns[0]]] == FILE:
                continue
            for _ in range(10 if len(owns) > 1 else 1):
                given = {own: known[value] for own, value in wired.items()}
                options = self._options(name, list(given.values()))
                found = _types_of(name, options, given)
                if isinstance(found, dict):
                    return self._wiring({"step": name}, wired, cls.inputs, found, options)
                if (refused := re.search(r" as '(\w+)', but", found)) is None:
                    break
                wired[refused[1]] = self._random.choice(list(known))
        return None

    def _options(self, name: str, given: Sequence[ValueType]) -> dict[str, Any]:
        random = self._random
        sizes = [dim for kind in given for dim in kind.shape if dim > 0]
        rank = len(given[0].shape) if given else 0
        options: dict[str, Any] = {}
        for field in _fields(name):
            if not field.required and random.random() < 0.6:
                continue
            match field.name:
                case "labels":
                    options["labels"] = random.choice(
                        ("pair", "ten", "file", [f"l{n}" for n in range(random.choice([*sizes, 3]))])
                    )
                case "tokenizer":
                    options["tokenizer"] = "tokenizer.json"
                case "pad_token":
                    options["pad_token"] = random.choice(("", "[PAD]", "water"))
                case "pattern":
                    options["pattern"] = self._pattern(rank)
                case "max_pixels" | "max_bytes" if random.random() < 0.9:
                    continue
                case "hop":
                    options["hop"] = random.choice((100, 333))
                case "rate" | "source_rate":
                    options[field.name] = random.choice((8000, 16000, *(kind.rate for kind in given if kind.rate)))
                case "value" if name == "constant":
                    options["value"] = self._constant()
                case _:
                    options[field.encode_name] = self._drawn(field.type, sizes)
        return {key: value for key, value in options.items() if value is not None}

    def _pattern(self, rank: int) -> str:
        names = list("abcdefgh"[:rank])
        shuffled = self._random.sample(names, rank)
        if self._random.random() < 0.5:
            shuffled.insert(self._random.randint(0, rank), "1")
        return f"{' '.join(names)} -> {' '.join(shuffled)}"

    def _drawn(self, kind: Any, sizes: Sequence[int]) -> Any:  # noqa: PLR0911 - one case for each type
        """A value of the type ``kind``, as ``msgspec.inspect`` describes it."""
        random, inspect = self._random, msgspec.inspect
        match kind:
            case inspect.Metadata():
                return self._drawn(kind.type, sizes)
            case inspect.UnionType():
                return self._drawn(random.choice(kind.types), sizes)
            case inspect.LiteralType():
                return random.choice(kind.values)
            case inspect.BoolType():
                return random.random() < 0.5
            case inspect.IntType():
                numbers = [one for one in (*_NUMBERS, *sizes) if _in_limits(one, kind)]
                return random.choice(numbers or [kind.ge])
            case inspect.FloatType():
                return random.choice([one for one in _FLOATS if _in_limits(one, kind)])
            case inspect.TupleType():
                return [self._drawn(one, sizes) for one in kind.item_types]
            case inspect.VarTupleType():
                return [self._drawn(kind.item_type, sizes) for _ in range(random.choice((1, 1, 3)))]
            case inspect.StrType():
                return random.choice(TEXTS)
        return None

    def _model(self, known: Types, target: str = "") -> Step | None:
        random = self._random
        for _ in range(_TRIES):
            name = target or random.choice(list(self._models))
            signature = self._models[name].signature
            whole = random.random() < (0.0 if target else 0.2)
            free = any(spec.shape[:1] == (-1,) for spec in signature.inputs)
            kinds = {
                spec.name: _model_type(spec.datatype, spec.shape, not whole, free)
                for spec in (*signature.inputs, *signature.outputs)
            }
            wired = {own: random.choice(list(known)) for own in signature.input_names}
            if all(known[value].fits(kinds[own]) for own, value in wired.items()):
                found = {own: kinds[own] for own in signature.output_names}
                options = {"batch": False} if whole else {"batch": True} if random.random() < 0.05 else {}
                return self._wiring({"model": name}, wired, signature.input_names, found, options)
        return None

    def _python(self, known: Types, target: str = "") -> Step | None:
        random = self._random
        for _ in range(_TRIES):
            name = target or random.choice(PYTHON_FUNCTIONS)
            step = _python(name)
            wired = {own: random.choice(list(known)) for own in step.inputs}
            if all(known[wired[own]].fits(kind) for own, kind in step.inputs.items()):
                return self._wiring({"python": f"own/steps.py:{name}"}, wired, list(step.inputs), step.outputs, {})
        return None

    def _map(self, known: Types, depth: int, target: str = "") -> Step | None:
        random = self._random
        lists = [name for name, kind in known.items() if kind.many]
        if not lists:
            return None
        over, each = target or random.choice(lists), self._name()
        inside = {name: kind for name, kind in known.items() if random.random() < 0.3}
        element = msgspec.structs.replace(known[over], many=False, count=-1)
        steps, maybe = self._steps({**inside, each: element}, random.randint(1, 4), depth - 1)
        given = {
            name: kind for step in steps for name, kind in step.gives.items() if not kind.many and name not in maybe
        }
        if not given:
            return None
        outputs = random.sample(list(given), random.randint(1, min(3, len(given))))
        steps = _needed(steps, outputs)
        made = {each, *(name for step in steps for name in step.gives)}
        reads = frozenset(name for step in steps for name in step.reads if name not in made) | {over}
        out: Any = {name: self._name() for name in outputs}
        if random.random() < 0.3:
            out = outputs
        names = out if isinstance(out, dict) else {name: name for name in out}
        many = {
            names[name]: msgspec.structs.replace(given[name], many=True, count=known[over].count) for name in outputs
        }
        return Step({"map": over, "as": each, "steps": [step.data for step in steps], "out": out}, reads, many)

    def _wiring(
        self,
        target: dict[str, Any],
        wired: dict[str, str],
        owns: Sequence[str],
        found: Types,
        options: dict[str, Any],
        least: int = 1,
    ) -> Step:
        """The step ``target`` with its inputs ``wired``, and names for ``least`` or more of its outputs ``found``."""
        random = self._random
        chosen = random.sample(list(found), random.randint(least, len(found)))
        outs = {own: self._name() for own in found if own in chosen}
        data = {**target, **options}
        if wired or random.random() < 0.3:
            data["in"] = self._form(wired, owns)
        data["out"] = outs if len(found) > 1 and list(outs) != list(found) else self._form(outs, list(found))
        return Step(data, frozenset(wired.values()), {name: found[own] for own, name in outs.items()})

    def _form(self, wired: dict[str, str], owns: Sequence[str]) -> Any:
        """``wired`` in one of the forms of a declaration."""
        forms: list[Any] = [wired]
        if list(wired) == list(owns[: len(wired)]):
            forms.append(list(wired.values()))
            if len(wired) == 1 and len(owns) == 1:
                forms += list(wired.values()) * 2
        return self._random.choice(forms)


@functools.cache
def _fields(name: str) -> Sequence[Any]:
    """The options of a standard step, as ``msgspec.inspect`` describes them."""
    info: Any = msgspec.inspect.type_info(step_class(name))
    return tuple(info.fields)


@functools.cache
def _python(name: str) -> PythonStep:
    return read_python_step(f"own/steps.py:{name}", RESOURCES.files)


def _types_of(name: str, options: dict[str, Any], given: Types) -> dict[str, ValueType] | str:
    """The outputs of a standard step, or why it refuses."""
    try:
        return msgspec.convert(options, step_class(name)).bound(RESOURCES).check(given)
    except (InvalidConfig, msgspec.ValidationError) as error:
        return str(error)


def _wired(given: Any, owns: Sequence[str]) -> dict[str, str]:
    if isinstance(given, dict):
        return given
    return dict(zip(owns, [given] if isinstance(given, str) else given, strict=False))


def _needed(steps: Sequence[Step], outputs: Sequence[str]) -> list[Step]:
    """The ``steps`` that ``outputs`` need."""
    needed, kept = set(outputs), list[Step]()
    for step in reversed(steps):
        if not needed.isdisjoint(step.gives):
            needed |= step.reads
            kept.append(step)
    return kept[::-1]


def _models_of(data: dict[str, Any]) -> Iterator[str]:
    if "model" in data:
        yield data["model"]
    for inner in data.get("steps", ()):
        yield from _models_of(inner)


def _is_number(kind: ValueType) -> bool:
    return not kind.many and kind.datatype is not DataType.BYTES and all(dim in (1, -1) for dim in kind.shape)


def _in_limits(number: float, kind: Any) -> bool:
    return (
        (kind.ge is None or number >= kind.ge)
        and (kind.gt is None or number > kind.gt)
        and (kind.le is None or number <= kind.le)
        and (kind.lt is None or number < kind.lt)
    )


def _input_type(given: dict[str, Any]) -> ValueType:
    media = Media(given["media"])
    if media is Media.TENSOR:
        return ValueType(media, DataType(given.get("datatype", "FP32")), tuple(given["shape"]))
    return FILE if media in ENCODED else TEXT


def _constant_type(value: Any) -> ValueType:
    if isinstance(value, str):
        return TEXT
    array = np.asarray(value)
    return ValueType(
        datatype=DataType.FP32 if array.dtype.kind == "f" else DataType.from_numpy(array.dtype), shape=array.shape
    )


def _model_type(datatype: DataType, shape: tuple[int, ...], has_batch: bool, free: bool) -> ValueType:
    if has_batch and shape and (shape[0] == 1 or (shape[0] == -1 and free)):
        shape = shape[1:]
    return TEXT if datatype is DataType.BYTES and not shape else ValueType(datatype=datatype, shape=shape)
