"""Models made smaller and faster, each step with what it cost in accuracy.

A method is a function: an artifact in, with data and options where it needs them, an artifact out, whose provenance says what
was done and measured. ``comparison.py`` holds any two artifacts against one another; ``taps.py`` shows the tensors inside one
while it runs over data, however these are cut (``batches.py``); ``sessions.py`` has it loaded for that long.

::

    ptq/        post-training quantisation to INT8
    precision/  other precisions, and which operators keep which: sensitivity, mixed precision
    training/   the ONNX graph as a torch module: fine-tuning, distillation, quantisation-aware training
    pruning/    weights, channels and heads removed
    low_rank/   products split into thinner ones
    sharing/    weights that share a codebook; bundle/coded/ writes them down
    planner/    all of it under one contract
"""
