"""A process of its own for models of a framework: limited memory and time, no network, and packages of its own if needed."""
