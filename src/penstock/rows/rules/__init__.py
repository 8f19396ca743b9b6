"""One module per family of operators. Each states the effect of its operators on the rows of their inputs."""
