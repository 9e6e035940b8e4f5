"""Model code: configurations, checkpoints, attention, prefill, sampling. The only folder that imports ``transformers``.

Nothing is re-exported here: importing this package must stay free (``torch`` and ``transformers`` take seconds).
"""
