"""Trace settings, global and per model, with Triton's names, defaults and forms (numbers as strings)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from penstock.errors import InvalidArgument, quoted

_MODES = ("triton", "opentelemetry")
_LEVELS = ("OFF", "TIMESTAMPS")
_LARGEST = 2**31 - 1
_FIXED = ("trace_file", "trace_mode")
"""Settings that clients cannot change. A client may still send such a setting with its current value."""


class TraceSetting(msgspec.Struct, frozen=True):
    """The trace settings of one model, or the global trace settings."""

    trace_file: str = ""
    """File to which mode ``triton`` writes; empty for no file."""
    trace_level: Literal["OFF", "TIMESTAMPS"] = "OFF"
    trace_rate: int = 1000
    """One in ``trace_rate`` requests is traced, in addition to requests whose caller traces them."""
    trace_count: int = -1
    """Maximum number of requests to trace since the setting last changed; -1 for no limit."""
    log_frequency: int = 0
    """Traces per file, in numbered files; 0 for one file with all traces."""
    trace_mode: Literal["triton", "opentelemetry"] = "triton"

    @property
    def is_on(self) -> bool:
        return self.trace_level != "OFF"

    def to_dict(self) -> dict[str, Any]:
        """The settings in the protocol's form: numbers as strings, the level as a list."""
        return {
            "trace_level": [self.trace_level],
            "trace_rate": str(self.trace_rate),
            "trace_count": str(self.trace_count),
            "log_frequency": str(self.log_frequency),
            "trace_file": self.trace_file,
            "trace_mode": self.trace_mode,
        }


class TraceSettings:
    """The global trace setting, and the settings of individual models."""

    def __init__(self, initial: TraceSetting | None = None) -> None:
        """Clearing a global setting restores ``initial``."""
        self._initial = initial or TraceSetting()
        self._global: dict[str, Any] = {}
        self._models: dict[str, dict[str, Any]] = {}

    def of(self, model: str) -> TraceSetting:
        """The effective setting of ``model``; for an empty name, the global setting."""
        return msgspec.structs.replace(self._initial, **(self._global | self._models.get(model, {})))

    def has_own(self, model: str) -> bool:
        """True if ``model`` has settings that differ from the global settings."""
        return model in self._models

    def get(self, model: str = "") -> dict[str, Any]:
        """See ``TraceSetting.to_dict``."""
        return self.of(model).to_dict()

    def update(self, model: str, changes: Mapping[str, Any]) -> dict[str, Any]:
        """Change the setting of ``model`` (empty: the global setting), and return the effective setting.

        None clears a value. A model then uses the global value. A global setting returns to its initial value. If this raises
        InvalidArgument, nothing has changed.
        """
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
        """The changed settings by model name, in the form that ``update`` accepts. The name of the global setting is empty."""
        own = {"": self._global, **self._models}
        return {
            model: {name: shown for name, shown in self.get(model).items() if name in changed}
            for model, changed in own.items()
            if changed
        }

    @property
    def is_on(self) -> bool:
        """True if any request may be traced."""
        return any(self.of(model).is_on for model in ("", *self._models))


def _read(name: str, value: Any, model: str) -> Any:
    """Convert a value from the protocol's form, in which numbers may be strings and the level is a list."""
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
                raise InvalidArgument(f"trace_mode {quoted(str(mode))} is unknown", f"use one of: {', '.join(_MODES)}")
            if model:
                raise InvalidArgument("trace_mode is the same for all models", "change the global setting")
            return mode
        case "trace_file":
            # If clients could change the path, any client could make the server write to any file.
            raise InvalidArgument(
                "trace file location can not be updated through network protocol",
                "set trace_file when starting the server",
            )
    raise InvalidArgument(
        f"unknown trace setting {quoted(name)}", f"use one of: {', '.join(TraceSetting.__struct_fields__)}"
    )


def _only(name: str, value: Any) -> Any:
    """``value`` itself or, if it is a list of one element (as over gRPC), that element."""
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
        raise InvalidArgument("trace_level must be a list of levels", f"use one of: {', '.join(_LEVELS)}")
    if "TENSORS" in values:
        raise InvalidArgument(
            "trace_level TENSORS is not supported: the contents of tensors are not recorded", "use TIMESTAMPS"
        )
    for value in values:
        if value not in _LEVELS:
            raise InvalidArgument(f"trace_level {quoted(str(value))} is unknown", f"use one of: {', '.join(_LEVELS)}")
    if "OFF" in values and len(values) > 1:
        raise InvalidArgument("trace_level OFF cannot be combined with other levels", "remove the other levels")
    return str(values[0])
