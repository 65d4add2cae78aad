"""Image tokens: drafters of pictures, and classifier-free guidance."""
