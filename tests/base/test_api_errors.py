"""Whose fault a status is, and whether a repeat can help."""

from __future__ import annotations

import pytest

from launcher.base.api_errors import blames_request, blames_server, may_pass


def test_each_error_is_the_requests_fault_or_the_servers() -> None:
    for status in range(400, 600):
        assert blames_request(status) != blames_server(status), status
        assert blames_request(status) == (status < 500 or status in {501, 505}), status


@pytest.mark.parametrize("status", [100, 200, 204, 301, 304])
def test_what_is_no_error_is_nobodys_fault(status: int) -> None:
    assert (blames_request(status), blames_server(status)) == (False, False)


def test_the_requests_fault_stays_but_for_time_outs_conflicts_and_limits() -> None:
    errors = range(400, 600)
    assert {status for status in errors if blames_request(status) and may_pass(status)} == {408, 409, 429}
    assert all(may_pass(status) for status in errors if blames_server(status))
