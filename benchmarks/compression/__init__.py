"""The parts of the compression scenario, and the data, networks and training that they use."""
