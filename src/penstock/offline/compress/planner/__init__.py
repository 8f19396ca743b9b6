"""The search for the best sequence of methods under one contract.

::

    budget.py         the loss of accuracy that is permitted after each kind of step, and the available time
    route.py          the steps in order, made from the table of methods
    plan_store.py     the attempts on disk, from which an interrupted plan continues
    gain.py           the measurement of one step
    plan.py           the search, which keeps the steps that pay
"""
