"""The zoo: models of every framework, with random weights, for tests and for the scenario ``convert``."""
