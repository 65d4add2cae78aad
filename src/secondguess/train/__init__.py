"""Training of drafters for a target."""
