"""Drafting and verification beside text: forecasts of time series."""
