"""`cost`: draft as far as it pays. `controller.py` first; the rest is what it knows (chances, times) and what it may spend."""
