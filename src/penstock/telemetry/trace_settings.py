"""What is traced, globally and by model: Triton's trace settings, with its names, its texts for numbers and its defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidArgument

_MODES = ("triton", "opentelemetry")
_LEVELS = ("OFF", "TIMESTAMPS")
_LARGEST = 2**31 - 1
_FIXED = ("trace_file", "trace_mode")
"""Of these the one that is in force is always accepted."""


class TraceSetting(msgspec.Struct, frozen=True):
    """The settings of one model, or of all."""

    trace_file: str = ""
    """Where mode ``triton`` writes; empty: nowhere."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    trace_rate: int = 1000
    """One in this many requests is traced, besides those whose caller traces them."""
    trace_count: int = -1
    """How many are traced at most, counted from when the setting was made; -1 is no limit."""
    log_frequency: int = 0
    """Traces to a file, the files being numbered; 0: one file with all."""
    trace_mode: Literal["triton", "opentelemetry"] = "triton"

    @property
    def is_on(self) -> bool:
        return self.trace_level != "OFF"

    def to_dict(self) -> dict[str, Any]:
        """As the protocol shows them: numbers as strings, the level as a list."""
        return {
            "trace_level": [self.trace_level],
            "trace_rate": str(self.trace_rate),
            "trace_count": str(self.trace_count),
            "log_frequency": str(self.log_frequency),
            "trace_file": self.trace_file,
            "trace_mode": self.trace_mode,
        }


class TraceSettings:
    """The global setting and what models have of their own."""

    def __init__(self, initial: TraceSetting | None = None) -> None:
        """``initial`` is also what a global setting is cleared to."""
        self._initial = initial or TraceSetting()
        self._global: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}

    def of(self, model: str) -> TraceSetting:
        """The setting in force for ``model``; for the empty name the global one."""
        return msgspec.structs.replace(self._initial, **(self._global | self._models.get(model, {})))

    def has_own(self, model: str) -> bool:
        """Whether ``model`` differs from the global setting."""
        return model in self._models

    def get(self, model: str = "") -> dict[str, Any]:
        """See ``TraceSetting.to_dict``."""
        return self.of(model).to_dict()

    def update(self, model: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change a model's setting, or with an empty name the global one, and return what is then in force.

        None clears a value: a model has the global one again, the global one is as the server was started. Raises
        InvalidArgument, and then changes nothing.
        """
        # What a client may not change it may still send back as it was shown.
        shown = self.get(model)
        changes = {name: value for name, value in changes.items() if name not in _FIXED or value != shown[name]}
        read = {name: None if value is None else _read(name, value, model) for name, value in changes.items()}
        own = self._models.get(model, {}) if model else self._global
        own = {name: value for name, value in (own | read).items() if value is not None}
        if not model:
            self._global = own
        elif own:
            self._models[model] = own
        else:
            self._models.pop(model, None)
        return self.get(model)

    def changes(self) -> dict[str, dict[str, Any]]:
        """What differs from the start, by model, the global setting under the empty name; ``update`` takes each of them."""
        own = {"": self._global, **self._models}
        return {
            model: {name: shown for name, shown in self.get(model).items() if name in changed}
            for model, changed in own.items()
            if changed
        }

    @property
    def is_on(self) -> bool:
        """Whether anything may be traced at all."""
        return any(self.of(model).is_on for model in ("", *self._models))


def _read(name: str, value: Any, model: str) -> Any:
    """A value of the protocol as we keep it: numbers come as strings, too, and the level as a list."""
    match name:
        case "trace_rate":
            return _number(name, value, 1)
        case "trace_count":
            return _number(name, value, -1)
        case "log_frequency":
            return _number(name, value, 0)
        case "trace_level":
            return _level([value] if isinstance(value, str) else value)
        case "trace_mode":
            mode = _only(name, value)
            if mode not in _MODES:
                raise InvalidArgument(f"trace_mode '{_short(mode)}' is unknown", f"known: {', '.join(_MODES)}")
            if model:
                raise InvalidArgument("trace_mode is the same for all models", "change the global setting")
            return mode
        case "trace_file":
            # It would let any client write wherever the server may.
            raise InvalidArgument(
                "trace file location can not be updated through network protocol",
                "set trace_file when starting the server",
            )
    raise InvalidArgument(
        f"unknown trace setting '{_short(name)}'", f"known: {', '.join(TraceSetting.__struct_fields__)}"
    )


def _only(name: str, value: Any) -> Any:
    """The value itself; gRPC's lists have it as their one element."""
    if isinstance(value, list | tuple):
        if len(value) != 1:
            raise InvalidArgument(f"{name} takes one value, not {len(value)}")
        return value[0]
    return value


def _number(name: str, value: Any, least: int) -> int:
    given = _only(name, value)
    try:
        number = int(given) if isinstance(given, str) and len(given) <= 11 else given
    except ValueError:
        number = None
    if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= _LARGEST:
        raise InvalidArgument(f"{name} must be a whole number from {least} to {_LARGEST}")
    return number


def _level(values: Any) -> str:
    if not isinstance(values, list | tuple) or not values:
        raise InvalidArgument("trace_level must be a list of levels", f"known: {', '.join(_LEVELS)}")
    if "TENSORS" in values:
        raise InvalidArgument(
            "trace_level TENSORS is not offered: contents of tensors are not recorded", "use TIMESTAMPS"
        )
    for value in values:
        if value not in _LEVELS:
            raise InvalidArgument(f"trace_level '{_short(value)}' is unknown", f"known: {', '.join(_LEVELS)}")
    if "OFF" in values and len(values) > 1:
        raise InvalidArgument("trace_level OFF stands alone")
    return str(values[0])


def _short(value: Any) -> str:
    """What a client sent, fit for a message."""
    return str(value)[:40]
