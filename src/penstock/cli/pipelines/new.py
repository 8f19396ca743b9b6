"""``penstock new``: write the declaration of a pipeline for a model."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import msgspec
import onnx
import typer

from penstock.artifact import Artifact
from penstock.bundle.open import may_be_bundle, open_bundle
from penstock.bundle.pack_model import pack_model
from penstock.bundle.pack_pipeline import pack_pipeline
from penstock.bundle.pipeline import facts_of
from penstock.cli import options
from penstock.config import did_you_mean
from penstock.errors import InvalidArgument, NotFound
from penstock.pipeline.templates.fill import KINDS, Given, class_count, empty_picture, fill
from penstock.pipeline.templates.huggingface import METADATA, text_options
from penstock.runtime import Model
from penstock.storage.atomic import replacing
from penstock.tensor import Signature, TensorSpec

DECLARATION, LABELS, TOKENIZER = "pipeline.yaml", "labels.txt", "tokenizer.json"


class About(msgspec.Struct):
    """What ``penstock convert`` wrote about a model of Hugging Face."""

    labels: dict[str, str] = {}
    """The names of the classes by number."""
    problem_type: str = ""


def new(
    kind: Annotated[str, typer.Argument(help=f"The template: {', '.join(KINDS)}.", show_default=False)],
    folder: Annotated[Path, typer.Argument(help="The new folder.", show_default=False)],
    model: Annotated[Path, typer.Option(help="The model: an ONNX file, or a bundle of a model.", show_default=False)],
    recogniser: Annotated[
        Path | None, typer.Option(help="The second model of the template ocr, which reads one line of text.")
    ] = None,
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Text file with one class per line; for ocr, one character. Default: the classes are numbered."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The tokenizer.json of a text model. Default: the file beside the model.")
    ] = None,
    parents: options.Parents = False,
    json: options.Json = False,
) -> None:
    """Write the declaration of a pipeline for a model, from a template.

    Names, sizes, layout and number of classes come from the model. The new folder contains pipeline.yaml and all files that it needs.
    The command packs the pipeline once, so that the declaration is known to fit. What the model cannot tell, such as the mean of the
    pixels in training, is marked with CHECK in the file.

    [bold]Examples[/bold]

      penstock new image-classifier flowers --model resnet.onnx --labels flowers.txt

      penstock new text-classifier reviews --model reviews.onnx --tokenizer tokenizer.json
    """
    options.check_folders([folder], parents)
    if kind not in KINDS:
        raise InvalidArgument(
            f"there is no template '{kind}'", did_you_mean(kind, KINDS) or f"choose one of {', '.join(KINDS)}"
        )
    with replacing(folder, overwrite=False) as made:
        made.mkdir()
        tokens = tokenizer or model.parent / TOKENIZER
        given = _given(folder.name, model, made)
        if kind == "detector":
            given = _measured(given, made / given.model)
        if kind in ("text-classifier", "embedding") and tokens.is_file():
            given = msgspec.structs.replace(given, options=_tokens(tokens))
        if recogniser is not None:
            given = msgspec.structs.replace(given, recogniser=_given(folder.name, recogniser, made))
        text = fill(kind, given)
        (made / DECLARATION).write_text(text)
        if LABELS in text:
            (made / LABELS).write_text(_labels(labels, kind, given, made / given.model))
        if TOKENIZER in text:
            if not tokens.is_file():
                raise NotFound(f"there is no file '{tokens}'", "give the tokenizer of the model with --tokenizer")
            (made / TOKENIZER).write_bytes(tokens.read_bytes())
        with tempfile.TemporaryDirectory() as scratch:
            pack_pipeline(made / DECLARATION, Path(scratch) / "check.bundle")
        files = sorted(path.name for path in made.iterdir())
    checks = [line.partition("CHECK: ")[2] for line in text.splitlines() if "CHECK: " in line]
    if json:
        facts: dict[str, Any] = {"written": str(folder), "files": files, "check": checks}
        print(msgspec.json.encode(facts).decode())
        return
    print(f"written to {folder}: {', '.join(files)}")
    if checks:
        print(f"{len(checks)} lines of {DECLARATION} are marked with CHECK: compare them with the training")
    print(f"next: penstock pack {folder / DECLARATION} -o {folder.name}.bundle")


def _given(name: str, model: Path, folder: Path) -> Given:
    """The facts about ``model``, which is copied to ``folder``."""
    file = _copy_model(model, folder)
    return Given(name=name, model=file, signature=_signature(folder / file), final_operator=_final(folder / file))


def _copy_model(model: Path, folder: Path) -> str:
    """Copy ``model``, with its external data, to ``folder``. Returns the name of its file there."""
    if not model.exists():
        raise NotFound(f"there is no model '{model}'", "check the path of --model")
    if may_be_bundle(model):
        if not model.is_file():
            raise InvalidArgument(f"'{model}' is a folder", "give a bundle that is one file")
        (folder / model.name).write_bytes(model.read_bytes())
        return model.name
    artifact = Artifact.from_file(model)
    if (folder / artifact.file_name).exists():
        raise InvalidArgument(f"both models are called '{artifact.file_name}'", "rename one")
    for name, data in artifact.files().items():
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    return artifact.file_name


def _signature(model: Path) -> Signature:
    if may_be_bundle(model):
        return facts_of(open_bundle(model)).signature
    with tempfile.TemporaryDirectory() as scratch:
        pack_model(model, Path(scratch) / "model.bundle")
        return facts_of(open_bundle(Path(scratch) / "model.bundle")).signature


def _final(model: Path) -> str:
    """The operator that computes the first output of an ONNX file. Empty for other models."""
    if may_be_bundle(model) or model.suffix != ".onnx":
        return ""
    graph = onnx.load(model, load_external_data=False).graph
    return next((node.op_type for node in graph.node if graph.output[0].name in node.output), "")


def _measured(given: Given, model: Path) -> Given:
    """``given`` with the sizes of outputs that the signature leaves free, from one call on an empty picture."""
    outputs = given.signature.outputs
    if all(size >= 0 for spec in outputs for size in spec.shape[1:]):
        return given
    with Model.open(model) as loaded:
        found = loaded.infer(empty_picture(given))
    fixed = tuple(
        TensorSpec(spec.name, spec.datatype, (*spec.shape[:1], *found[spec.name].shape[1:])) for spec in outputs
    )
    return msgspec.structs.replace(given, signature=Signature(given.signature.inputs, fixed))


def _tokens(tokenizer: Path) -> dict[str, Any]:
    """Options of the template from the file beside ``tokenizer`` that Hugging Face writes with it."""
    files: dict[str, Any] = {TOKENIZER: {}}
    beside = tokenizer.with_name("tokenizer_config.json")
    return text_options({**files, beside.name: json_file(beside)} if beside.is_file() else files)


def json_file(path: Path) -> Any:
    """The content of a JSON file; None if it is not valid."""
    try:
        return msgspec.json.decode(path.read_bytes())
    except msgspec.DecodeError:
        return None


def about(model: Path) -> About:
    """The facts that ``penstock convert`` wrote into the metadata of an ONNX file."""
    if may_be_bundle(model) or model.suffix != ".onnx":
        return About()
    properties = {one.key: one.value for one in onnx.load(model, load_external_data=False).metadata_props}
    return msgspec.json.decode(properties.get(METADATA, "{}"), type=About)


def _labels(file: Path | None, kind: str, given: Given, model: Path) -> str:
    count = class_count(kind, given)
    if file is None:
        known = about(model).labels
        if known and len(known) == count:
            return "".join(f"{known[key]}\n" for key in sorted(known, key=int))
        if count < 0:
            raise InvalidArgument(
                "the model does not tell its number of classes", "give the names of the classes with --labels"
            )
        return "".join(f"class {number}\n" for number in range(count))
    if not file.is_file():
        raise NotFound(f"there is no file '{file}'", "check the path of --labels")
    names = file.read_text().splitlines()
    if count not in (-1, len(names)):
        raise InvalidArgument(
            f"'{file}' has {len(names)} lines, but the model has {count} classes", "write one class per line"
        )
    return "".join(f"{name}\n" for name in names)
