"""The contract of converters: its errors, and what counts as a model."""

import models
from penstock.offline.convert.base import FrameworkModel, UnsupportedOperator, UnsupportedOperators
from source_models import OnnxSource


def test_all_operators_are_listed_and_the_first_tells_the_way_out():
    operators = [UnsupportedOperator("Svd", "layer 3", "leave it out"), UnsupportedOperator("Fft", "", "")]
    error = UnsupportedOperators.of(operators)
    assert error.message == "2 operator(s) cannot be converted: Svd at layer 3; Fft"
    assert error.hint == "leave it out"
    assert error.operators == tuple(operators)


def test_a_model_is_recognised_by_its_methods():
    assert isinstance(OnnxSource(models.linear()), FrameworkModel)
    assert not isinstance(object(), FrameworkModel)
