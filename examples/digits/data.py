"""The handwritten digits and their fixed split: train → (fit, validate), calibrate ⊂ train, and a separate test set.

Needs numpy and scikit-learn, but not torch, so the split can be repeated and compared with the files in this folder.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

SEED = 20
TRAIN_SIZE = 1000
VALIDATE_SIZE = 200
CALIBRATE_SIZE = 300


class Images(NamedTuple):
    """Images ``image``: float32 [N, 1, 8, 8] in 0..1, and their digits ``labels``: int64 [N]."""

    image: NDArray[np.float32]
    labels: NDArray[np.int64]


class Split(NamedTuple):
    """The parts of the data set. ``fit`` and ``validate`` together are ``train``. ``calibrate`` is a part of ``train``. ``test`` is
    all other images."""

    train: Images
    fit: Images
    validate: Images
    calibrate: Images
    test: Images


def load_split() -> Split:
    """Load scikit-learn's 1,797 digits and split them, stratified by digit. Every call returns the same split."""
    pixels, labels = load_digits(return_X_y=True)
    everything = Images((pixels / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels.astype(np.int64))
    train, test = _cut(everything, TRAIN_SIZE)
    validate, fit = _cut(train, VALIDATE_SIZE)
    calibrate, _ = _cut(train, CALIBRATE_SIZE)
    return Split(train, fit, validate, calibrate, test)


def _cut(images: Images, size: int) -> tuple[Images, Images]:
    chosen, rest = train_test_split(
        np.arange(len(images.labels)), train_size=size, stratify=images.labels, random_state=SEED
    )
    return Images(images.image[chosen], images.labels[chosen]), Images(images.image[rest], images.labels[rest])
