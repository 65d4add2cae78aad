"""What can be trained to guess for one target, as torch modules: the same code trains and drafts."""
