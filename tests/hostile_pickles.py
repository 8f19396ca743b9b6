"""Objects whose pickles do more than they should."""


class Calls:
    """An object whose pickle calls a function."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


class Rebuilt:
    """An object whose pickle has other arguments and another state than the object."""

    def __init__(self, function, arguments, state):
        self._parts = function, arguments, state

    def __reduce__(self):
        return self._parts
