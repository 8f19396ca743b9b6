"""Templates of declarations: text files with ``$names``, filled in from a model's signature.

A line that begins with ``[fact]`` is kept if the fact is true.
"""
