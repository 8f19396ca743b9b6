"""Arrays of all datatypes, drawn by hypothesis."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from penstock.tensor import DataType

JSON_TYPES = [datatype for datatype in DataType if datatype not in (DataType.FP16, DataType.BF16)]


@st.composite
def tensors(draw: st.DrawFn, among: list[DataType]) -> np.ndarray:
    datatype = draw(st.sampled_from(among))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    if datatype is DataType.BYTES:
        texts = draw(st.lists(st.text().map(str.encode), min_size=int(np.prod(shape)), max_size=int(np.prod(shape))))
        array = np.empty(len(texts), object)
        array[:] = texts
        return array.reshape(shape)
    if datatype in (DataType.FP16, DataType.BF16):
        return draw(arrays.arrays(np.float32, shape, elements=st.floats(-9, 9, width=32))).astype(datatype.dtype)
    return draw(arrays.arrays(datatype.dtype, shape))
