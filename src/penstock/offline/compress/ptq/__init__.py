"""Post-training quantisation to INT8, in the order in which it runs::

scheme.py      which integers this machine multiplies fast and without saturation
placement.py   which operators become integer, and which tensors therefore need a range
calibrate.py   run data through the float model; per tensor one histogram.py, of constant size
ranges.py      from histogram to range: min-max, percentile, MSE, KL-entropy (entropy.py)
quantize.py    ranges and scheme in, INT8 model out
"""
