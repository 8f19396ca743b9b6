"""The warm-up requests that a configuration's ``model_warmup`` describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import InvalidConfig, PenstockError
from penstock.online.repository.config import ModelConfig, WarmUpInput
from penstock.online.repository.loading.scheduling import read_inside
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, element_count, from_wire

_FOLDER = "warmup"
_MAX_BYTES = 1 << 30
"""Maximum bytes of one input, added up over all requests of a sample."""
_MAX_TEXT_BYTES = 16


class WarmUpSample(msgspec.Struct, frozen=True):
    """One entry of ``model_warmup``."""

    name: str
    request: InferRequest
    """The request. It has a single row if requests are merged."""
    rows: int
    """Number of copies of the request in one call."""
    count: int
    """Number of calls."""


def read_samples(config: ModelConfig, folder: Path) -> Iterator[WarmUpSample]:
    """The samples of the completed ``config``. Their data files are in the subfolder ``warmup`` of ``folder``.

    Raises InvalidConfig, which names the sample, when the iteration reaches an invalid sample.
    """
    random = np.random.default_rng(0)
    for number, given in enumerate(config.model_warmup):
        name, rows = given.name or str(number), max(1, given.batch_size)
        begin = f"failed to run warmup sample '{name}': "
        if rows > config.max_rows:
            limit = f"at most {config.max_batch_size} rows are" if config.batchable else "no requests are"
            raise InvalidConfig(f"{begin}'batch_size' is {rows}, but {limit} merged", "use a smaller 'batch_size'")
        first = (1,) if config.batchable else ()
        inputs = {}
        for key, tensor in given.inputs.items():
            try:
                inputs[key] = _array(tensor, first + tensor.dims, rows, folder / _FOLDER, random)
            except PenstockError as error:
                raise InvalidConfig(f"{begin}input '{key}': {error.message}", error.hint) from None
        yield WarmUpSample(name, InferRequest(config.name, inputs), rows, max(1, given.count))


def _array(tensor: WarmUpInput, shape: tuple[int, ...], rows: int, home: Path, random: np.random.Generator) -> Array:
    datatype, count = tensor.data_type, element_count(shape)
    if count * rows * (datatype.itemsize or _MAX_TEXT_BYTES) > _MAX_BYTES:
        raise InvalidConfig(f"{rows} rows with dims {list(tensor.dims)} take more than {_MAX_BYTES} bytes")
    if tensor.input_data_file is not None:
        # One byte more than allowed, so that a longer file is refused.
        data = read_inside(home, tensor.input_data_file, (count * datatype.itemsize or _MAX_BYTES) + 1)
        return from_wire(data, datatype, shape)
    is_random = tensor.random_data
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = [random.bytes(8).hex().encode() if is_random else b"" for _ in range(count)]
        return array.reshape(shape)
    if not is_random:
        return np.zeros(shape, datatype.dtype)
    # 0 and 1 are the integers that a model most likely accepts.
    values = random.random(shape, np.float32) if datatype.is_float else random.integers(0, 2, shape)
    return np.asarray(values, datatype.dtype)
