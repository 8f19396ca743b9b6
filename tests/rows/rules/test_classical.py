# ruff: noqa: E501 - a model is easier to read in one line
import pytest

from row_graphs import keeps_rows, objection, parsed

TREE = (
    "nodes_featureids = [0, 0, 0], nodes_treeids = [0, 0, 0], nodes_nodeids = [0, 1, 2], nodes_values = [0.5, 0.0, 0.0], "
    'nodes_modes = ["BRANCH_LEQ", "LEAF", "LEAF"], nodes_truenodeids = [1, 0, 0], nodes_falsenodeids = [2, 0, 0]'
)


@pytest.mark.parametrize(
    "body",
    [
        (
            f"y = ai.onnx.ml.TreeEnsembleRegressor<{TREE}, n_targets = 1, target_ids = [0, 0], target_nodeids = [1, 2], "
            "target_treeids = [0, 0], target_weights = [1.0, 2.0]>(x)"
        ),
        (
            f"l, y = ai.onnx.ml.TreeEnsembleClassifier<{TREE}, classlabels_int64s = [0, 1, 2], class_ids = [0, 2], "
            "class_nodeids = [1, 2], class_treeids = [0, 0], class_weights = [1.0, 2.0]>(x)"
        ),
        "y = ai.onnx.ml.LinearRegressor<coefficients = [1.0, 2.0, 3.0, 4.0], intercepts = [1.0]>(x)",
        (
            "l, y = ai.onnx.ml.LinearClassifier<classlabels_ints = [0, 1], coefficients = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0], "
            "intercepts = [1.0, 2.0]>(x)"
        ),
        "y = ai.onnx.ml.Scaler<offset = [1.0, 2.0, 3.0, 4.0], scale = [1.0, 2.0, 3.0, 4.0]>(x)",
        'y = ai.onnx.ml.Normalizer<norm = "L2">(x)',
        "y = ai.onnx.ml.FeatureVectorizer<inputdimensions = [4, 4]>(x, x)",
        "i = Constant<value_ints = [1, 3]>() y = ai.onnx.ml.ArrayFeatureExtractor(x, i)",
        "y = ai.onnx.ml.Binarizer<threshold = 0.5>(x)",
        "i = Cast<to = 7>(x) o = ai.onnx.ml.OneHotEncoder<cats_int64s = [0, 1]>(i) f = Constant<value_ints = [0, -1]>() y = Reshape(o, f)",
    ],
)
def test_rows_of_features(body: str) -> None:
    keeps_rows(parsed(body, outputs="float[N,M] y"))


@pytest.mark.parametrize(
    "operator",
    [
        'StringNormalizer<case_change_action = "UPPER", locale = "C">',
        'ai.onnx.ml.LabelEncoder<keys_strings = ["a"], values_strings = ["b"]>',
    ],
)
def test_texts(operator: str) -> None:
    keeps_rows(parsed(f"y = {operator}(x)", "string[N] x", "string[N] y"))


def test_words_that_are_removed_take_their_row_along() -> None:
    body = 'y = StringNormalizer<stopwords = ["the"], locale = "C">(x)'
    assert "removes words, and may remove rows" in objection(parsed(body, "string[N] x", "y"))


def test_other_forms_than_rows_and_features() -> None:
    for operator in ('Normalizer<norm = "L2">', "Imputer<imputed_value_floats = [1.0], replaced_value_float = 0.0>"):
        for form, rank in (("N", 1), ("N,2,2", 3)):
            model = parsed(f"y = ai.onnx.ml.{operator}(x)", f"float[{form}] x", "y")
            assert f"has an input of {rank} axes instead of [rows, features]" in objection(model)
