"""Text in and out: tokens, templates, chats, choosing tokens, conversations."""
