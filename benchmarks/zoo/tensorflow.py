"""Models of TensorFlow and Keras: saved models, Keras files, frozen graphs with the control flow of TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import DataType


def _keras(build: Callable[[Any], object], suffix: str = ".keras") -> Callable[[Path], object]:
    """Saves the Keras model that ``build(keras)`` returns."""

    def make(folder: Path) -> object:
        import keras

        keras.utils.set_random_seed(0)
        path = folder / f"model{suffix}"
        build(keras).save(path)
        return path

    return make


def _saved(build: Callable[[Any, Any], object]) -> Callable[[Path], object]:
    """Saves the module that ``build(tf, rng)`` returns, with its signatures, as a SavedModel."""

    def make(folder: Path) -> object:
        import tensorflow as tf

        module, signatures = build(tf, np.random.default_rng(0))
        tf.saved_model.save(module, str(folder / "saved"), signatures=signatures)
        return folder / "saved"

    return make


def _frozen(build: Callable[[Any, Any], None]) -> Callable[[Path], object]:
    """Writes the graph of TensorFlow 1 that ``build(tf, rng)`` makes."""

    def make(folder: Path) -> object:
        import tensorflow as tf

        v1 = tf.compat.v1
        with v1.Graph().as_default() as graph:
            v1.disable_control_flow_v2()
            try:
                build(tf, np.random.default_rng(0))
            finally:
                v1.enable_control_flow_v2()
        path = folder / "frozen.pb"
        path.write_bytes(graph.as_graph_def().SerializeToString())
        return path

    return make


def _cnn(keras: Any) -> object:
    layers = keras.layers
    image = keras.Input((None, None, 3), name="image")
    x = layers.Conv2D(8, 3, padding="same", use_bias=False)(image)
    x = layers.BatchNormalization(moving_mean_initializer="random_normal", gamma_initializer="random_uniform")(x)
    x = layers.ReLU(6.0)(x)
    x = layers.MaxPool2D(3, 2, padding="same")(x)
    x = layers.SeparableConv2D(12, 3, padding="same", activation="swish")(x)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(5, activation="softmax", name="probabilities")(x))


def _residual(keras: Any) -> object:
    layers = keras.layers
    image = keras.Input((16, 16, 4), name="image")
    x = layers.ZeroPadding2D(1)(image)
    x = layers.Conv2D(8, 3, strides=2)(x)
    y = layers.Conv2D(8, 3, padding="same", dilation_rate=2, activation="relu")(x)
    x = layers.Add()([x, layers.DepthwiseConv2D(3, padding="same")(y)])
    x = layers.Concatenate()([x, layers.AveragePooling2D(2, 1, padding="same")(x)])
    x = layers.Conv2DTranspose(6, 3, strides=2, padding="same")(x)
    x = layers.UpSampling2D(2, interpolation="bilinear")(x)
    return keras.Model(image, layers.Conv2D(2, 1, name="mask")(x))


def _two_inputs(keras: Any) -> object:
    layers = keras.layers
    inputs = {"ids": keras.Input((6,), dtype="int32", name="ids"), "price": keras.Input((1,), name="price")}
    x = layers.Embedding(20, 8)(inputs["ids"])
    x = layers.Flatten()(x)
    x = layers.Concatenate()([x, layers.Normalization(mean=3.0, variance=4.0)(inputs["price"])])
    x = layers.Dense(8, activation="gelu")(x)
    return keras.Model(inputs, {"class": layers.Dense(3)(x), "score": layers.Dense(1, activation="sigmoid")(x)})


def _lstm(keras: Any) -> object:
    layers = keras.layers
    x = series = keras.Input((None, 4), name="series")
    x = layers.LSTM(6, return_sequences=True)(x)
    x = layers.Bidirectional(layers.LSTM(5))(x)
    return keras.Model(series, layers.Dense(2, name="forecast")(x))


def _gru(keras: Any) -> object:
    layers = keras.layers
    series = keras.Input((7, 3), name="series")
    x = layers.GRU(6, return_sequences=True, reset_after=True)(series)
    x = layers.SimpleRNN(4)(x)
    return keras.Model(series, x)


def _encoder(keras: Any, *, causal: bool = False) -> object:
    layers = keras.layers
    ids = keras.Input((None,), dtype="int32", name="ids")
    x = layers.Embedding(30, 16)(ids)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x, use_causal_mask=causal))
    x = layers.LayerNormalization()(x + layers.Dense(16)(layers.Dense(32, activation="gelu")(x)))
    return keras.Model(ids, layers.Dense(30, name="logits")(x))


def _signal(keras: Any) -> object:
    layers = keras.layers
    signal = keras.Input((32, 2), name="signal")
    x = layers.Conv1D(6, 5, padding="causal", activation="elu")(signal)
    x = layers.MaxPool1D(2)(x)
    x = layers.Conv1DTranspose(4, 3, strides=2)(x)
    return keras.Model(signal, layers.GlobalMaxPooling1D()(layers.PReLU()(x)))


def _volume(keras: Any) -> object:
    layers = keras.layers
    volume = keras.Input((6, 6, 6, 2), name="volume")
    x = layers.Conv3D(4, 3, activation="leaky_relu")(volume)
    x = layers.AveragePooling3D(2)(x)
    return keras.Model(volume, layers.Dense(3)(layers.Flatten()(x)))


def _mlp(keras: Any) -> object:
    layers = keras.layers
    return keras.Sequential(
        [keras.Input((5,), name="x"), layers.Dense(8, activation="selu"), layers.Dropout(0.5), layers.Dense(2)]
    )


def _lambda(keras: Any) -> object:
    image = keras.Input((4,), name="x")
    return keras.Model(image, keras.layers.Lambda(lambda x: x * 2, name="twice")(image))


def subclassed() -> object:
    """A subclassed Keras model, whose inputs Keras does not know."""
    import keras

    class Network(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.out = keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(2)

        def call(self, features: Any, training: bool = False) -> dict[str, Any]:
            hidden = self.hidden(features)
            return {"hidden": hidden, "logits": self.out(hidden)}

    keras.utils.set_random_seed(0)
    return Network()


def _linear(tf: Any, rng: Any) -> object:
    module = tf.Module()
    module.weight = tf.Variable(rng.normal(size=(4, 3)).astype("f"))
    both = tf.TensorSpec((None, 4), tf.float32, "x"), tf.TensorSpec((None, 3), tf.float32, "y")
    serve = tf.function(lambda x, y: {"sum": x @ module.weight + y, "y": y}, input_signature=both)
    return module, {"serving_default": serve, "other": tf.function(lambda x: x, input_signature=both[:1])}


def _words(tf: Any, rng: Any) -> object:
    module = tf.Module()
    keys = tf.constant(["cat", "dog", "bird", "fish"])
    initial = tf.lookup.KeyValueTensorInitializer(keys, tf.constant([0, 1, 2, 3], tf.int64))
    module.table = tf.lookup.StaticHashTable(initial, 4)
    module.vectors = tf.Variable(rng.normal(size=(5, 3)).astype("f"))
    spec = tf.TensorSpec((None,), tf.string, "words")
    serve = tf.function(
        lambda words: {"vector": tf.gather(module.vectors, module.table.lookup(words))}, input_signature=[spec]
    )
    return module, {"serving_default": serve}


def _loop(tf: Any, rng: Any) -> object:
    module = tf.Module()
    weight = tf.constant(rng.normal(size=(3, 3)).astype("f") / 2)

    @tf.function(input_signature=[tf.TensorSpec((None, 3), tf.float32, "x"), tf.TensorSpec((), tf.int32, "steps")])
    def serve(x: Any, steps: Any) -> dict[str, Any]:
        step = tf.constant(0)
        while step < tf.minimum(steps, 5):
            x = tf.tanh(x @ weight) if tf.reduce_sum(x) > 0 else x + 1.0
            step += 1
        return {"state": x}

    module.serve = serve
    return module, {"serving_default": serve}


def _numeric(tf: Any, rng: Any) -> object:
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec((None, 6), tf.float32, "x")])
    def serve(x: Any) -> dict[str, Any]:
        values, places = tf.math.top_k(x, 3)
        return {
            "values": values,
            "places": places,
            "running": tf.cumsum(x, 1, exclusive=True, reverse=True),
            "outer": tf.einsum("bi,bj->bij", x, x),
            "one_hot": tf.one_hot(tf.argmax(x, 1), 6),
            "where": tf.where(x > 0, tf.sqrt(tf.abs(x)), tf.math.floormod(x, 0.75)),
            "slice": x[:, ::-2],
            "norm": tf.math.l2_normalize(x, 1),
        }

    module.serve = serve
    return module, {"serving_default": serve}


def _scatter(tf: Any, rng: Any) -> object:
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec((None, 5), tf.float32, "x")])
    def serve(x: Any) -> dict[str, Any]:
        rows = tf.shape(x)[0]
        moved = tf.tensor_scatter_nd_update(tf.transpose(x), [[1], [3]], tf.zeros([2, rows]))
        padded = tf.pad(x, [[0, 0], [2, 1]], "REFLECT")
        segments = tf.math.segment_sum(tf.transpose(x), tf.constant([0, 0, 1, 2, 2]))
        return {"moved": moved, "padded": padded, "segments": segments, "strange": tf.roll(x, 2, 1)}

    module.serve = serve
    return module, {"serving_default": serve}


def _random(tf: Any, rng: Any) -> object:
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec((None, 4), tf.float32, "x")])
    def serve(x: Any) -> dict[str, Any]:
        return {"noisy": x + tf.random.normal(tf.shape(x)), "twice": x * 2}

    module.serve = serve
    return module, {"serving_default": serve}


def _unsupported(tf: Any, rng: Any) -> object:
    module = tf.Module()

    @tf.function(input_signature=[tf.TensorSpec((3, 3), tf.float32, "x")])
    def serve(x: Any) -> dict[str, Any]:
        return {"values": tf.linalg.svd(x, compute_uv=False), "root": tf.math.bessel_i0e(x)}

    module.serve = serve
    return module, {"serving_default": serve}


def _while(tf: Any, rng: Any) -> None:
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, (None, 3), "x")
    weight = tf.constant(rng.normal(size=(3, 3)).astype("f") / 2)
    body = lambda i, h: (i + 1, tf.tanh(h @ weight))  # noqa: E731
    _, state = v1.while_loop(lambda i, h: i < 4, body, (tf.constant(0), x))
    tf.identity(state, "state")


def _cond(tf: Any, rng: Any) -> None:
    v1 = tf.compat.v1
    x = v1.placeholder(tf.float32, (None, 3), "x")
    chosen = v1.cond(tf.reduce_mean(x) > 0.5, lambda: x * 2.0, lambda: tf.nn.relu(x) - 1.0)
    tf.identity(chosen, "chosen")


def _dynamic_rnn(tf: Any, rng: Any) -> None:
    v1 = tf.compat.v1
    series = v1.placeholder(tf.float32, (None, None, 3), "series")
    kernel, bias = tf.constant(rng.normal(size=(7, 4)).astype("f") / 2), tf.zeros(4)
    steps = tf.shape(series)[1]
    sequence = tf.TensorArray(tf.float32, steps).unstack(tf.transpose(series, (1, 0, 2)))
    results = tf.TensorArray(tf.float32, steps)

    def body(step: Any, state: Any, results: Any) -> Any:
        state = tf.tanh(tf.concat((sequence.read(step), state), 1) @ kernel + bias)
        return step + 1, state, results.write(step, state)

    start = tf.zeros((tf.shape(series)[0], 4))
    _, _, results = v1.while_loop(lambda step, *_: step < steps, body, (0, start, results))
    tf.transpose(results.stack(), (1, 0, 2), name="states")


def _frozen_cnn(tf: Any, rng: Any) -> None:
    v1 = tf.compat.v1
    image = v1.placeholder(tf.float32, (None, 12, 12, 3), "image")
    x = tf.nn.conv2d(image, rng.normal(size=(3, 3, 3, 6)).astype("f"), 2, "SAME")
    scale, offset, mean = (rng.normal(size=6).astype("f") for _ in range(3))
    x = v1.nn.fused_batch_norm(x, scale, offset, mean, np.abs(mean) + 0.5, is_training=False)[0]
    x = tf.nn.local_response_normalization(tf.nn.relu6(x), 2)
    x = tf.nn.depthwise_conv2d(x, rng.normal(size=(3, 3, 6, 2)).astype("f"), (1, 1, 1, 1), "VALID")
    x = tf.nn.space_to_depth(x, 2)
    tf.nn.softmax(tf.reduce_mean(x, (1, 2)), name="probabilities")


_FEATURES = ConvertOptions(inputs=(InputSpec("features", DataType.FP32, ("batch", 6)),))

MODELS = {
    "keras_cnn": ZooModel("keras", _keras(_cnn)),
    "keras_residual": ZooModel("keras", _keras(_residual)),
    "keras_two_inputs": ZooModel("keras", _keras(_two_inputs)),
    "keras_lstm": ZooModel("keras", _keras(_lstm)),
    "keras_gru": ZooModel("keras", _keras(_gru)),
    "keras_encoder": ZooModel("keras", _keras(_encoder)),
    "keras_causal": ZooModel("keras", _keras(lambda keras: _encoder(keras, causal=True))),
    "keras_signal": ZooModel("keras", _keras(_signal)),
    "keras_volume": ZooModel("keras", _keras(_volume)),
    "keras_h5": ZooModel("keras", _keras(_mlp, ".h5")),
    "keras_subclassed": ZooModel("keras", lambda folder: "benchmarks.zoo.tensorflow:subclassed", _FEATURES),
    "keras_lambda": ZooModel("keras", _keras(_lambda), diagnosis="Lambda layer 'twice'"),
    "saved_linear": ZooModel("saved_model", _saved(_linear)),
    "saved_words": ZooModel("saved_model", _saved(_words)),
    "saved_loop": ZooModel("saved_model", _saved(_loop)),
    "saved_numeric": ZooModel("saved_model", _saved(_numeric)),
    "saved_scatter": ZooModel("saved_model", _saved(_scatter)),
    "saved_random": ZooModel("saved_model", _saved(_random)),
    "saved_unsupported": ZooModel("saved_model", _saved(_unsupported), diagnosis="Svd"),
    "graph_while": ZooModel("graph_def", _frozen(_while)),
    "graph_cond": ZooModel("graph_def", _frozen(_cond)),
    "graph_dynamic_rnn": ZooModel("graph_def", _frozen(_dynamic_rnn)),
    "graph_cnn": ZooModel("graph_def", _frozen(_frozen_cnn)),
}
