"""Prompts by task, from datasets and files, and the provenance of what is measured with them."""
