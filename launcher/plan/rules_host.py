"""Rules on kernel settings, and on secrets that every user of the host can read. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from launcher.base.redaction import secret_arguments
from launcher.plan.plan import Finding, Rule, Subject, warning


def transparent_hugepages(subject: Subject) -> Iterator[Finding]:
    """Weights and KV are gigabytes; with 4 KiB pages most accesses miss the TLB. "madvise" gives huge pages on request
    only, and torch's allocator requests them only with THP_MEM_ALLOC_ENABLE (c10/core/impl/alloc_cpu.cpp)."""
    mode = subject.facts.transparent_hugepages
    if mode not in {None, "always"}:
        yield warning(
            "no-hugepages",
            f'transparent huge pages are "{mode}": weights and KV are mapped in pages of 4 KiB',
            "echo always > /sys/kernel/mm/transparent_hugepage/enabled",
        )


def numa_balancing(subject: Subject) -> Iterator[Finding]:
    """The kernel unmaps pages to sample accesses, which costs page faults and cannot move bound memory."""
    nodes = sum(bool(node.cpus) for node in subject.topology.numa_nodes)
    if subject.facts.numa_balancing and nodes > 1:
        yield warning(
            "numa-balancing",
            "kernel.numa_balancing is on: it samples and migrates pages, although the instances' memory is bound",
            "sysctl kernel.numa_balancing=0",
        )


def governor(subject: Subject) -> Iterator[Finding]:
    """Other governors lower the frequency between tokens."""
    slow = sorted((subject.facts.governors or frozenset()) - {"performance"})
    if slow:
        yield warning(
            "governor",
            f"cpufreq governor is {', '.join(slow)}, not performance",
            "cpupower frequency-set -g performance",
        )


KERNEL_RULES: Final[tuple[Rule, ...]] = (transparent_hugepages, numa_balancing, governor)


def secret_arguments_are_public(subject: Subject) -> Iterator[Finding]:
    """proc_pid_cmdline(5): every user can read arguments; org.freedesktop.systemd1(5) shows ExecStart= to all."""
    engine = subject.config.engine
    for key, words in (("engine.command", engine.command), ("engine.args", engine.args)):
        if secret_arguments(words):
            yield warning(
                "secret-argument",
                f"{key} contains a secret: every user of this host can read an instance's arguments",
                "use engine.env, which is passed in a file that only root can read, or hf_token_file",
            )


SECRETS_RULES: Final[tuple[Rule, ...]] = (secret_arguments_are_public,)
