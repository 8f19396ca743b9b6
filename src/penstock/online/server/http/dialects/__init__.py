"""The REST APIs of TensorFlow Serving, KServe v1 and TorchServe."""
