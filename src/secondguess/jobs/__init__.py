"""Training as users ask for it: the target writes its own answers, `secondguess.train` learns from them, figures and card."""
