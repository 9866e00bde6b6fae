"""Completions and chats: prompts in, drawn text out, streamed or whole."""
