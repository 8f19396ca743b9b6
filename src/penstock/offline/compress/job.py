"""Job: one run of one method on files or models, for the command line and the Python API."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from penstock.artifact import Artifact
from penstock.bundle import coded
from penstock.dataset import Dataset
from penstock.engines.base import LoadedModel
from penstock.errors import InvalidArgument, InvalidConfig, InvalidData, InvalidModel, PenstockError
from penstock.offline.compress.explained import check_explained, without_evaluation
from penstock.offline.compress.fp32.fp32 import in_fp32, optimized_in_fp32
from penstock.offline.compress.method import Made, Method, OnProgress, StepContext, TrainingMethod, needs_torch
from penstock.offline.compress.model_files import check_kind, check_place, check_target, naming, read_model_file
from penstock.offline.compress.options import usages
from penstock.offline.compress.outcome import Outcome
from penstock.offline.judge.accuracy import served_answers
from penstock.offline.judge.contract import Contract
from penstock.offline.judge.judge import BATCH, Judge, checked_reference, coupling_notes, judging
from penstock.offline.optimize.model import check_one_file, save, self_contained, weights_path
from penstock.offline.optimize.optimizer import optimize
from penstock.offline.sessions import hints_of, loaded
from penstock.resources import machine_facts
from penstock.rows.proof import coupling
from penstock.samples.open import Data, data_path, open_data
from penstock.storage.atomic import write_whole
from penstock.tensor import Signature

Model = str | os.PathLike[str] | Artifact

_log = logging.getLogger(__name__)

_FEW = 16
"""With fewer samples than this, a warning is given."""


class Job:
    """One run of ``method``. The constructor checks files, model and data; ``run`` does the work."""

    def __init__(
        self,
        method: Method,
        model: Model,
        data: Data | None = None,
        evaluate: Data | None = None,
        output: str | os.PathLike[str] | None = None,
        *,
        force: bool = False,
        tell: Callable[[str], None] = _log.info,
    ) -> None:
        """The method uses ``data``; the result is measured on ``evaluate``. ``tell`` is called with each warning and note.

        Raises InvalidConfig, EngineUnavailable, InvalidArgument, AlreadyExists, NotFound, InvalidModel, Unsupported, InvalidData.
        """
        if method.threads > (cores := machine_facts().cores):
            raise InvalidConfig(
                f"{method.threads} threads were requested, but this machine has {cores} core(s)", "give fewer"
            )
        if method.trains:
            needs_torch("training.torch")
        self._method, self._tell = method, tell
        self._output = Path(output) if output is not None else None
        path = None if isinstance(model, Artifact) else Path(model)
        self._check_places([given for given in (path, data_path(data), data_path(evaluate)) if given], force)
        self.original = model if isinstance(model, Artifact) else read_model_file(Path(model), method.role)
        if method.trains or (isinstance(method, TrainingMethod) and method.resume):
            check_one_file(self.original, "training")
        method.examine(self.original)
        if path is not None and self._output is not None:
            for entry in self.original.beside:
                check_place(path.parent / entry.path, [self._output, weights_path(self._output)])
        with naming(path, method.role), loaded(self.original) as running:
            self.signature: Signature = running.signature
            if not self.signature.inputs:
                raise InvalidModel("the model has no inputs, so its output is constant", "export it with inputs")
            self._fitted = self._load(data, running, judged=method.trains)
            self._evaluation = self._load(evaluate, running, judged=True, final=True)
        if self._fitted is None and (reason := method.reason_for_data()):
            option = method.data_options[-1]
            raise InvalidArgument(
                f"{reason} needs data",
                f"give {option} DATA (in Python: data), with arrays named after the model's inputs",
            )
        if self._fitted is not None and self._fitted.count < _FEW:
            where = f"'{data}'" if isinstance(data, str | os.PathLike) else "the data"
            tell(
                f"warning: {where} has only {self._fitted.count} sample(s), so the result is unreliable; give a few hundred"
            )

    def run(self, on_progress: OnProgress = lambda *_: None) -> Outcome:
        """Apply the method, check its result, measure it if there is evaluation data, and write it.

        Raises WrongResult if the compressed model is wrong, and other PenstockErrors.
        """
        method = self._method
        model = self._folded(on_progress) if method.folds else self._as_given()
        resume = method.resume if isinstance(method, TrainingMethod) else None
        context = StepContext(
            original=self.original,
            teacher=self_contained(self.original),
            fitted=self._fitted,
            evaluation=self._evaluation,
            folder=Path(resume) if resume else None,
            on_progress=on_progress,
        )
        made = method.run(model, context)
        if made.model is not None:
            on_progress("check", 0, 1)
            found = check_explained(self.original, made.model, self._fitted or self._evaluation)
            if self._evaluation is None and (note := without_evaluation(found)):
                made = msgspec.structs.replace(made, notes=(*made.notes, note))
            on_progress("check", 1, 1)
        for name, content in made.files.items():
            write_whole(Path(name), content)
        outcome = self._judged(made)
        if self._output is not None and made.model is not None:
            save(made.model, self._output)
        return outcome

    def _judged(self, made: Made) -> Outcome:
        comparison = sizes = None
        if made.model is not None and self._evaluation is not None:
            judge = Judge(self.original, self._evaluation, self._method.threads, contract=self._method.contract)
            comparison = judge.compare(made.model, budget_s=self._method.budget_s)
        if made.model is not None and "coded_size" in made.aims:
            pair = self_contained(self.original), made.model
            if not any(model.beside for model in pair):
                sizes = len(coded.encode(pair[0].data)), len(coded.encode(pair[1].data))
        return Outcome(self.original, made, comparison, sizes)

    def _check_places(self, inputs: list[Path], force: bool) -> None:
        """Raise InvalidArgument or AlreadyExists if an output file must not be written."""
        used = usages(type(self._method))
        given = {name: getattr(self._method, name) for name, usage in used.items() if usage.text == "file"}
        inputs += [Path(path) for name, path in given.items() if path and name != "resume" and not used[name].writes]
        if self._output is not None:
            check_target(self._output, inputs, force)
        taken = [*inputs, *([self._output] if self._output else [])]
        for name, path in given.items():
            if path and used[name].writes:
                check_place(Path(path), taken)
                check_kind(Path(path), used[name].writes, force)
                taken.append(Path(path))

    def _as_given(self) -> Artifact:
        """The original, in FP32 if the method needs that."""
        given = self_contained(self.original)
        return in_fp32(given) if self._method.needs_fp32 else given

    def _folded(self, on_progress: OnProgress) -> Artifact:
        """The optimised original, with BatchNormalization folded into weights."""
        on_progress("optimize", 0, 1)
        data = self._fitted or self._evaluation
        calls = data.mix(self.signature.smallest_batch) if data else []
        samples = [call.inputs for call in calls]
        made, report = optimize(self.original, samples)
        on_progress("optimize", 1, 1)
        if self._method.trains:
            needs_torch("training.trainable").TrainableModel(in_fp32(made))
        if report.nodes_before != report.nodes_after:
            self._tell(
                f"optimised first: {report.nodes_before} → {report.nodes_after} nodes ({', '.join(report.applied)})"
            )
        return optimized_in_fp32(made, samples) if self._method.needs_fp32 else made

    def _load(self, given: Data | None, running: LoadedModel, *, judged: bool, final: bool = False) -> Dataset | None:
        """The data, checked by running the model. If ``judged``, the labels are checked against the outputs; if ``final``, the result
        is judged on these data.
        """
        if given is None:
            return None
        reason = coupling(self.original, running.signature)
        independent = running.signature.batchable and not reason
        with hints_of(self.original) as hints:
            data = open_data(given, self.signature, independent=independent, hints=hints)
        if self._method.trains:
            data.check_stacks("training")
        reason = reason if data.joins else ""
        try:
            outputs = served_answers(running, data, 1 if reason else BATCH)
            if judged:
                # A metric that needs labels is checked where there are labels; without them, a method may still train.
                contract = Contract() if data.labels is None and not final else self._method.contract
                reference = checked_reference(outputs, data.labels, contract, coupling=reason, groups=data.sequences)
                for note in (*judging(reference, contract), *coupling_notes(reason)) if final else ():
                    self._tell(note)
        except PenstockError as error:
            is_named = isinstance(given, str | os.PathLike)
            cause = f"{error.message}, on samples of '{given}'" if is_named else error.message
            raise InvalidData(cause, error.hint or "check that the values are valid inputs of the model") from error
        return data
