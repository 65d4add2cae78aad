"""Replies of models split into content, reasoning and tool calls."""
