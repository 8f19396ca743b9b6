"""Options of a method that are checked against their annotations: bounds stand where the field does."""

from __future__ import annotations

import re
from operator import attrgetter
from typing import Annotated, ClassVar

import msgspec

from penstock.errors import InvalidConfig

Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e12)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
Count = Annotated[int, msgspec.Meta(ge=1)]


class Options(msgspec.Struct, frozen=True):
    """Base of the options of a method."""

    of: ClassVar[str] = "the method"
    """Whose options they are, for messages."""

    def check(self) -> None:
        """Raises InvalidConfig if a field, or one of options within, is not what its annotation allows."""
        try:
            msgspec.convert(msgspec.to_builtins(self), type(self))
        except msgspec.ValidationError as error:
            expected, _, path = str(error).partition(" - at `$.")
            name = path.rstrip("`")
            plain = name.replace(".", "_").isidentifier()
            value = f"={attrgetter(name)(self)!r}" if plain else ""
            bound = re.search(r"([<>]=? )(\S+)$", expected)
            hint = f"{name} {bound[1]}{float(bound[2]):g}" if bound else expected[:1].lower() + expected[1:]
            raise InvalidConfig(f"{self.of} cannot use {name}{value}", hint) from None
