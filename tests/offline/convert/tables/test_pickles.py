import collections
import contextlib
import datetime as dt
import io
import os
import pickle
import random
import warnings

import joblib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.compose import ColumnTransformer
from sklearn.ensemble import GradientBoostingClassifier, HistGradientBoostingRegressor, RandomForestClassifier
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression, SGDClassifier
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from sklearn.svm import SVC

from hostile_pickles import Calls
from penstock.errors import InvalidModel, PenstockError, PermissionDenied
from penstock.offline.convert.tables.pickles import BASIC, SKLEARN, load_trusted, names_in

ARRAYS = {
    "float": np.arange(6, dtype=np.float32).reshape(2, 3),
    "fortran": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    "objects": np.array(["a", None, 3], object),
    "text": np.array(["é", "b"]),
    "records": np.array([(1, 2.5), (3, 4.5)], [("a", np.int64), ("b", np.float64)]),
    "aligned": np.zeros(2, np.dtype([("a", np.int8), ("b", np.float64, (2,))], align=True)),
    "times": np.array(["2020-01-02"], "datetime64[D]"),
    "empty": np.empty((0, 4)),
    "scalar": np.float64(2.5),
    "zero_d": np.array(3, np.int16),
    "big_endian": np.arange(3, dtype=">i4"),
}
PLAIN = {
    "list": [1, 2.5, None, True, b"x", "é", 1 << 80, (1, 2), {3}, frozenset({4})],
    "ordered": collections.OrderedDict(a=1),
    "defaults": collections.defaultdict(list, a=[1]),
    "day": dt.date(2020, 1, 2),
    "slice": slice(1, 2),
    "type": np.float32,
    "complex": 1j,
}


def same(one, other):
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, np.ndarray):
        return type(one) is type(other) and one.dtype == other.dtype and np.array_equal(one, other)
    return type(one) is type(other) and one == other


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_plain_objects_and_arrays_are_loaded(protocol):
    data = pickle.dumps({**PLAIN, **ARRAYS}, protocol)
    assert same(load_trusted(data, BASIC), pickle.loads(data))


@pytest.mark.parametrize("compress", [0, 3, ("gzip", 3), ("bz2", 3), ("xz", 3), ("lzma", 3)])
def test_files_of_joblib_are_loaded(tmp_path, compress):
    joblib.dump({**PLAIN, **ARRAYS}, tmp_path / "m.joblib", compress=compress)
    assert same(load_trusted(tmp_path / "m.joblib", BASIC), joblib.load(tmp_path / "m.joblib"))


def test_an_array_alone_is_loaded(tmp_path):
    joblib.dump(np.arange(3), tmp_path / "m.joblib")
    assert load_trusted(tmp_path / "m.joblib", BASIC).tolist() == [0, 1, 2]


def test_random_numbers_continue():
    state = np.random.RandomState(3)
    found = load_trusted(pickle.dumps([state, np.random.default_rng(4)]), BASIC)
    assert found[0].rand() == state.rand()
    assert found[1].random() == np.random.default_rng(4).random()


def test_all_forbidden_names_are_listed_and_nothing_is_called(tmp_path):
    target = tmp_path / "made"
    data = pickle.dumps([Calls(os.mkdir, str(target)), {"a": Calls(eval, "1")}, Calls(os.system, "true")])
    with pytest.raises(PermissionDenied, match=r"3 name\(s\).*: builtins.eval, posix.mkdir, posix.system") as caught:
        load_trusted(data, SKLEARN)
    assert "module:function" in caught.value.hint
    assert not target.exists()


def test_names_in_old_protocols_and_those_of_python_2_are_found():
    assert names_in(b"c__builtin__\neval\n(S'1'\ntR.") == ("builtins.eval",)
    assert names_in(b"(S'true'\nios\nsystem\n.") == ("os.system",)
    assert names_in(b"(cos\nsystem\nS'true'\no.") == ("os.system",)


def test_names_that_are_put_together_are_found():
    """The module and the name of STACK_GLOBAL can come from the memo."""
    data = b"\x80\x04\x8c\x06system\x94\x8c\x02os\x94h\x01h\x00\x93\x8c\x04true\x85R."
    assert names_in(data) == ("os.system",)


POWERFUL = """
builtins getattr
builtins open
numpy load
numpy memmap
os system
sklearn.base os
sklearn.base BaseEstimator.__init__
sklearn base.BaseEstimator
sklearn..base BaseEstimator
sklearn.utils._testing TempMemmap
sklearn.datasets fetch_openml
sklearn.linear_model __pyx_unpickle_system
torch load
torch\0x Module
torch.storage _load_from_bytes
torch.fx.graph_module reduce_graph_module
torch.hub HTTPError
torch.utils.cpp_extension BuildExtension
"""


@pytest.mark.parametrize("module_and_name", POWERFUL.strip().splitlines())
def test_names_with_power_are_not_allowed(module_and_name):
    module, name = module_and_name.split(" ")
    for allowed in (BASIC, SKLEARN):
        assert not allowed.admits(module, name)


def test_pickles_inside_the_arrays_of_joblib_are_checked(tmp_path):
    path = tmp_path / "m.joblib"
    joblib.dump(np.array([Calls(os.system, "true"), 1], object), path)
    with pytest.raises(PermissionDenied, match="posix.system"):
        load_trusted(path, SKLEARN)


def estimators():
    columns = ColumnTransformer([("a", StandardScaler(), [0, 1]), ("b", OneHotEncoder(handle_unknown="ignore"), [2])])
    for found in (
        make_pipeline(columns, LogisticRegression()),
        RandomForestClassifier(3, random_state=0),
        GradientBoostingClassifier(n_estimators=2),
        HistGradientBoostingRegressor(max_iter=2),
        KNeighborsClassifier(2, algorithm="kd_tree"),
        MLPClassifier((3,), max_iter=2),
        SVC(),
        SGDClassifier(),
    ):
        yield type(found).__name__, found, "numbers"
    yield "text", make_pipeline(TfidfVectorizer(), LogisticRegression()), "text"


@pytest.mark.parametrize(
    ("estimator", "kind"), [pytest.param(model, kind, id=name) for name, model, kind in estimators()]
)
@pytest.mark.parametrize("protocol", [2, 5, "joblib"])
def test_estimators_are_loaded(tmp_path, estimator, kind, protocol):
    rng = np.random.RandomState(0)
    x = np.round(rng.rand(20, 4), 1) if kind == "numbers" else np.array(["a b", "b c", "c d", "d e"] * 5) + "x"
    with warnings.catch_warnings(action="ignore"):  # few iterations
        estimator.fit(x, np.arange(20) % 2)
    path = tmp_path / "model"
    if protocol == "joblib":
        joblib.dump(estimator, path, compress=3)
    else:
        path.write_bytes(pickle.dumps(estimator, protocol))
    np.testing.assert_array_equal(load_trusted(path, SKLEARN).predict(x), estimator.predict(x))


def ways_to_damage(data: bytes):
    generator = random.Random(0)
    yield from (data[:size] for size in range(0, len(data), max(1, len(data) // 150)))
    for _ in range(400):
        changed = bytearray(data)
        changed[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        yield bytes(changed)


@pytest.mark.parametrize("form", ["pickle", "joblib", "zlib"])
def test_damaged_files_are_errors(form):
    stream = io.BytesIO()
    if form == "pickle":
        pickle.dump({**PLAIN, **ARRAYS}, stream)
    else:
        joblib.dump({**PLAIN, **ARRAYS}, stream, compress=3 if form == "zlib" else 0)
    with warnings.catch_warnings(action="ignore"):  # numpy warns about some broken scalars
        for data in ways_to_damage(stream.getvalue()):
            try:
                load_trusted(data, SKLEARN)
            except PenstockError:
                continue


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"x\x9c", b"\x1f\x8b", b"hello", bytes(100)])
def test_other_files_are_errors(data):
    with pytest.raises(InvalidModel):
        load_trusted(data, BASIC)


def test_deep_nesting_is_read():
    data = pickle.dumps(1)[:-1] + b"".join(b"]" for _ in range(100_000)) + b"a" * 99_999 + b"."
    assert isinstance(load_trusted(data, BASIC), list)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "truncated: it ends before its last instruction"),
        (b"\x80\x04", "truncated: it ends before its last instruction"),
        (b"\x80\x04.", r"broken: an instruction lacks its object \(pop from empty list\)"),
        (pickle.dumps([1, 2, 3])[:-2], "truncated: it ends before its last instruction"),
    ],
)
def test_empty_and_truncated_pickles_are_described(data, message):
    with pytest.raises(InvalidModel, match=message):
        load_trusted(data, SKLEARN)


@pytest.mark.parametrize(
    "tuples",
    [b"\x85" * 200_000, b"2\x86" * 60, b"(l\x85" + b"\x85" * 200_000],
    ids=["deep", "shared", "in_a_list"],
)
@pytest.mark.parametrize("used", [b"K\x01s.", b"."], ids=["as_a_key", "alone"])
def test_tuples_whose_hash_would_not_end_are_refused(tuples, used):
    with pytest.raises(InvalidModel, match="too many tuples are nested|broken"):
        load_trusted(b"\x80\x04}K\x01" + tuples + used, BASIC)


@given(st.sampled_from(["pickle", "joblib"]), st.data())
@settings(max_examples=300, deadline=None)
def test_changed_pickles_are_read_or_refused(form, data):
    stream = io.BytesIO()
    (pickle.dump if form == "pickle" else joblib.dump)({**PLAIN, **ARRAYS}, stream)
    changed = bytearray(stream.getvalue())
    places = st.integers(0, len(changed) - 1)
    for place, byte in data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8)):
        changed[place] = byte
    with warnings.catch_warnings(action="ignore"), contextlib.suppress(PenstockError):
        load_trusted(bytes(changed), SKLEARN)
