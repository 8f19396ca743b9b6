"""Hugging Face: folders with ``config.json`` and safetensors, and models of ``transformers``. Extra ``penstock[transformers]``.

::

    folder ─ config.json ─ class in ``architectures`` ─ weights ─ module with named inputs ─ converter of PyTorch

The code of a model always comes from ``transformers``, never from the folder. The declared inputs choose the part of the model:

1. None: the whole model, without a cache.
2. Only inputs of the encoder, of a model with encoder and decoder: the encoder.
3. ``encoder_hidden_states`` and inputs of the decoder: the decoder.
4. ``past_key_values``: one step of a decoder. The keys and values of all layers are inputs and outputs.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
import transformers
from transformers.cache_utils import DynamicCache, DynamicLayer

from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, InvalidModel, NotFound, PermissionDenied, Unsupported
from penstock.offline.convert.base import Axis, ConvertOptions, Exported, FrameworkModel, InputSpec
from penstock.offline.convert.frameworks.torch import CONVERTER as TORCH
from penstock.offline.convert.registry import FORMATS
from penstock.pipeline.templates.huggingface import METADATA
from penstock.tensor import Array, DataType

_Known = dict[str, tuple[DataType, tuple[int | str, ...]]]
"""Type and shape of inputs. A name in a shape is a free dimension."""
_PAST, _ENCODED = "past_key_values", "encoder_hidden_states"
_TOTAL = "past_sequence + sequence"
_SIZES = {"batch": 2, "sequence": 5, "past_sequence": 3, "decoder_sequence": 4, "samples": 2_000}
"""Sizes of free dimensions in the traced call. They differ, so that the exporter does not take one for another."""
_BYTES_PER_LAYER = 16
"""A safetensors file has at least this many bytes for each layer."""


class HuggingFaceConverter:
    name = "transformers"
    version = transformers.__version__

    def open(self, source: Any, options: ConvertOptions) -> FrameworkModel:
        warnings: tuple[str, ...] = ()
        files: list[str] = []
        if isinstance(source, transformers.PreTrainedModel):
            model = source
        else:
            model, warnings = _load(Path(source), options.trust_pickle)
            files = [name for name in FORMATS["huggingface"].companions if Path(source, name).is_file()]
        with contextlib.ExitStack() as stack:
            stack.enter_context(_without_cache(model))
            inner = _opened(model, options)
            return HuggingFaceModel(inner, model, files, warnings, stack.pop_all().close)


CONVERTER = HuggingFaceConverter()


@contextlib.contextmanager
def _without_cache(model: Any) -> Iterator[None]:
    """Configure ``model`` to return no cache, and restore its configuration at the end."""
    kept = dict(vars(model.config))
    model.config.use_cache = False
    try:
        yield
    finally:
        del model.config.use_cache
        if "use_cache" in kept:
            model.config.use_cache = kept["use_cache"]


def _opened(model: Any, options: ConvertOptions) -> FrameworkModel:
    """The part of ``model`` that the declared inputs choose, opened by the converter of PyTorch."""
    declared = {spec.name: spec for spec in options.inputs}
    part, names = _part(model, [*declared, *(name for name in options.sample if name not in declared)])
    specs = _specs(part, names, declared, options.sample)
    sample = _sample(specs, options.sample, part.config)
    dynamic = {
        name: options.dynamic.get(name) or {i: dim for i, dim in enumerate(dims) if isinstance(dim, str)}
        for name, (_, dims) in specs.items()
    }
    if unknown := [name for name in options.dynamic if name not in dynamic]:
        raise InvalidArgument(f"--dynamic names input '{unknown[0]}'", f"the model's inputs are {list(dynamic)}")
    module = NamedInputs(part)
    module.training = part.training
    return TORCH.open(module, msgspec.structs.replace(options, inputs=(), sample=sample, dynamic=dynamic, weights=None))


class HuggingFaceModel:
    """The model of the converter of PyTorch, with the limits of the positions and with facts about the folder."""

    def __init__(
        self,
        inner: FrameworkModel,
        model: Any,
        files: Sequence[str],
        warnings: tuple[str, ...],
        release: Callable[[], None],
    ) -> None:
        self._inner, self._warnings, self._release = inner, warnings, release
        self._about = {
            "architecture": type(model).__name__,
            "model_type": model.config.model_type,
            "problem_type": getattr(model.config, "problem_type", None) or "",
            "labels": {str(key): str(label) for key, label in (getattr(model.config, "id2label", None) or {}).items()},
            "files": list(files),
        }
        limit = _positions(model)
        self.signature = inner.signature
        self.axes: Mapping[str, tuple[Axis, ...]] = {
            name: tuple(
                msgspec.structs.replace(axis, high=limit) if axis.name.endswith("sequence") and not axis.high else axis
                for axis in each
            )
            for name, each in inner.axes.items()
        }

    def forward(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        return self._inner.forward(inputs)

    def values(self, inputs: Mapping[str, Array], names: Sequence[str]) -> dict[str, Array]:
        return self._inner.values(inputs, names)

    def export(self, target: Path, opset: int) -> Exported:
        exported = self._inner.export(target, opset)
        proto = onnx.load(target, load_external_data=False)
        onnx.helper.set_model_props(
            proto, {one.key: one.value for one in proto.metadata_props} | {METADATA: json.dumps(self._about)}
        )
        onnx.save(proto, target)
        return msgspec.structs.replace(exported, warnings=(*self._warnings, *exported.warnings))

    def close(self) -> None:
        self._inner.close()
        self._release()


class NamedInputs(torch.nn.Module):  # type: ignore[misc]
    """``model`` with tensors as inputs and a dictionary of tensors as its result."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        # The name since transformers 5.24; the older one is deprecated.
        self._cache = "cache" if "cache" in signature(model.forward).parameters else _PAST

    def forward(self, **inputs: torch.Tensor) -> dict[str, torch.Tensor]:
        past = [tensor for name, tensor in inputs.items() if name.startswith(f"{_PAST}_")]
        given: dict[str, Any] = {name: one for name, one in inputs.items() if not name.startswith(f"{_PAST}_")}
        if past:
            cache = DynamicCache(list(zip(past[::2], past[1::2], strict=True)))
            given |= {self._cache: cache, "use_cache": True}
        encoded = given.pop(_ENCODED, None)
        if encoded is not None:
            given |= {"encoder_outputs": (encoded,)} if self.model.config.is_encoder_decoder else {_ENCODED: encoded}
        found: dict[str, torch.Tensor] = {}
        for name, value in self.model(**given, return_dict=True).items():
            if value is not encoded:
                found |= _tensors(name, value)
        return found


def _tensors(name: str, value: Any) -> dict[str, torch.Tensor]:
    """The tensors of an output, by name."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, DynamicCache):
        layers = enumerate(value.layers)
        return {f"present_{i}_{part}": getattr(one, f"{part}s") for i, one in layers for part in ("key", "value")}
    if isinstance(value, tuple):
        return {inner: one for i, each in enumerate(value) for inner, one in _tensors(f"{name}_{i}", each).items()}
    return {}


def _load(folder: Path, trust_pickle: bool) -> tuple[Any, tuple[str, ...]]:
    """The model in ``folder`` in FP32, and warnings. Raises InvalidModel, NotFound, PermissionDenied, Unsupported."""
    config = _config(folder)
    cls = _class(config)
    safe, pickled = list(folder.glob("*.safetensors")), list(folder.glob("*.bin"))
    if not safe and not pickled:
        raise NotFound(f"'{folder.name}' has no weights", "add model.safetensors, which save_pretrained writes")
    if not safe and not trust_pickle:
        raise PermissionDenied(
            f"the weights of '{folder.name}' are a pickle, and loading it can run code",
            "save them as safetensors; or, if you trust their author, add --trust-pickle",
        )
    size = sum(file.stat().st_size for file in safe or pickled)
    for key, value in config.items():
        if isinstance(value, int) and "layer" in key and value > size // _BYTES_PER_LAYER:
            raise InvalidModel(
                f"config.json declares {key} = {value}, but the weights have only {size} bytes", "check both files"
            )
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        model, info = cls.from_pretrained(
            folder,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=bool(safe),
            attn_implementation="eager",
            dtype=torch.float32,
            ignore_mismatched_sizes=True,
            output_loading_info=True,
        )
    except Exception as error:
        told = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise InvalidModel(
            f"transformers {transformers.__version__} cannot load '{folder.name}': {told[:400]}",
            "check config.json and the weights, or use the version of transformers that wrote them",
        ) from error
    # transformers fills such tensors with random values.
    if wrong := sorted(map(str, (*info["missing_keys"], *info["mismatched_keys"]))):
        raise InvalidModel(
            f"the weights lack {len(wrong)} tensors of {cls.__name__} or have them in other sizes, such as {wrong[0]}",
            "correct config.json; 'architectures' names the class that the weights were trained with",
        )
    return model.eval(), _warnings(config, sorted(info["unexpected_keys"]))


def _warnings(config: Mapping[str, Any], unexpected: Sequence[str]) -> tuple[str, ...]:
    dtype = str(config.get("dtype") or config.get("torch_dtype") or "float32")
    found = [] if dtype == "float32" else [f"the weights are stored as {dtype}; the model computes in float32"]
    if unexpected:
        found.append(f"{len(unexpected)} tensors of the weights are not used, such as '{unexpected[0]}'")
    return tuple(found)


def _config(folder: Path) -> dict[str, Any]:
    try:
        config = json.loads((folder / "config.json").read_bytes())
    except OSError as error:
        raise NotFound(f"cannot read config.json in '{folder}': {error.strerror or error}", "check the path") from None
    except (ValueError, RecursionError) as error:
        raise InvalidModel(f"config.json in '{folder.name}' is not JSON: {error}", "fetch the model again") from None
    if not isinstance(config, dict):
        raise InvalidModel(f"config.json in '{folder.name}' is not an object", "fetch the model again")
    if quantized := config.get("quantization_config"):
        method = quantized.get("quant_method", "unknown") if isinstance(quantized, dict) else quantized
        raise Unsupported(
            f"the weights are quantised ('{method}')", "convert the original model, and then run 'penstock quantize'"
        )
    return config


def _class(config: Mapping[str, Any]) -> Any:
    """The class of ``transformers`` that ``config`` names."""
    listed = config.get("architectures")
    name = str(listed[0]) if isinstance(listed, list) and listed else "AutoModel"
    found = getattr(transformers, name, None) if name.isidentifier() else None
    if isinstance(found, type) and (name == "AutoModel" or issubclass(found, transformers.PreTrainedModel)):
        return found
    if config.get("auto_map"):
        raise Unsupported(
            f"the code of '{name}' is in the folder, and Penstock does not run it",
            "if you trust it, load the model in a function of your own, and give package.module:function",
        )
    raise Unsupported(
        f"transformers {transformers.__version__} has no model class '{name}'",
        "correct 'architectures' in config.json, or update transformers",
    )


def _part(model: Any, declared: list[str]) -> tuple[Any, list[str]]:
    """The part of ``model`` that the ``declared`` inputs choose, and the names of its inputs. Raises InvalidArgument."""
    names = [name for name in declared if not name.startswith(_PAST)]
    steps = len(names) < len(declared)
    if not names:
        names = [model.main_input_name] if steps else _defaults(model)
    accepted = set(signature(model.forward).parameters)
    if model.config.is_encoder_decoder:
        accepted.add(_ENCODED)
        encoder = model.get_encoder()
        if not any("decoder" in name or name == _ENCODED for name in names):
            model, accepted = encoder, set(signature(encoder.forward).parameters)
    for name in names:
        if name not in accepted:
            known = sorted(accepted & set(_choices(model, False)))
            hint = did_you_mean(name, known) or f"its inputs are {', '.join(known)}"
            raise InvalidArgument(f"{type(model).__name__} has no input '{name}'", hint)
    return model, [*names, _PAST] if steps else names


def _defaults(model: Any) -> list[str]:
    """The inputs of the whole model."""
    accepted, config = signature(model.forward).parameters, model.config
    names = [model.main_input_name]
    if names == ["input_ids"]:
        types = getattr(config.get_text_config(), "type_vocab_size", 0) or 0
        names += [name for name in ("attention_mask", *(["token_type_ids"] * (types > 1))) if name in accepted]
        if hasattr(config, "vision_config") and "pixel_values" in accepted:
            names.append("pixel_values")
    return [*names, "decoder_input_ids"] if config.is_encoder_decoder else names


def _choices(model: Any, steps: bool) -> _Known:
    """Type and shape of the inputs that are known from the configuration."""
    config = model.config
    ids, floats = DataType.INT64, DataType.FP32
    found: _Known = {}
    for name in ("input_ids", "attention_mask", "token_type_ids", "position_ids"):
        found[name] = (ids, ("batch", "sequence"))
    for name in ("decoder_input_ids", "decoder_attention_mask"):
        found[name] = (ids, ("batch", "decoder_sequence"))
    if steps:
        found["attention_mask"] = (ids, ("batch", _TOTAL))
    vision = getattr(config, "vision_config", config)
    size = getattr(vision, "image_size", None) or 224
    height, width = size if isinstance(size, list | tuple) else (size, size)
    rows = "image_batch" if hasattr(config, "vision_config") else "batch"
    found["pixel_values"] = (floats, (rows, getattr(vision, "num_channels", 3), height, width))
    bins, frames = getattr(config, "num_mel_bins", 80), getattr(config, "max_source_positions", 1_500)
    found["input_features"] = (floats, ("batch", bins, 2 * frames))
    spectrum = hasattr(config, "max_length") and hasattr(config, "frequency_stride")
    found["input_values"] = (floats, ("batch", config.max_length, bins) if spectrum else ("batch", "samples"))
    encoded: int | str = frames if model.main_input_name == "input_features" else "sequence"
    found[_ENCODED] = (floats, ("batch", encoded, getattr(config, "hidden_size", 1)))
    return found


def _specs(model: Any, names: Sequence[str], declared: Mapping[str, InputSpec], sample: Mapping[str, Array]) -> _Known:
    """Type and shape of each input: as declared, or else as known, or else as in the sample."""
    steps = _PAST in names
    choices = _choices(model, steps)
    found: _Known = {}
    for name in names:
        if name == _PAST:
            found |= _past(model)
            continue
        spec = declared.get(name, InputSpec(name, None, None))
        given = sample.get(name)
        from_sample = (None, None) if given is None else (DataType.from_numpy(given.dtype), given.shape)
        datatype, shape = choices.get(name, from_sample)
        datatype, shape = spec.datatype or datatype, spec.shape or shape
        if datatype is None or shape is None:
            raise InvalidArgument(
                f"type and shape of input '{name}' are not known", f"write --inputs '{name}:float32[batch,…]'"
            )
        found[name] = (datatype, shape)
    return found


def _past(model: Any) -> _Known:
    """The keys and values of the layers, with the shapes that the model itself gives them."""
    with torch.no_grad():
        outputs = model(torch.zeros(1, 2, dtype=torch.int64), use_cache=True, return_dict=True)
    cache = next((value for value in outputs.values() if isinstance(value, transformers.Cache)), None)
    if not isinstance(cache, DynamicCache) or any(type(layer) is not DynamicLayer for layer in cache.layers):
        raise Unsupported(
            f"{type(model).__name__} keeps a {type(cache).__name__} between steps, which has no form in ONNX here",
            f"convert it without {_PAST}",
        )
    return {
        f"{_PAST}_{i}_{part}": (DataType.FP32, ("batch", tensor.shape[1], "past_sequence", tensor.shape[3]))
        for i, layer in enumerate(cache.layers)
        for part, tensor in (("key", layer.keys), ("value", layer.values))
    }


def _sample(specs: _Known, given: Mapping[str, Array], config: Any) -> dict[str, Array]:
    """The traced call: arrays of the user, and plausible ones."""
    rng, found = np.random.default_rng(0), {}
    ids = {"token_type_ids": 2, "position_ids": 2}
    sizes = _SIZES | {_TOTAL: _SIZES["past_sequence"] + _SIZES["sequence"], "image_batch": 3}
    for name, (datatype, dims) in specs.items():
        shape = [sizes.get(dim, 2) if isinstance(dim, str) else dim for dim in dims]
        if name in given:
            array = given[name]
        elif "mask" in name:
            array = np.ones(shape)
        elif datatype.is_float:
            array = rng.standard_normal(shape)
        else:
            array = rng.integers(0, ids.get(name, config.get_text_config().vocab_size), shape)
        found[name] = array.astype(datatype.dtype)
    return found


def _positions(model: Any) -> int:
    """The largest length that the position embeddings permit; 0: no limit."""
    config = model.config.get_text_config()
    limits = (getattr(config, name, None) for name in ("max_position_embeddings", "max_target_positions"))
    limit = next((limit for limit in limits if isinstance(limit, int)), 0)
    # RoBERTa counts positions from the id of padding.
    tables = (one for name, one in model.named_modules() if name.endswith("position_embeddings"))
    padding = next((one.padding_idx for one in tables if getattr(one, "padding_idx", None) is not None), -1)
    return max(0, limit - padding - 1)
