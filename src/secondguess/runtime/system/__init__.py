"""Threads, locks, memory and warnings of the process."""
