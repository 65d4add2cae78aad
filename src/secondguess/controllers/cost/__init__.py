"""Controller `cost`: draft while the expected gain exceeds the cost.

Start with `controller.py`. The other modules estimate acceptance probabilities and times, and
bound the time that drafting may lose.
"""
