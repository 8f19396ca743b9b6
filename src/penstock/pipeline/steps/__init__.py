"""Standard steps of pipelines: one class a step, one implementation for the server, the SDK and video."""
