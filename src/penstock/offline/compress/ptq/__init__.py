"""Post-training quantisation to INT8. The modules, in the order in which they run::

equalize.py, smooth_quant.py  give channels similar ranges (rescale.py), so that one scale fits all
scheme.py         choose the integer types that this machine multiplies fast and without saturation
qdq_placement.py  find the operators that become integer, and the tensors that need a range
fastest.py        time integers and placements on this machine
calibrate.py      run data through the float model, and collect one histogram per tensor (ranges/histogram.py)
drift.py          check that the data resemble the evaluation data
ranges/ranges.py  turn histograms into ranges: min-max, percentile, MSE, KL-entropy (ranges/entropy.py)
ranges/choice.py  choose the method of each tensor by the error of the outputs (ranges/suffix.py, ranges/probe.py)
quantize.py       write the INT8 model
../reconstruct/   round weights by the error of the results of layers
bias_correction.py  correct the means of layers, which rounding shifts

``recipe.py`` runs all steps in one call.
"""
