"""Taps: read the tensors inside a model while it runs over data, for calibration, equalisation, bias correction and factorisation.

Tensors are read one batch at a time, so statistics of any amount of data need little memory. Tensors are read in groups: for each
group, a copy of the model with the group's tensors as outputs runs over all batches. The memory budget limits the size of a group for
one batch. So reading many tensors takes several passes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import onnx

from penstock.artifact import Artifact
from penstock.dataset import Dataset
from penstock.errors import InvalidData, ResourceExhausted
from penstock.offline.compress.batches import CalibrationBatches
from penstock.offline.optimize.mapped import artifact_of
from penstock.offline.optimize.model import read_proto
from penstock.offline.sessions import call_rows, loaded, signature_of
from penstock.resources import usable_memory
from penstock.samples.open import Data
from penstock.tensor import Array, Signature

Progress = Callable[[int, int], None]
"""Called with the number of finished steps and the total."""

BATCH_SIZE = 32
"""Samples in a batch, unless the model has a fixed batch size."""
GROUP_BYTES = 128 << 20
"""Bytes of the tensors that are read together, for one batch."""
_MEMORY_SHARE = 0.5
"""Maximum fraction of the machine's memory for one batch of the largest tensor and of the tensor from which it is computed."""
_NAMED = 5
"""Maximum number of samples to name in an error message."""


def no_progress(_done: int, _total: int) -> None:
    """A progress callback that does nothing."""


class Taps:
    """Reads tensors inside a model, by name, while the model runs over data. The engine does not optimise the graph."""

    def __init__(
        self,
        artifact: Artifact,
        data: Data | Dataset,
        *,
        batch_size: int = BATCH_SIZE,
        threads: int = 1,
        memory_bytes: int = GROUP_BYTES,
        signature: Signature | None = None,
    ) -> None:
        """``memory_bytes`` limits the total size of a group's tensors for one batch. A larger tensor is read alone.

        ``signature`` is the model's signature, if known. Raises the errors of ``CalibrationBatches``.
        """
        self._proto, self._artifact = read_proto(artifact), artifact  # the weights may be in the artifact's files
        self._threads = threads
        self._memory_bytes = memory_bytes
        self._signature = signature or signature_of(artifact)
        self.batches = CalibrationBatches(self._signature, data, batch_size)

    def run(
        self,
        names: Sequence[str],
        progress: Progress = no_progress,
        *,
        group: Sequence[str] = (),
        values: Mapping[str, Array] | None = None,
    ) -> Iterator[tuple[str, Array]]:
        """Yield the tensors ``names`` for every batch, group by group.

        ``group`` is an element of ``groups`` that includes all ``names``. Since the model for the whole group runs, calls for
        different names share a session. ``values`` are the values of optional inputs. If a value is NaN or infinite, raises
        InvalidData, whose message names the tensor and the samples. Raises ResourceExhausted if one batch of the largest tensor needs
        more than half of the memory.
        """
        passes = [list(group)] if group else self.groups(names)
        for number, shown in enumerate(passes):
            for done, (samples, outputs) in enumerate(self._outputs(shown, values or {}), 1):
                # A local variable in this function would keep the array in memory while the next batch runs.
                for name in [name for name in outputs if name in names]:
                    _check_finite(name, outputs[name], samples)
                    yield name, outputs.pop(name)
                progress(number * self.batches.count + done, len(passes) * self.batches.count)

    def groups(self, names: Sequence[str]) -> list[list[str]]:
        """``names`` in groups that fit in memory, inputs first. Raises ResourceExhausted under the same condition as ``run``."""
        given = [name for name in dict.fromkeys(names) if name in self._signature.input_names]
        groups = grouped(self.sizes(name for name in names if name not in given), self._memory_bytes)
        return [given, *groups] if given else groups

    def in_one_pass(self, names: Sequence[str]) -> Taps:
        """These taps with batches so small that all of ``names`` fit in one group, if the model and the data allow it."""
        rows, smallest = len(self.batches.largest.samples), self.batches.smallest
        total = sum(self._sizes([name for name in names if name not in self._signature.input_names]).values())
        fitting = max(rows * self._memory_bytes // max(1, total) // smallest, 1) * smallest
        if fitting >= rows:
            return self
        found = copy.copy(self)
        found.batches = CalibrationBatches(self._signature, self.batches.data, fitting)
        return found

    def sample(self, rows: int) -> dict[str, Array]:
        """Inputs for a call with ``rows`` samples, or with the model's fixed batch size."""
        return self.batches.data.call(call_rows(self._signature, rows))

    def shapes(self, names: Sequence[str], rows: int) -> dict[str, tuple[int, ...]]:
        """The shapes of the tensors ``names`` in a call with the inputs of ``sample``."""
        return {
            name: array.shape for name, array in self._one_call(list(dict.fromkeys(names)), self.sample(rows)).items()
        }

    def _outputs(self, group: list[str], values: Mapping[str, Array]) -> Iterator[tuple[Array, dict[str, Array]]]:
        """For each batch, its samples and the tensors of ``group``. If these are all inputs, the model does not run."""
        if group[0] in self._signature.input_names:
            for samples, inputs in self.batches:
                yield samples, {name: inputs[name] for name in group}
            return
        with loaded(self.showing(group), self._threads, as_written=True) as model:
            for samples, inputs in self.batches:
                yield samples, model.forward({**inputs, **values})

    def _one_call(self, names: list[str], inputs: Mapping[str, Array]) -> dict[str, Array]:
        with loaded(self.showing(names), self._threads, as_written=True) as model:
            return model.forward(inputs)

    def sizes(self, names: Iterable[str]) -> dict[str, int]:
        """The size in bytes of each tensor in the largest batch, extrapolated from a call with the smallest batch.

        Raises ResourceExhausted if the largest tensor needs more than half of the memory.
        """
        sizes = self._sizes(list(dict.fromkeys(names)))
        if computed := {name: size for name, size in sizes.items() if name not in self._signature.input_names}:
            _check_memory(computed, len(self.batches.largest.samples), self.batches.fewest()[1])
        return sizes

    def _sizes(self, names: Sequence[str]) -> dict[str, int]:
        computed = [name for name in names if name not in self._signature.input_names]
        few, smallest = self.batches.fewest()
        outputs = few | (self._one_call(computed, few) if computed else {})
        return {name: outputs[name].nbytes * len(self.batches.largest.samples) // smallest for name in names}

    def showing(self, outputs: Sequence[str]) -> Artifact:
        """The model with the tensors ``outputs`` as its outputs. Operators that these outputs do not need do not run."""
        proto = onnx.ModelProto()
        proto.CopyFrom(self._proto)
        own = {value.name: value for value in proto.graph.output}
        values = [own.get(name) or onnx.ValueInfoProto(name=name) for name in outputs]
        del proto.graph.output[:]
        proto.graph.output.extend(values)
        return artifact_of(proto)


def grouped(sizes: Mapping[str, int], memory_bytes: int) -> list[list[str]]:
    """Divide the names in ``sizes`` into groups of at most ``memory_bytes``, in order. A larger tensor is a group by itself."""
    groups: list[list[str]] = []
    used = 0
    for name, size in sizes.items():
        if not groups or used + size > memory_bytes:
            groups.append([])
            used = 0
        groups[-1].append(name)
        used += size
    return groups


def _check_memory(sizes: Mapping[str, int], rows: int, smallest: int) -> None:
    """Raise ResourceExhausted if a batch of the largest tensor and of the tensor before it would not fit into memory."""
    largest = max(sizes, key=lambda name: sizes[name])
    needed, limit = 2 * sizes[largest], int(_MEMORY_SHARE * usable_memory())
    if limit and needed > limit:
        fitting = rows * limit // needed // smallest * smallest
        raise ResourceExhausted(
            f"tensor '{largest}' and its source need {needed / 2**20:.0f} MiB for a batch of {rows} sample(s), "
            f"but calibration on this machine may use at most {limit / 2**20:.0f} MiB",
            f"calibrate with batches of at most {fitting}"
            if fitting
            else "use smaller samples, or a machine with more memory",
        )


def _check_finite(name: str, array: Array, samples: Array) -> None:
    """Raise InvalidData if ``array``, computed from ``samples``, has NaN or infinity."""
    if np.isfinite(array).all():
        return
    where = f"samples {samples[0]} to {samples[-1]}" if len(samples) > 1 else f"sample {samples[0]}"
    if array.shape[:1] == samples.shape:
        bad = samples[~np.isfinite(array.reshape(len(samples), -1)).all(axis=1)]
        more = f" and {bad.size - _NAMED} more" if bad.size > _NAMED else ""
        where = f"sample(s) {', '.join(map(str, bad[:_NAMED].tolist()))}{more}"
    raise InvalidData(
        f"tensor '{name}' becomes NaN or infinite in {where}", "remove these samples, or repair the model"
    )
