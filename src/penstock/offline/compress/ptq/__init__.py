"""Post-training quantisation to INT8, in the order in which it runs::

scheme.py        which integers this machine multiplies fast and without saturation
qdq_placement.py which operators become integer, and which tensors therefore need a range
fastest.py       both of them by the stopwatch
calibrate.py     data through the float model; per tensor one histogram.py, of constant size
drift.py         whether they are the right data
ranges.py        from histogram to range: min-max, percentile, MSE, KL-entropy (entropy.py)
range_choice.py  the method of each tensor by the harm (harm.py) to the answers, tried on what follows it (suffix.py)
quantize.py      ranges and scheme in, INT8 model out

What makes a float model easier to quantise comes before all of it: ``smooth_quant.py``, ``equalize.py``; what makes up for the
mean error after it: ``bias_correction.py``.
"""
