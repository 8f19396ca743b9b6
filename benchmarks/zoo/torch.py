"""Torch models: modules, TorchScript, exported programs and pickled modules. ``torch_modules.py`` defines them."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType

_TYPES = {"float32": DataType.FP32, "int64": DataType.INT64}


def _options(*inputs: str, **more: Any) -> ConvertOptions:
    """Options with inputs such as ``image:float32[N,3,H,W]``."""
    specs = []
    for text in inputs:
        name, _, rest = text.partition(":")
        kind, _, shape = rest.rstrip("]").partition("[")
        dims = tuple(int(dim) if dim.isdecimal() else dim for dim in shape.split(",") if dim)
        specs.append(InputSpec(name, _TYPES[kind], dims))
    return ConvertOptions(inputs=tuple(specs), **more)


def _module(name: str, *arguments: Any) -> Any:
    modules = importlib.import_module("benchmarks.zoo.torch_modules")
    given = [getattr(modules.nn, one) if isinstance(one, str) else one for one in arguments]
    return modules.seeded(getattr(modules, name), *given)


def _object(name: str, *arguments: Any) -> Callable[[Path], object]:
    return lambda folder: _module(name, *arguments)


def _script(name: str) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        torch = importlib.import_module("torch")
        torch.jit.script(_module(name)).save(str(folder / f"{name}.pt"))
        return folder / f"{name}.pt"

    return make


def _program(name: str, *shapes: tuple[int, ...]) -> Callable[[Path], object]:
    """An exported program whose first axis is free."""

    def make(folder: Path) -> object:
        torch = importlib.import_module("torch")
        free = tuple({0: torch.export.Dim.DYNAMIC} for _ in shapes)
        program = torch.export.export(_module(name), tuple(map(torch.ones, shapes)), dynamic_shapes=free)
        torch.export.save(program, folder / f"{name}.pt2")
        return folder / f"{name}.pt2"

    return make


def _pickle(name: str, *arguments: Any) -> Callable[[Path], object]:
    def make(folder: Path) -> object:
        torch = importlib.import_module("torch")
        torch.save(_module(name, *arguments), folder / f"{name}.pt")
        return folder / f"{name}.pt"

    return make


_IMAGE = "image:float32[N,3,H,W]"
_CACHE = [f"cache__{layer}__{part}:float32[N,2,P,4]" for layer in range(2) for part in range(2)]
MODELS = {
    "resnet": ZooModel("torch", _object("ResNet"), _options(_IMAGE)),
    "mobilenet": ZooModel("torch", _object("MobileNet"), _options(_IMAGE)),
    "inception": ZooModel("torch", _object("Inception"), _options(_IMAGE)),
    "shufflenet": ZooModel("torch", _object("ShuffleNet"), _options(_IMAGE)),
    "unet": ZooModel("torch", _object("UNet"), _options("image:float32[N,1,16,16]")),
    "detector": ZooModel("torch", _object("Detector"), _options("image:float32[1,3,16,16]")),
    "lstm": ZooModel("torch", _object("Recurrent", "LSTM", True), _options("sequence:float32[N,L,6]")),
    "gru": ZooModel("torch", _object("Recurrent", "GRU"), _options("sequence:float32[N,L,6]")),
    "encoder": ZooModel("torch", _object("Encoder"), _options("input_ids:int64[N,L]", "attention_mask:int64[N,L]")),
    "decoder_step": ZooModel("torch", _object("DecoderStep"), _options("token:int64[N,1]", *_CACHE)),
    "causal": ZooModel("torch", _object("Causal"), _options("x:float32[N,L,8]")),
    "decision": ZooModel("torch", _object("Decision"), _options("x:float32[N,4]")),
    "repeat": ZooModel("torch", _object("Repeat"), _options("x:float32[N,4]", "count:int64[]")),
    "cond": ZooModel("torch", _object("Cond"), _options("x:float32[N,4]")),
    "custom_autograd": ZooModel("torch", _object("CustomAutograd"), _options("x:float32[N,4]")),
    "embedding_bag": ZooModel("torch", _object("Bag"), _options("ids:int64[N,L]")),
    "warp": ZooModel("torch", _object("Warp"), _options("image:float32[N,3,8,8]")),
    "deformable": ZooModel("torch", _object("Deformable"), _options(_IMAGE)),
    "fft": ZooModel("torch", _object("Spectrum"), _options("signal:float32[N,32]")),
    "stft": ZooModel("torch", _object("Stft"), _options("signal:float32[N,64]")),
    "einsum": ZooModel("torch", _object("Einsum"), _options("x:float32[N,L,4]")),
    "scatter": ZooModel("torch", _object("Scatter"), _options("nodes:float32[32,3]", "edges:int64[2,E]")),
    "nested": ZooModel(
        "torch",
        _object("Nested"),
        _options(*(f"{one}:float32[N,4]" for one in ("batch__left", "batch__right", "pair__0", "pair__1"))),
    ),
    "structured": ZooModel("torch", _object("Structured"), _options("x:float32[N,4]")),
    "tied": ZooModel("torch", _object("Tied"), _options("ids:int64[N,L]")),
    "counter": ZooModel("torch", _object("Counter"), _options("x:float32[N,4]")),
    "noisy": ZooModel("torch", _object("Noisy"), _options("x:float32[N,4]")),
    "super_resolution": ZooModel("torch", _object("SuperResolution"), _options(_IMAGE)),
    "norms": ZooModel("torch", _object("Norms"), _options("x:float32[N,4,H,W]")),
    "ranking": ZooModel("torch", _object("Ranking"), _options("scores:float32[N,7]")),
    "patches": ZooModel("torch", _object("Patches"), _options("image:float32[N,3,8,8]")),
    "wave": ZooModel("torch", _object("Wave"), _options("x:float32[N,4,L]")),
    "rotary": ZooModel("torch", _object("Rotary"), _options("x:float32[N,L,8]")),
    "unconvertible": ZooModel("torch", _object("Unconvertible"), _options("x:float32[3,3]"), "aten::"),
    "script_resnet": ZooModel("torchscript", _script("ResNet"), _options(_IMAGE)),
    "script_decision": ZooModel("torchscript", _script("Decision"), _options("x:float32[N,4]")),
    "program_mobilenet": ZooModel("exported_program", _program("MobileNet", (2, 3, 16, 16))),
    "program_counter": ZooModel("exported_program", _program("Counter", (2, 4))),
    "pickled_convolution": ZooModel("torch_pickle", _pickle("conv", 3, 8), _options(_IMAGE, trust_pickle=True)),
    "pickled_resnet": ZooModel(
        "torch_pickle", _pickle("ResNet"), _options(_IMAGE, trust_pickle=True), "which are not modules of PyTorch"
    ),
}
