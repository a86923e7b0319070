"""One API keys file for all hosts."""

from __future__ import annotations

from launcher.errors import LauncherError
from launcher.fleet.hosts import Hosts, each
from launcher.proxy.auth import key_version


def spread(hosts: Hosts) -> dict[str, LauncherError]:
    """Hand the fleet's file to the hosts that lack it, such as one that was away. Returns the hosts that have it not."""
    stamps, failed = each([member.host for member in hosts.members()], hosts.key_stamp)
    source = key_version.newest(stamps)
    behind = [host for host in stamps if source is not None and stamps[host] != stamps[source]]
    if source is None or not behind:
        return failed
    text, number = hosts.key_file(source), key_version.version(stamps[source])
    if any(key_version.version(stamps[host]) == number for host in behind):
        # Changed on both sides of a partition: one of the two is taken everywhere.
        text, behind = key_version.stamped(text, number + 1), list(stamps)
    return failed | each(behind, lambda host: hosts.key_file(host, text))[1]
