"""Pickles that the user trusts: even these may use only the names on an allow-list.

::

    data ─ decompressed ─ run with inert names, which finds all names ─ checked ─ run with the real ones

A pickle has no branches, so the second run uses the names of the first. Reads pickles and joblib's files.
"""

from __future__ import annotations

import bz2
import functools
import importlib
import io
import lzma
import math
import pickle
import zlib
from _compat_pickle import IMPORT_MAPPING, NAME_MAPPING
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import msgspec
import numpy as np

from penstock.errors import InvalidModel, PermissionDenied, ResourceExhausted, printable, shortened
from penstock.offline.convert.tables import pickled_arrays as arrays

_MAX_BYTES = 32 << 30
_MAX_DEPTH, _MAX_TUPLES = 1_000, 1_000_000
"""Of tuples in tuples. Their hash is computed by recursion without a limit, and again for each place of a shared tuple."""
_SHOWN_NAMES = 12
_DECOMPRESSORS = (
    (b"\x1f\x8b", lambda: zlib.decompressobj(31)),
    (b"x", zlib.decompressobj),
    (b"BZ", bz2.BZ2Decompressor),
    (b"\xfd7zXZ", lzma.LZMADecompressor),
    (b"]\x00", lzma.LZMADecompressor),
)
_PythonUnpickler: Any = vars(pickle)["_Unpickler"]
"""The unpickler in Python, because the one in C cannot stop for joblib's arrays."""


class Allowed(msgspec.Struct, frozen=True):
    """The names that a pickle may use."""

    names: frozenset[str] = frozenset()
    classes: Mapping[str, str] = {}
    """Package -> base class. All classes that the package defines and that derive from the base class are allowed."""

    def __or__(self, other: Allowed) -> Allowed:
        return Allowed(self.names | other.names, {**self.classes, **other.classes})

    def admits(self, module: str, name: str) -> bool:
        """True if the name is allowed. Imports ``module`` only if it belongs to one of the packages."""
        if f"{module}.{name}" in self.names:
            return True
        package = module.partition(".")[0]
        if package not in self.classes or ".test" in module or "._test" in module:
            return False
        try:
            found = getattr(importlib.import_module(module), name, None)
            home, _, base = self.classes[package].rpartition(".")
            wanted = getattr(importlib.import_module(home), base)
        except (ImportError, ValueError, OSError, RuntimeError):  # a module that cannot be imported here
            return False
        if isinstance(found, type):
            return found.__module__.partition(".")[0] == package and issubclass(found, wanted)
        # Cython's classes are made by a function beside each class.
        return name.startswith("__pyx_unpickle_") and self.admits(module, name.removeprefix("__pyx_unpickle_"))


def _table(text: str) -> frozenset[str]:
    """The names of a table with lines such as ``collections: OrderedDict deque``."""
    rows = (line.split(": ") for line in text.strip().splitlines())
    return frozenset(f"{module}.{name}" for module, names in rows for name in names.split())


BASIC = Allowed(
    _table("""
builtins: bool bytearray bytes complex dict float frozenset int list object range set slice str tuple
collections: OrderedDict defaultdict Counter deque
copyreg: _reconstructor
datetime: date datetime time timedelta timezone
_codecs: encode
joblib.numpy_pickle: NumpyArrayWrapper
numpy: dtype ndarray bool bool_ float16 float32 float64 int8 int16 int32 int64 uint8 uint16 uint32 uint64 str_ bytes_
numpy.core.multiarray: _reconstruct scalar
numpy._core.multiarray: _reconstruct scalar
numpy.core.numeric: _frombuffer
numpy._core.numeric: _frombuffer
numpy.random.bit_generator: SeedSequence __pyx_unpickle_SeedSequence
numpy.random._mt19937: MT19937
numpy.random._pcg64: PCG64
numpy.random._pickle: __randomstate_ctor __generator_ctor __bit_generator_ctor
""")
)
"""Containers of Python, and arrays of numpy."""
SKLEARN = BASIC | Allowed(
    _table("""
catboost.core: CatBoostClassifier CatBoostRegressor CatBoostRanker
lightgbm.basic: Booster
scipy.sparse: csr_matrix csc_matrix coo_matrix
scipy.sparse._coo: coo_matrix coo_array
scipy.sparse._csc: csc_matrix csc_array
scipy.sparse._csr: csr_matrix csr_array
sklearn.feature_selection._univariate_selection: f_classif f_regression chi2
sklearn.metrics._dist_metrics: newObj
sklearn.neighbors._ball_tree: newObj
sklearn.neighbors._kd_tree: newObj
xgboost.core: Booster
"""),
    {"sklearn": "builtins.object", **dict.fromkeys(("xgboost", "lightgbm"), "sklearn.base.BaseEstimator")},
)
"""Estimators of scikit-learn and of libraries that follow its interface."""


def load_trusted(source: Path | bytes, allowed: Allowed) -> Any:
    """The object in a pickle or a file of joblib. Raises PermissionDenied with all names that are not allowed, InvalidModel."""
    data = _checked(source, allowed)
    return _run(functools.partial(_Unpickler, allowed=allowed), io.BytesIO(data))


def names_in(source: Path | bytes) -> tuple[str, ...]:
    """All names that a pickle would import, sorted. Nothing is imported. Raises InvalidModel."""
    return tuple(sorted(f"{module}.{name}" for module, name in _scan(_pickle(source))))


def _checked(source: Path | bytes, allowed: Allowed) -> bytes:
    data = _pickle(source)
    forbidden = sorted(f"{module}.{name}" for module, name in _scan(data) if not allowed.admits(module, name))
    if forbidden:
        more = f" and {len(forbidden) - _SHOWN_NAMES} more" * (len(forbidden) > _SHOWN_NAMES)
        listed = ", ".join(map(shortened, forbidden[:_SHOWN_NAMES]))
        raise PermissionDenied(
            f"the pickle uses {len(forbidden)} name(s) that are not on the allow-list: {listed}{more}",
            "if you trust these, write a function that loads the model, and give it as module:function",
        )
    return data


def _pickle(source: Path | bytes) -> bytes:
    """The pickle in ``source``, without compression."""
    data = source if isinstance(source, bytes) else source.read_bytes()
    try:
        for magic, make in _DECOMPRESSORS:
            if data.startswith(magic):
                return make().decompress(data, _MAX_BYTES)
    except Exception as error:  # noqa: BLE001 - damaged data raises anything
        raise InvalidModel(
            f"the file cannot be decompressed: {error or 'no pickle in it'}", "it may be truncated"
        ) from None
    return data


def _scan(data: bytes) -> set[tuple[str, str]]:
    found = set[tuple[str, str]]()
    _run(functools.partial(_Scanner, found=found), io.BytesIO(data))
    return found


def _run(make: Any, stream: IO[bytes]) -> Any:
    try:
        return make(stream).load()
    except MemoryError:
        raise ResourceExhausted(
            "the pickle needs more memory than there is", "use a machine with more memory"
        ) from None
    except EOFError:
        raise InvalidModel(
            "the pickle is truncated: it ends before its last instruction", "save the model again"
        ) from None
    except IndexError as error:  # usually of the stack
        raise InvalidModel(
            f"the pickle is broken: an instruction lacks its object ({printable(str(error))})", "save the model again"
        ) from None
    except Exception as error:  # noqa: BLE001 - a damaged pickle raises anything
        told = printable(f"{type(error).__name__}: {error}"[:200])
        raise InvalidModel(
            f"the pickle cannot be read: {told}", "it may be truncated, or of another version of its library"
        ) from None


def _checking(load: Any) -> Any:
    """The method ``load``, which makes a tuple, followed by its check."""

    def load_checked(unpickler: _Unpickler) -> None:
        load(unpickler)
        unpickler.check_tuple()

    return load_checked


class _Unpickler(_PythonUnpickler):  # type: ignore[misc] # it has no types
    """An unpickler for allowed names. It reads the arrays that joblib puts between the opcodes, as joblib does."""

    dispatch = dict(_PythonUnpickler.dispatch)

    def __init__(self, file: IO[bytes], *, allowed: Allowed) -> None:
        super().__init__(file)
        self._allowed, self._stream = allowed, file
        self._nests: dict[int, tuple[int, int]] = {}
        """Number and depth of the tuples in a tuple, by its identity. A new tuple replaces a deleted one."""

    def find_class(self, module: str, name: str) -> Any:
        module, name = self._renamed(module, name)
        if not self._allowed.admits(module, name):
            raise pickle.UnpicklingError(f"'{module}.{name}' is not on the allow-list")
        return _STAND_INS.get(f"{module}.{name}") or super().find_class(module, name)

    def _renamed(self, module: str, name: str) -> tuple[str, str]:
        """Names of Python 2 under those of Python 3."""
        if self.proto < 3:
            module, name = NAME_MAPPING.get((module, name), (IMPORT_MAPPING.get(module, module), name))
        return module, name

    def check_tuple(self) -> None:
        """Raise UnpicklingError if the tuple on the stack has too many tuples in it."""
        made = self.stack[-1]
        inner = [self._nests.get(id(one), (1, 1)) for one in made if type(one) is tuple]
        count, depth = 1 + sum(one for one, _ in inner), 1 + max((one for _, one in inner), default=0)
        if count > _MAX_TUPLES or depth > _MAX_DEPTH:
            raise pickle.UnpicklingError("too many tuples are nested")
        self._nests[id(made)] = count, depth

    for _opcode in (pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3):
        dispatch[_opcode[0]] = _checking(dispatch[_opcode[0]])

    def load_build(self) -> None:
        built, state = self.stack[-2:]
        if isinstance(built, np.dtype):
            self.stack[-2:] = [arrays.dtype_of(built, state)]
            for key in reversed(self.memo):  # most types are among the last entries
                if self.memo[key] is built:
                    self.memo[key] = self.stack[-1]
                    break
            return
        if isinstance(built, np.ndarray):
            arrays.check_array(built, state)
        super().load_build()
        if isinstance(built, arrays.JoblibArray):
            self.stack[-1] = self._array(built)

    dispatch[pickle.BUILD[0]] = load_build

    def _array(self, told: arrays.JoblibArray) -> Any:
        if told.dtype.hasobject:
            return self._nested()
        if told.numpy_array_alignment_bytes is not None:
            self._stream.read(self._stream.read(1)[0])
        shape = tuple(map(int, told.shape))
        size = math.prod(shape) * told.dtype.itemsize
        data = bytearray(self._stream.read(size)) if 0 <= size <= _MAX_BYTES else bytearray()
        if len(data) != size:
            raise pickle.UnpicklingError("an array is truncated")
        array = np.frombuffer(data, told.dtype).reshape(shape, order="F" if told.order == "F" else "C")
        return array.astype(told.dtype.newbyteorder("="), copy=False)

    def _nested(self) -> Any:
        return _Unpickler(self._stream, allowed=self._allowed).load()


class _Scanner(_Unpickler):
    """Finds the names of a pickle. Every name stands for ``_Inert``, so nothing is imported or called."""

    def __init__(self, file: IO[bytes], *, found: set[tuple[str, str]]) -> None:
        super().__init__(file, allowed=BASIC)
        self._found = found

    def find_class(self, module: str, name: str) -> Any:
        module, name = self._renamed(module, name)
        self._found.add((module, name))
        return _SCANNED.get(f"{module}.{name}", _Inert)

    def _nested(self) -> Any:
        return _Scanner(self._stream, found=self._found).load()


class _Inert:
    """An object that accepts all that a pickle can do to an object, and does nothing."""

    def __new__(cls, *_: Any, **__: Any) -> Any:
        return object.__new__(_Inert)

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self

    def __setstate__(self, _: Any) -> None: ...

    def __setitem__(self, _: Any, __: Any) -> None: ...

    append = extend = add = __setstate__


_SCANNED: dict[str, Any] = {
    "_codecs.encode": arrays.encode,
    "joblib.numpy_pickle.NumpyArrayWrapper": arrays.JoblibArray,
    "numpy.dtype": arrays.new_dtype,
}
"""The names that are not inert during a scan, because the length of joblib's arrays depends on them."""
_STAND_INS = _SCANNED | {"numpy.ndarray": arrays.NdArray}
for _core in ("numpy.core", "numpy._core"):
    _STAND_INS[f"{_core}.multiarray._reconstruct"] = arrays.new_array
    _STAND_INS[f"{_core}.multiarray.scalar"] = arrays.scalar
    _STAND_INS[f"{_core}.numeric._frombuffer"] = arrays.from_buffer
