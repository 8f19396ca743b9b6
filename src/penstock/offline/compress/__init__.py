"""Compression: methods that make models smaller and faster, each with its measured cost in accuracy.

A method is one class in ``methods/``, named in ``table.py``: its options and ``run``. The command line, ``penstock.compress``
(``functions.py``) and the planner read the table; ``job.py`` runs one method on files and measures the ``outcome.py``.
The parts of the methods are functions: an artifact in, an artifact out, whose provenance says what was done and measured.

::

    methods/    the methods, one a file
    ptq/        post-training quantisation to INT8
    precision/  other precisions, and which operators keep which: sensitivity, mixed precision
    training/   the ONNX graph as a torch module: fine-tuning, distillation, quantisation-aware training
    pruning/    weights, channels and heads removed
    low_rank/   products split into thinner ones
    sharing/    weights that share a codebook; bundle/coded/ writes them down
    planner/    all methods under one contract

``taps.py`` reads the tensors inside a model while it runs over data, which ``batches.py`` cuts into batches.
"""
