"""Sentences of the documentation of installed libraries: real text, without a download."""

from __future__ import annotations

import importlib
import inspect
import re
from random import Random
from typing import NamedTuple

MODULES = {
    "python": "asyncio,argparse,collections,concurrent.futures,csv,datetime,email.message,http.client,inspect,json,logging,os,pathlib,"
    "random,shutil,socket,sqlite3,statistics,string,subprocess,tarfile,tempfile,threading,turtle,unittest,urllib.request,zipfile",
    "numpy": "numpy,numpy.fft,numpy.linalg,numpy.ma,numpy.polynomial,numpy.random,numpy.strings",
    "scikit-learn": "sklearn.cluster,sklearn.decomposition,sklearn.ensemble,sklearn.feature_extraction.text,sklearn.linear_model,"
    "sklearn.metrics,sklearn.model_selection,sklearn.neighbors,sklearn.preprocessing,sklearn.svm,sklearn.tree",
    "torch": "torch,torch.nn,torch.nn.functional,torch.optim,torch.utils.data,torch.autograd,torch.linalg,torch.distributions",
}
_NAMES = re.compile(
    r"\b(?:python|numpy|np|scikit-learn|sklearn|scikit|scipy|pytorch|torch)\b\.?|`+|:\w+:", re.IGNORECASE
)
"""The names of the libraries, which would make it easy, and markup."""


class Sentence(NamedTuple):
    """A sentence, and the number of its library."""

    text: str
    label: int


def sentences() -> tuple[list[Sentence], list[Sentence]]:
    """Sentences to train, and to test: one of five functions and classes is kept for the test, with all of its sentences."""
    parts: tuple[list[Sentence], list[Sentence]] = [], []
    seen: set[str] = set()
    for label, modules in enumerate(MODULES.values()):
        for module in map(importlib.import_module, modules.split(",")):
            for name in sorted(name for name in dir(module) if name[0] != "_"):
                part = parts[Random(f"{module.__name__}.{name}").random() < 0.2]
                member = getattr(module, name, None)  # a name may need a package that is not installed
                documented = [member, *(vars(member).values() if inspect.isclass(member) else ())]
                for text in (inspect.getdoc(one) or "" for one in documented if callable(one)):
                    new = [Sentence(found, label) for found in _split(text) if found not in seen]
                    seen.update(one.text for one in new)
                    part.extend(new)
    return parts


def _split(text: str) -> list[str]:
    """The sentences of the first paragraphs, before any table of parameters."""
    prose = re.split(r"\n[A-Za-z ]+\n---|\n *(?:Args|Shape|Example)|>>>|\.\. ", text)[0]
    found = (" ".join(_NAMES.sub("", each).split()) for each in re.split(r"(?<=[.!?])\s+|\n\n", prose))
    return [each for each in found if len(each.split()) >= 4 and each[0].isupper()]
