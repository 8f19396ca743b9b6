"""Graph optimisation: passes over ``onnx_ir``, each verified by running the model. The entry point is ``optimizer.py``."""
