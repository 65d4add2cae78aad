"""Trainable drafter heads for one target, as torch modules used for both training and drafting."""
