"""``python -m tests.exporters``: models of many architectures and exporters through the commands; exits with 1 for a finding.

Architectures of libraries that are not installed are skipped: torchvision, timm, transformers, skl2onnx, xgboost, tf2onnx. Each one
runs in a process of its own, which ends with it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np

from tests.exporters import libraries
from tests.exporters.architecture import Architecture
from tests.exporters.export import export, ways
from tests.exporters.trial import STEPS, Ending, Trial

_ONCE = (("narrow", "prune"), ("build", "compress"))
"""The commands that are left out for the first and for the second of two models of an architecture."""


def catalogue() -> list[Architecture]:
    """The architectures whose libraries are installed."""
    found = libraries.architectures()
    if libraries.installed("torch"):
        from tests.exporters import plain

        found = plain.architectures() + found
    return [one for one in found if libraries.installed(one.library)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.exporters", description=__doc__)
    parser.add_argument("names", nargs="*", help="only these architectures, or the libraries with these names")
    parser.add_argument("--steps", default=",".join(STEPS), help="commands to try")
    parser.add_argument(
        "--all", action="store_true", help="every exporter with free and fixed batch, not just two of the four"
    )
    parser.add_argument("--log", type=Path, help="append each ending to this file, as a line of JSON")
    parser.add_argument("--limit", type=float, default=900, help="seconds for one architecture")
    parser.add_argument("--here", action="store_true", help="try one architecture in this process")
    given = parser.parse_args()
    steps = given.steps.split(",")
    found = [one for one in catalogue() if not given.names or {one.name, one.library} & set(given.names)]
    if given.here:
        try_all(found[0], steps, every=given.all)
        return 0
    endings = [ending for one in found for ending in apart(one, given)]
    counts = Counter(ending.verdict for ending in endings)
    findings = [ending for ending in endings if ending.is_finding]
    models = {ending.model for ending in endings}
    print(f"{len(found)} architectures, {len(models)} models, {len(endings)} endings: {dict(counts)}")
    for ending in findings:
        print(f"{ending.verdict}: {ending.model}: {ending.command}: {ending.text}")
    return 1 if findings else 0


def apart(architecture: Architecture, given: argparse.Namespace) -> list[Ending]:
    """The endings of one architecture, tried in a process of its own."""
    arguments = [sys.executable, "-m", "tests.exporters", architecture.name, "--here", "--steps", given.steps]
    arguments += ["--all"] if given.all else []
    last = f"{architecture.name} has not begun"
    try:
        ran = subprocess.run(arguments, capture_output=True, text=True, timeout=given.limit, check=False)
        out, err, ended = ran.stdout, ran.stderr, "" if ran.returncode == 0 else f"status {ran.returncode}"
    except subprocess.TimeoutExpired as error:
        out, err, ended = _text(error.stdout), _text(error.stderr), f"over {given.limit:g} s"
    lines = [line[1:] for line in out.splitlines() if line.startswith("@")]
    endings = [msgspec.json.decode(line, type=Ending) for line in lines]
    if ended:
        last = next((line for line in reversed(err.splitlines()) if line.startswith("trying ")), last)
        endings.append(Ending(architecture.name, last, f"ended: {ended}", text=err[-800:]))
    for ending in endings:
        error = "" if ending.error is None else f"{ending.error:.4f}"
        standard = "" if ending.standard is None else f"{ending.standard:.4f}"
        figures = f"{error:>7} {standard:>7} {ending.seconds:6.1f} s"
        print(
            f"{ending.verdict:10} {ending.model:45} {ending.command[:40]:40} {figures}  {ending.text[:300]}", flush=True
        )
    if given.log:
        with given.log.open("ab") as log:
            log.writelines(msgspec.json.encode(ending) + b"\n" for ending in endings)
    return endings


def try_all(architecture: Architecture, steps: list[str], *, every: bool) -> None:
    """Try one architecture in every way of exporting, or in two that differ in both respects, and print the endings."""
    warnings.simplefilter("ignore")
    if "torch" in architecture.library or architecture.library in ("timm", "transformers"):
        import torch

        torch.manual_seed(0)
        torch.set_num_threads(1)
    np.random.seed(0)
    made = architecture.make()
    compressed = False
    found = ways(architecture)
    if not every and len(found) == 4:
        found = found[::3] if len(architecture.name) % 2 else found[1:3]
    for number, (exporter, batch) in enumerate(found):
        name = f"{architecture.library}/{architecture.name} {exporter} {batch}"
        with tempfile.TemporaryDirectory() as folder:
            try:
                trial = Trial(name, architecture, export(architecture, made, exporter, batch), Path(folder))
            except Exception as error:  # noqa: BLE001 - whatever an exporter raises
                _tell(Ending(name, "export", "not exported", text=f"{type(error).__name__}: {error}"[:500]))
                continue
            for step in steps:
                if (step == "compress" and compressed) or (not every and step in _ONCE[number % 2]):
                    continue  # takes long, and differs little between exporters
                compressed |= step == "compress"
                print(f"trying {name}: {step}", file=sys.stderr, flush=True)
                _tell(STEPS[step](trial))


def _tell(ending: Ending) -> None:
    print(f"@{msgspec.json.encode(ending).decode()}", flush=True)


def _text(found: bytes | str | None) -> str:
    return found.decode(errors="replace") if isinstance(found, bytes) else found or ""


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    sys.path.append(str(Path(__file__).parents[1]))
    sys.exit(main())
