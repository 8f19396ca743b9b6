from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from penstock.errors import InvalidData
from penstock.samples.open import load_dataset
from penstock.tensor import DataType, Signature, TensorSpec

Y = (TensorSpec("y", DataType.FP32, (-1, 1)),)
FEATURES = Signature((TensorSpec("x", DataType.FP32, (-1, 3)),), Y)
COLUMNS = Signature(
    (
        TensorSpec("age", DataType.INT64, (-1, 1)),
        TensorSpec("city", DataType.BYTES, (-1, 1)),
        TensorSpec("member", DataType.BOOL, (-1,)),
    ),
    Y,
)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "data.csv"
    path.write_text(text, encoding="utf-8")
    return path


def test_columns_in_order_are_the_features_of_the_only_input(tmp_path: Path) -> None:
    data = load_dataset(written(tmp_path, "a,b,labels,c\n1,2.5,0,-3\n4,5,1,6e1\n\n"), FEATURES)
    np.testing.assert_array_equal(data.inputs["x"], np.float32([[1, 2.5, -3], [4, 5, 60]]))
    assert data.labels is not None
    assert data.labels.tolist() == [0, 1]


def test_columns_are_named_after_inputs(tmp_path: Path) -> None:
    text = '\ufeffcity,member,age,labels,other\n"Bergen, No",true,7,no,?\nKöln,0, 81 ,yes,?\n'
    data = load_dataset(written(tmp_path, text), COLUMNS)
    assert data.inputs["age"].tolist() == [[7], [81]]
    assert [city.decode() if isinstance(city, bytes) else city for city in data.inputs["city"][:, 0]] == [
        "Bergen, No",
        "Köln",
    ]
    assert data.inputs["member"].tolist() == [True, False]
    assert data.labels is not None
    assert data.labels.tolist() == ["no", "yes"]


@pytest.mark.parametrize(
    ("signature", "text", "cause"),
    [
        (FEATURES, "a,b\n1,2\n", r"has the columns \['a', 'b'\], but the model has the inputs \['x'\]"),
        (FEATURES, "", r"has the columns \[\]"),
        (FEATURES, "a,b,c\n", "has no samples"),
        (FEATURES, "a,a,c\n1,2,3\n", "two columns of the same name"),
        (FEATURES, "a,b,c\n1,2,3\n1,2\n", "line 3 has 2 cells, but there are 3 columns"),
        (FEATURES, "a,b,c\n1,two,3\n", "line 2: column 'b' has 'two', but input 'x' is FP32"),
        (FEATURES, "a,b,c\n1,nan,3\n", "sample 0 of .*NaN or infinity"),
        (FEATURES, 'a,b,c\n1,2,"3\n', "is not CSV"),
        (COLUMNS, "age,city,member\n1.5,x,true\n", "column 'age' has '1.5', but input 'age' is INT64"),
        (COLUMNS, "age,city,member\n1,x,maybe\n", "column 'member' has 'maybe'"),
        (COLUMNS, "age,city\n1,x\n", r"the model has the inputs \['age', 'city', 'member'\]"),
    ],
)
def test_tables_that_do_not_fit_are_refused(tmp_path: Path, signature: Signature, text: str, cause: str) -> None:
    with pytest.raises(InvalidData, match=cause) as raised:
        load_dataset(written(tmp_path, text), signature)
    assert "data.csv" in raised.value.message


@pytest.mark.parametrize("name", ["label", "Target", "y", "_labels", "class"])
def test_a_column_that_may_be_labels_is_no_feature_in_silence(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    wide = Signature((TensorSpec("x", DataType.FP32, (-1, -1)),), Y)
    path = written(tmp_path, f"a,b,c,{name}\n1,2,3,0\n")
    for signature in (wide, FEATURES):
        with pytest.raises(
            InvalidData, match=rf"column '{name}' of .* may be labels or a feature .*rename it to 'labels'"
        ):
            load_dataset(path, signature)
    data = load_dataset(written(tmp_path, f"a,{name},c\n1,2,3\n"), FEATURES)
    np.testing.assert_array_equal(data.inputs["x"], [[1, 2, 3]])
    assert f"column '{name}'" in caplog.text
    assert "counts as a feature, because the model takes 3" in caplog.text
    data = load_dataset(written(tmp_path, f"a,b,feature_{name}\n1,2,3\n"), wide)
    np.testing.assert_array_equal(data.inputs["x"], [[1, 2, 3]])
