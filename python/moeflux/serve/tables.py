"""The tables of fields as docs/serve.md has them: a test holds the page to them."""

from __future__ import annotations

from moeflux.serve import chat_completions, completions, messages, responses
from moeflux.serve.fields import Table

__all__ = ["TABLES", "table_text"]

TABLES: dict[str, Table] = {
    "/v1/chat/completions": chat_completions.FIELDS,
    "/v1/completions": completions.FIELDS,
    "/v1/responses": responses.FIELDS,
    "/v1/messages": messages.FIELDS,
    "/v1/messages/count_tokens": messages.COUNT_FIELDS,
}


def table_text(path: str) -> str:
    """One table in Markdown."""
    table = TABLES[path]
    rows = [("used", table.used), ("ignored", table.ignored), ("refused", table.refused)]
    lines = ["| field | | note |", "|---|---|---|"]
    for what, fields in rows:
        lines += [f"| `{name}` | {what} | {note} |" for name, note in fields.items()]
    return "\n".join(lines)
