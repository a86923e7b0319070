"""Strict HTTP as a table: what is sent, and every outcome that is right, on both sides."""

from proxy.http_cases import coding, connection, content, fields, framing, patience, request_lines
from proxy.http_cases.model import Case

CASES: tuple[Case, ...] = (
    *request_lines.CASES,
    *fields.CASES,
    *framing.CASES,
    *coding.CASES,
    *connection.CASES,
    *content.CASES,
    *patience.CASES,
)
