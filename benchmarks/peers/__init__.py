"""Other ways to serve a model, each as good as its own documentation makes it."""
