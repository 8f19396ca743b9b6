"""Compression: methods that make models smaller and faster at a measured cost in accuracy.

A method is one class in ``methods/`` with its options and ``run``. The command line, ``penstock.compress`` (``functions.py``) and
the planner read the table of methods (``table.py``). ``job.py`` runs one method on files and measures the result (``outcome.py``).
Methods consist of functions that derive one artifact from another. The provenance of the new artifact records the step and its
measurements.

::

    methods/    one file for each method
    ptq/        post-training quantisation to INT8
    precision/  other precisions; sensitivity and mixed precision
    training/   the ONNX graph as a torch module: fine-tuning, distillation, quantisation-aware training
    pruning/    removal of weights, channels and heads
    low_rank/   large products split into low-rank factors
    sharing/    weights that share a codebook (the package bundle/coded/ stores such models)
    planner/    the search for the best sequence of methods

``taps.py`` reads tensors inside a model while it runs over the batches of ``batches.py``.
"""
