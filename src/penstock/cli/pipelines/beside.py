"""Write the declaration of a pipeline beside a converted model of a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from penstock.cli.pipelines.new import DECLARATION, LABELS, about, json_file
from penstock.errors import Unsupported
from penstock.offline.convert.convert import Conversion
from penstock.pipeline.templates.fill import Given
from penstock.pipeline.templates.huggingface import from_folder
from penstock.storage.atomic import write_whole


class Beside(msgspec.Struct, frozen=True):
    """What was written beside a model, or why nothing was."""

    files: tuple[Path, ...] = ()
    reason: str = ""


def write_beside(done: Conversion) -> Beside:
    """Write ``pipeline.yaml``, and ``labels.txt`` for a classifier. Existing files are kept."""
    assert done.output is not None
    folder = done.output.parent
    files = {path.name: json_file(path) for path in done.companions if path.suffix == ".json"}
    given = Given(name=done.output.stem, model=done.output.name, signature=done.signature)
    try:
        facts = about(done.output)
        written = from_folder(given, facts.labels, files, facts.problem_type)
    except Unsupported as error:
        return Beside(reason=error.message)
    texts = {DECLARATION: written.text}
    if written.labels:
        texts[LABELS] = "".join(f"{label}\n" for label in written.labels)
    for name, text in texts.items():
        if (folder / name).exists() and (folder / name).read_text() != text:
            return Beside(
                reason=f"'{folder / name}' exists, with other content; convert to a new folder, or use `penstock new`"
            )
    for name, text in texts.items():
        write_whole(folder / name, text.encode())
    return Beside(tuple(folder / name for name in texts))
