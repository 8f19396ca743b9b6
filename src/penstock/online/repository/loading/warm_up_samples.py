"""The requests that a configuration's ``model_warmup`` describes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from penstock.errors import InvalidConfig, PenstockError
from penstock.online.repository.config import ModelConfig, WarmUpInput
from penstock.request import InferRequest
from penstock.tensor import Array, DataType, element_count, from_wire

_FOLDER = "warmup"
_MAX_BYTES = 1 << 30
"""Most bytes of one input of all requests of a sample together."""
_MAX_TEXT_BYTES = 16


class WarmUpSample(msgspec.Struct, frozen=True):
    """One entry of ``model_warmup``: ``count`` times ``rows`` requests like ``request``, which has one row, or is whole where
    requests are not merged."""

    name: str
    request: InferRequest
    rows: int
    count: int


def read_samples(config: ModelConfig, folder: Path) -> Iterator[WarmUpSample]:
    """The samples of the completed ``config``; data files are in folder ``warmup`` of ``folder``.

    Raises PenstockError, naming the sample, when one that cannot be is reached.
    """
    random = np.random.default_rng(0)
    for number, given in enumerate(config.model_warmup):
        name, rows = given.name or str(number), max(1, given.batch_size)
        with_name = f"failed to run warmup sample '{name}': "
        if rows > config.max_rows:
            limit = f"at most {config.max_batch_size} rows are" if config.batchable else "no requests are"
            raise InvalidConfig(f"{with_name}'batch_size' is {rows}, and {limit} merged", "use a smaller one")
        first = (1,) if config.batchable else ()
        inputs = {}
        for key, tensor in given.inputs.items():
            try:
                inputs[key] = _array(tensor, first + tensor.dims, rows, folder / _FOLDER, random)
            except PenstockError as error:
                raise InvalidConfig(f"{with_name}input '{key}': {error.message}", error.hint) from None
        yield WarmUpSample(name, InferRequest(config.name, inputs), rows, max(1, given.count))


def _array(tensor: WarmUpInput, shape: tuple[int, ...], rows: int, home: Path, random: np.random.Generator) -> Array:
    datatype, count = tensor.data_type, element_count(shape)
    if count * rows * (datatype.itemsize or _MAX_TEXT_BYTES) > _MAX_BYTES:
        raise InvalidConfig(f"{rows} rows with dims {list(tensor.dims)} take more than {_MAX_BYTES} bytes")
    if tensor.input_data_file is not None:
        return _from_file(home, tensor.input_data_file, datatype, shape, count * datatype.itemsize)
    is_random = tensor.random_data
    if datatype is DataType.BYTES:
        array = np.empty(count, np.object_)
        array[:] = [random.bytes(8).hex().encode() if is_random else b"" for _ in range(count)]
        return array.reshape(shape)
    if not is_random:
        return np.zeros(shape, datatype.dtype)
    # Whatever integers stand for, 0 and 1 are most likely among them.
    values = random.random(shape, np.float32) if datatype.is_float else random.integers(0, 2, shape)
    return np.asarray(values, datatype.dtype)


def _from_file(home: Path, name: str, datatype: DataType, shape: tuple[int, ...], size: int) -> Array:
    """The file's bytes as they are on the wire, of one row; ``size`` is 0 for BYTES."""
    home, path = home.resolve(), (home / name).resolve()
    if not path.is_relative_to(home):
        raise InvalidConfig(f"the file '{name}' leads out of the model's folder '{_FOLDER}'")
    if not path.is_file():
        raise InvalidConfig(f"there is no file '{name}'", f"put it into the model's folder '{_FOLDER}'")
    try:
        found = path.stat().st_size
        if found > (size or _MAX_BYTES):
            raise InvalidConfig(f"the file '{name}' has {found} bytes, and must have {size or f'at most {_MAX_BYTES}'}")
        return from_wire(path.read_bytes(), datatype, shape)
    except OSError as error:
        raise InvalidConfig(f"cannot read the file '{name}': {error.strerror}") from None
