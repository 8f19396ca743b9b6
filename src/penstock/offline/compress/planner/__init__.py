"""The search for the best sequence of methods under one contract.

::

    budget.py         the loss of accuracy and the time that each kind of step may use
    route.py          the steps in order, made from the table of methods
    plan_store.py     the attempts on disk, from which an interrupted plan continues
    gain.py           the measurement of one step
    plan.py           the search, which keeps the steps that pay
"""
