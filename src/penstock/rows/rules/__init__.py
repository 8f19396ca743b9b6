"""One module per family of operators. The rules state how an operator affects the rows of its inputs."""
