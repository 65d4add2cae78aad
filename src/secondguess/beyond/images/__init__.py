"""Image tokens: drafters of pictures."""
