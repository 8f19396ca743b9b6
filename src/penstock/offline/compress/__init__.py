"""Compression: methods that make models smaller and faster, with the measured cost in accuracy.

A method is one class in ``methods/`` with its options and ``run``. The table of methods (``table.py``) is read by the command line,
by ``penstock.compress`` (``functions.py``) and by the planner. ``job.py`` runs one method on files and measures the ``outcome.py``.
The parts of the methods are functions from an artifact to an artifact, whose provenance records the step and its measurements.

::

    methods/    one file for each method
    ptq/        post-training quantisation to INT8
    precision/  other precisions; sensitivity and mixed precision
    training/   the ONNX graph as a torch module: fine-tuning, distillation, quantisation-aware training
    pruning/    removal of weights, channels and heads
    low_rank/   large products split into thinner ones
    sharing/    weights that share a codebook, which bundle/coded/ stores
    planner/    the search for the best sequence of methods

``taps.py`` reads tensors inside a model while it runs over the batches of ``batches.py``.
"""
