from __future__ import annotations


def verify() -> int:
    """TODO"""
    return 0
