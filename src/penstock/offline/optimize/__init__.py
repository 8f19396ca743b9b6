"""Graph optimisation: passes over ``onnx_ir``, each verified by running the model. ``optimizer.py`` is the way in."""
