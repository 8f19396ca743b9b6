"""The versions of a model that a build makes: their layouts, and the ways to make them."""
