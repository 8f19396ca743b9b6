"""All methods under one contract.

::

    budget.py         the accuracy and the time that each kind of step may spend
    route.py          the steps, made from the table of methods, in the order in which they are tried
    plan_store.py     the attempts on disk, so that an interrupted plan continues where it stopped
    gain.py           the measurement of one step
    plan.py           the search: a step is kept if its gain is worth its cost
"""
