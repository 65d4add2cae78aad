"""Controller that weighs the expected tokens of drafts against measured times."""
