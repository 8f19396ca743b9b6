"""All methods under one contract.

::

    budget.py         how much of the accuracy that may be lost each kind of step gets, and how much time
    moves.py          the steps that can be taken, each a call of one method
    trained_moves.py  those of them that train, and need torch
    route.py          the order in which steps are tried, and which results are worth a tuner's time
    plan_store.py         what was tried, kept on disk, so that an interrupted plan goes on where it stopped
    gain.py           the measurement of one step
    plan.py           the search: a step is kept if it pays for what it costs
"""
