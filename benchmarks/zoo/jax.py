"""Small models of JAX and Flax: functions with constants, and modules."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.zoo.model import ZooModel
from penstock.offline.convert.base import ConvertOptions, InputSpec
from penstock.tensor import Array, DataType


def _weights(*shape: int) -> Array:
    return (np.random.default_rng(sum(shape)).standard_normal(shape) / 2).astype(np.float32)


def mlp() -> Any:
    import jax

    first, second = _weights(4, 8), _weights(8, 3)

    def predict(x: Any) -> Any:
        return {"probabilities": jax.nn.softmax(jax.nn.relu(x @ first) @ second)}

    return predict


def attention() -> Any:
    import jax
    import jax.numpy as jnp

    query, key, value = (_weights(8, 8) + index for index in range(3))

    def attend(x: Any) -> Any:
        scores = jnp.einsum("bqd,bkd->bqk", x @ query, x @ key) / 8
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        return jax.nn.softmax(jnp.where(past, scores, -1e9)) @ (x @ value)

    return attend


def scan() -> Any:
    import jax.numpy as jnp
    from jax import lax

    weights = _weights(4, 4)

    def run(x: Any) -> Any:
        def step(state: Any, row: Any) -> Any:
            state = jnp.tanh(state @ weights + row)
            return state, state * 2

        last, states = lax.scan(step, jnp.zeros((x.shape[0], 4)), jnp.swapaxes(x, 0, 1))
        return {"last": last, "states": jnp.swapaxes(states, 0, 1)}

    return run


def while_loop() -> Any:
    from jax import lax

    def halve(x: Any) -> Any:
        return lax.while_loop(lambda state: abs(state).max() > 1, lambda state: state / 2, x)

    return halve


def cond() -> Any:
    from jax import lax

    def choose(x: Any) -> Any:
        return lax.cond(x.sum() > 0, lambda y: y * 2, lambda y: y - 1, x)

    return choose


def embedding() -> Any:
    import jax.numpy as jnp

    table = _weights(20, 4)

    def embed(ids: Any) -> Any:
        return jnp.asarray(table)[ids].mean(axis=1)

    return embed


def normalise() -> Any:
    import jax.numpy as jnp

    def normal(x: Any, scale: Any) -> Any:
        mean, deviation = x.mean(-1, keepdims=True), x.std(-1, keepdims=True)
        return (x - mean) / jnp.maximum(deviation, 1e-3) * scale, x

    return normal


def order() -> Any:
    import jax.numpy as jnp

    def ordered(x: Any) -> Any:
        return jnp.sort(x, axis=-1), jnp.argmax(x, axis=-1), jnp.cumsum(x, axis=-1)

    return ordered


def cnn() -> Any:
    """A module with batch normalisation and dropout, in training mode."""
    from flax import nnx

    class Cnn(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.5, rngs=rngs)
            self.head = nnx.Linear(64, 5, rngs=rngs)

        def __call__(self, image: Any) -> Any:
            image = nnx.avg_pool(nnx.relu(self.norm(self.conv(image))), (2, 2), (2, 2))
            return self.head(self.dropout(image.reshape(image.shape[0], -1)))

    return Cnn(nnx.Rngs(0))


def transformer() -> Any:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.attention = nnx.MultiHeadAttention(2, 8, decode=False, rngs=rngs)
            self.first, self.second = nnx.LayerNorm(8, rngs=rngs), nnx.LayerNorm(8, rngs=rngs)
            self.wide, self.narrow = nnx.Linear(8, 16, rngs=rngs), nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = x + self.attention(self.first(x))
            return x + self.narrow(nnx.gelu(self.wide(self.second(x))))

    return Block(nnx.Rngs(0))


def linen() -> Any:
    import jax
    import jax.numpy as jnp
    from flax import linen as nn

    class Mlp(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            return nn.Dense(2)(nn.gelu(nn.LayerNorm()(nn.Dense(8)(x))))

    module = Mlp()
    return module.bind(module.init(jax.random.PRNGKey(0), jnp.ones((1, 4))))


def singular_values() -> Any:
    import jax.numpy as jnp

    def values(x: Any) -> Any:
        return jnp.linalg.svd(x, compute_uv=False)

    return values


def python_branch() -> Any:
    def choose(x: Any) -> Any:
        return x if x.sum() > 0 else -x

    return choose


def _model(make: Callable[[], Any], diagnosis: str = "", **inputs: tuple[int | str, ...]) -> ZooModel:
    def made(folder: Path) -> Any:
        return make()

    types = {name: DataType.INT32 if name == "ids" else DataType.FP32 for name in inputs}
    specs = tuple(InputSpec(name, types[name], shape) for name, shape in inputs.items())
    return ZooModel("jax", made, ConvertOptions(inputs=specs), diagnosis)


MODELS = {
    "mlp": _model(mlp, x=("N", 4)),
    "attention": _model(attention, x=("N", "T", 8)),
    "scan": _model(scan, x=("N", "T", 4)),
    "while_loop": _model(while_loop, x=("N", 4)),
    "cond": _model(cond, x=("N", 4)),
    "embedding": _model(embedding, ids=("N", "T")),
    "normalise": _model(normalise, x=("N", 6), scale=(6,)),
    "order": _model(order, x=("N", 7)),
    "nnx_cnn": _model(cnn, image=("N", 8, 8, 3)),
    "nnx_transformer": _model(transformer, x=("N", 6, 8)),
    "linen_mlp": _model(linen, x=("N", 4)),
    "order_of_any_size": _model(order, "sort at jax.py", x=("N", "T")),
    "singular_values": _model(singular_values, "svd at jax.py", x=(3, 3)),
    "python_branch": _model(python_branch, "depends on the values of its inputs", x=("N", 4)),
}
