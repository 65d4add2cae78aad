"""Models beyond text: image tokens, and forecasts of time series.

These packages use only what a user's own drafter, runtime or prompt can use; the text engine knows none of them.
"""
