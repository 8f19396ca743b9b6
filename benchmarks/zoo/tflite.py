"""TensorFlow Lite files: float, and quantised in every way that the converter of TensorFlow offers."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel

_WIDE = "EXPERIMENTAL_TFLITE_BUILTINS_ACTIVATIONS_INT16_WEIGHTS_INT8"


def _lite(build: Callable[[Any], object], mode: str = "float", suffix: str = ".tflite") -> Callable[[Path], object]:
    """Converts the Keras model that ``build(keras)`` returns. ``mode`` names the quantisation."""

    def make(folder: Path) -> object:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(0)
        model: Any = build(keras)
        converter = tf.lite.TFLiteConverter.from_keras_model(model)
        if mode != "float":
            converter.optimizations = [tf.lite.Optimize.DEFAULT]
        if mode == "float16":
            converter.target_spec.supported_types = [tf.float16]
        if mode in ("int8", "uint8", "int8_inside", "int16"):
            converter.representative_dataset = lambda: _samples(model)
        if mode in ("int8", "uint8"):
            converter.target_spec.supported_ops = [tf.lite.OpsSet.TFLITE_BUILTINS_INT8]
            converter.inference_input_type = converter.inference_output_type = getattr(tf, mode)
        if mode == "int16":
            converter.target_spec.supported_ops = [getattr(tf.lite.OpsSet, _WIDE)]
        path = folder / f"model{suffix}"
        with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path.write_bytes(converter.convert())
        return path

    return make


def _samples(model: Any) -> Iterator[list[np.ndarray]]:
    rng = np.random.default_rng(0)
    for _ in range(8):
        yield [rng.normal(size=(1, *tensor.shape[1:])).astype("f") for tensor in model.inputs]


def _cnn(keras: Any) -> object:
    layers = keras.layers
    image = keras.Input((10, 10, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", activation="relu")(image)
    x = layers.ReLU(max_value=6)(layers.DepthwiseConv2D(3)(x))
    x = layers.MaxPool2D()(x)
    y = layers.Conv2D(8, 1)(x)
    x = layers.Concatenate()([layers.Add()([x, y]), y])
    return keras.Model(image, layers.Softmax()(layers.Dense(6)(layers.GlobalAveragePooling2D()(x))))


def _wide(keras: Any) -> object:
    layers = keras.layers
    image = keras.Input((6, 6, 16), name="image")
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(image)
    x = layers.DepthwiseConv2D(3, depth_multiplier=4)(x)
    return keras.Model(image, layers.Dense(20)(layers.GlobalAveragePooling2D()(x)))


def _mobile(keras: Any) -> object:
    layers = keras.layers
    x = image = keras.Input((8, 8, 4), name="image")
    for stride in (1, 2):
        x = layers.ZeroPadding2D(1)(x)
        x = layers.DepthwiseConv2D(3, strides=stride)(x)
        x = layers.Activation("hard_silu")(layers.Conv2D(8, 1)(x))
        gate = layers.Conv2D(8, 1, activation="sigmoid")(layers.GlobalAveragePooling2D(keepdims=True)(x))
        x = layers.Multiply()([x, gate])
    return keras.Model(image, layers.Flatten()(x))


def _decoder(keras: Any, *, leaky: bool = True) -> object:
    layers = keras.layers
    image = keras.Input((4, 4, 3), name="image")
    x = layers.Conv2DTranspose(4, 3, strides=2, padding="same", activation="tanh")(image)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    x = layers.UpSampling2D(2, interpolation="nearest")(layers.PReLU(shared_axes=[1, 2])(x))
    x = layers.Conv2D(2, 3, dilation_rate=2)(x)
    # LiteRT's kernel of the quantised LeakyRelu rounds down, so that it differs from the formula by one step.
    return keras.Model(image, layers.LeakyReLU(negative_slope=0.1)(x) if leaky else x)


def _mlp(keras: Any) -> object:
    layers = keras.layers
    features = keras.Input((40,), name="features")
    x = layers.Dense(64, activation="relu")(features)
    x = layers.LayerNormalization()(layers.Dense(32, activation="gelu")(x))
    return keras.Model(features, {"score": layers.Dense(1, activation="sigmoid")(x), "logits": layers.Dense(5)(x)})


def _attention(keras: Any) -> object:
    layers = keras.layers
    x = tokens = keras.Input((6, 8), name="tokens")
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    return keras.Model(tokens, layers.Dense(4)(x))


def _embedding(keras: Any) -> object:
    layers = keras.layers
    ids = keras.Input((5,), dtype="int32", name="ids")
    return keras.Model(ids, layers.Dense(3)(layers.Conv1D(4, 2)(layers.Embedding(12, 6)(ids))))


def _lstm(keras: Any) -> object:
    series = keras.Input((5, 3), batch_size=1, name="series")
    return keras.Model(series, keras.layers.LSTM(4)(series))


MODELS = {
    "lite_cnn": ZooModel("tflite", _lite(_cnn)),
    "lite_mobile": ZooModel("tflite", _lite(_mobile)),
    "lite_decoder": ZooModel("tflite", _lite(_decoder)),
    "lite_mlp": ZooModel("tflite", _lite(_mlp)),
    "lite_attention": ZooModel("tflite", _lite(_attention)),
    "lite_embedding": ZooModel("tflite", _lite(_embedding)),
    "lite_float16": ZooModel("tflite", _lite(_cnn, "float16")),
    "lite_dynamic": ZooModel("tflite", _lite(_mlp, "dynamic")),
    "lite_dynamic_cnn": ZooModel("tflite", _lite(_wide, "dynamic")),
    "lite_int8": ZooModel("tflite", _lite(_cnn, "int8")),
    "lite_uint8": ZooModel("tflite", _lite(_mobile, "uint8")),
    "lite_int8_inside": ZooModel("tflite", _lite(_mobile, "int8_inside")),
    "lite_int8_mlp": ZooModel("tflite", _lite(_mlp, "int8")),
    "lite_int8_decoder": ZooModel("tflite", _lite(lambda keras: _decoder(keras, leaky=False), "int8")),
    "lite_int16": ZooModel("tflite", _lite(_cnn, "int16")),
    "lite_lstm": ZooModel("tflite", _lite(_lstm)),
}
