"""The Open Inference Protocol's requests and answers over HTTP: JSON, and raw tensors behind it. Free of sockets."""
