# ruff: noqa: E501, ICN001 - a row is easier to read in one line
"""Architectures of public model libraries with random weights, for those that are installed."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from penstock.tensor import Array
from tests.exporters.architecture import Architecture, Rows, images, normal, tokens

_TORCHVISION = {
    "resnet18": 64, "mobilenet_v2": 64, "mobilenet_v3_small": 64, "efficientnet_b0": 64, "shufflenet_v2_x0_5": 64, "squeezenet1_1": 64,
    "mnasnet0_5": 64, "densenet121": 64, "googlenet": 64, "inception_v3": 96, "regnet_y_400mf": 64, "regnet_x_400mf": 64, "alexnet": 64,
    "lraspp_mobilenet_v3_large": 64,
}  # fmt: skip
_TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"img_size": 64, "depth": 2}, "deit_tiny_distilled_patch16_224": {"img_size": 64, "depth": 2},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "embed_dim": 24, "depths": (1, 1), "num_heads": (3, 3)},
    "convnext_atto": {"depths": (1, 1, 1, 1)}, "mixer_s32_224": {"img_size": 64}, "ghostnet_050": {}, "hardcorenas_a": {},
    "mobilevit_xxs": {}, "levit_128s": {"img_size": 224}, "poolformer_s12": {}, "repvgg_a0": {}, "res2net50_26w_4s": {}, "rexnet_100": {},
    "tf_efficientnetv2_b0": {}, "mobileone_s0": {}, "xcit_nano_12_p16_224": {"img_size": 64}, "coatnet_nano_rw_224": {}, "edgenext_xx_small": {},
}  # fmt: skip
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
_TRANSFORMERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertModel", _SMALL), "roberta": ("RobertaForSequenceClassification", _SMALL | {"pad_token_id": 0}),
    "distilbert": ("DistilBertForSequenceClassification", {"dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 64, "vocab_size": 100}),
    "albert": ("AlbertModel", _SMALL | {"embedding_size": 16}), "electra": ("ElectraModel", _SMALL | {"embedding_size": 16}),
    "deberta-v2": ("DebertaV2Model", _SMALL), "mpnet": ("MPNetModel", _SMALL | {"pad_token_id": 0}), "squeezebert": ("SqueezeBertModel", _SMALL | {"embedding_size": 32}),
    "gpt2": ("GPT2LMHeadModel", {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100, "n_positions": 64}),
    "opt": ("OPTForCausalLM", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64, "vocab_size": 100, "word_embed_proj_dim": 32, "max_position_embeddings": 64, "pad_token_id": 0}),
    "llama": ("LlamaForCausalLM", _SMALL), "qwen2": ("Qwen2ForCausalLM", _SMALL | {"num_key_value_heads": 2}),
    "gpt_neox": ("GPTNeoXForCausalLM", _SMALL), "bloom": ("BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 100}),
}  # fmt: skip


def architectures() -> list[Architecture]:
    """All of them; ``installed`` leaves out those whose library is missing."""
    found = [
        Architecture(name, "torchvision", _torchvision(name), images(size=size)) for name, size in _TORCHVISION.items()
    ]
    found += [
        Architecture(name, "timm", _timm(name, options), images(size=options.get("img_size", 64)))
        for name, options in _TIMM.items()
    ]
    found += [
        Architecture(name, "transformers", _transformers(name, *about), tokens())
        for name, about in _TRANSFORMERS.items()
    ]
    found += [Architecture(name, "skl2onnx", make, normal(x=(12,))) for name, make in _sklearn().items()]
    found += [Architecture(name, "xgboost", make, normal(x=(12,))) for name, make in _trees().items()]
    found += [Architecture(name, "tf2onnx", _keras(make), rows) for name, (make, rows) in _keras_models().items()]
    return found


def installed(library: str) -> bool:
    return importlib.util.find_spec(library) is not None


def _torchvision(name: str) -> Callable[[], Any]:
    def make() -> Any:
        import torchvision

        more: dict[str, Any] = {"weights_backbone": None} if "lraspp" in name else {}
        more |= {"init_weights": True, "aux_logits": True} if name in ("googlenet", "inception_v3") else {}
        return _Named(torchvision.models.get_model(name, weights=None, **more), "image")

    return make


def _timm(name: str, options: dict[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        import timm

        return _Named(timm.create_model(name, pretrained=False, num_classes=10, **options), "image")

    return make


def _transformers(kind: str, model: str, options: dict[str, Any]) -> Callable[[], Any]:
    def make() -> Any:
        import transformers

        configuration = transformers.AutoConfig.for_model(kind, **options, use_cache=False, attn_implementation="eager")
        return _Named(getattr(transformers, model)(configuration), "input_ids", "attention_mask", own_names=True)

    return make


def _Named(module: Any, *names: str, own_names: bool = False) -> Any:  # noqa: N802 - makes a class only if torch is there
    """``module`` with inputs of these names and a tuple of tensors as its result."""
    import torch

    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, *inputs: Any) -> Any:
            found = self.module(**dict(zip(names, inputs, strict=True))) if own_names else self.module(*inputs)
            if isinstance(found, torch.Tensor):
                return found
            values = found.values() if hasattr(found, "values") else found
            return tuple(value for value in values if isinstance(value, torch.Tensor))

    return Named()


def _sklearn() -> dict[str, Callable[[], bytes]]:
    def make(build: Callable[[], Any], classes: bool = True) -> Callable[[], bytes]:
        def made() -> bytes:
            import skl2onnx

            x = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
            y = (
                (x[:, 0] + x[:, 1] * x[:, 2] > 0).astype(int) + (x[:, 3] > 1)
                if classes
                else x[:, 0] + x[:, 1] * x[:, 2]
            )
            options = {"zipmap": False} if classes else None
            fitted = build().fit(x, y)
            kind = [("x", skl2onnx.common.data_types.FloatTensorType([None, 12]))]
            made = skl2onnx.convert_sklearn(
                fitted,
                initial_types=kind,
                options={id(fitted): options} if options else None,
                target_opset={"": 17, "ai.onnx.ml": 3},
            )
            return bytes(made.SerializeToString())

        return made

    def of(module: str, name: str, **options: Any) -> Callable[[], Any]:
        return lambda: getattr(importlib.import_module(f"sklearn.{module}"), name)(**options)

    def pipeline() -> Any:
        from sklearn.decomposition import PCA
        from sklearn.linear_model import LogisticRegression
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        return make_pipeline(StandardScaler(), PCA(6), LogisticRegression())

    return {
        "sklearn-mlp": make(of("neural_network", "MLPClassifier", hidden_layer_sizes=(32, 16), max_iter=200)),
        "sklearn-mlp-regressor": make(
            of("neural_network", "MLPRegressor", hidden_layer_sizes=(32,), max_iter=200), classes=False
        ),
        "sklearn-logistic": make(of("linear_model", "LogisticRegression")),
        "sklearn-ridge": make(of("linear_model", "Ridge"), classes=False),
        "sklearn-forest": make(of("ensemble", "RandomForestClassifier", n_estimators=10)),
        "sklearn-boosting": make(of("ensemble", "GradientBoostingRegressor", n_estimators=20), classes=False),
        "sklearn-svm": make(of("svm", "SVC", probability=True)),
        "sklearn-neighbours": make(of("neighbors", "KNeighborsClassifier")),
        "sklearn-pipeline": make(pipeline),
    }


def _trees() -> dict[str, Callable[[], bytes]]:
    def data() -> tuple[Array, Array]:
        x = np.random.default_rng(0).standard_normal((300, 12)).astype(np.float32)
        return x, (x[:, 0] + x[:, 1] > 0).astype(int)

    def kind() -> Any:
        from onnxmltools.convert.common.data_types import FloatTensorType

        return [("x", FloatTensorType([None, 12]))]

    def xgboost() -> bytes:
        import onnxmltools
        import xgboost

        fitted = xgboost.XGBClassifier(n_estimators=10, max_depth=3).fit(*data())
        return bytes(onnxmltools.convert_xgboost(fitted, initial_types=kind(), target_opset=15).SerializeToString())

    def lightgbm() -> bytes:
        import lightgbm
        import onnxmltools

        fitted = lightgbm.LGBMClassifier(n_estimators=10, verbose=-1).fit(*data())
        return bytes(
            onnxmltools.convert_lightgbm(
                fitted, initial_types=kind(), target_opset=15, zipmap=False
            ).SerializeToString()
        )

    return {"xgboost": xgboost, "lightgbm": lightgbm}


def _keras(make: Callable[[Any], Any]) -> Callable[[], bytes]:
    def made() -> bytes:
        import keras
        import tensorflow
        import tf2onnx

        keras.utils.set_random_seed(0)
        model = make(keras)
        spec = [tensorflow.TensorSpec((None, *model.inputs[0].shape[1:]), model.inputs[0].dtype, name="x")]
        called = tensorflow.function(lambda x: model(x, training=False), input_signature=spec)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "model.onnx"
            tf2onnx.convert.from_function(called, input_signature=spec, opset=17, output_path=str(path))
            return path.read_bytes()

    return made


def _keras_models() -> dict[str, tuple[Callable[[Any], Any], Rows]]:
    def picture(count: int, seed: int) -> dict[str, Array]:
        return {"x": np.ascontiguousarray(images()(count, seed)["image"].transpose(0, 2, 3, 1))}

    def numbers(count: int, seed: int) -> dict[str, Array]:
        return {"x": np.random.default_rng(seed).integers(0, 100, (count, 16)).astype(np.int32)}

    def application(name: str, **more: Any) -> Callable[[Any], Any]:
        return lambda k: getattr(k.applications, name)(weights=None, input_shape=(32, 32, 3), classes=10, **more)

    return {
        "keras-dense": (lambda k: k.Sequential([k.Input((12,)), k.layers.Dense(32, "relu"), k.layers.BatchNormalization(), k.layers.Dense(3, "softmax")]), normal(x=(12,))),
        "keras-cnn": (lambda k: k.Sequential([k.Input((32, 32, 3)), k.layers.Conv2D(8, 3, activation="relu"), k.layers.MaxPooling2D(), k.layers.SeparableConv2D(16, 3, padding="same"), k.layers.GlobalAveragePooling2D(), k.layers.Dense(10)]), picture),
        "keras-lstm": (lambda k: k.Sequential([k.Input((16,), dtype="int32"), k.layers.Embedding(100, 16), k.layers.LSTM(16), k.layers.Dense(2)]), numbers),
        "keras-gru": (lambda k: k.Sequential([k.Input((16,), dtype="int32"), k.layers.Embedding(100, 16), k.layers.Bidirectional(k.layers.GRU(8)), k.layers.Dense(2)]), numbers),
        "keras-mobilenet": (application("MobileNetV2", alpha=0.35), picture),
        "keras-efficientnet": (application("EfficientNetB0"), picture),
        "keras-densenet": (application("DenseNet121"), picture),
        "keras-autoencoder": (lambda k: k.Sequential([k.Input((32, 32, 3)), k.layers.Conv2D(8, 3, 2, "same", activation="relu"), k.layers.Conv2DTranspose(3, 3, 2, "same")]), picture),
    }  # fmt: skip
