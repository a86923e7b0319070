"""numa-launcher: one OpenAI endpoint over NUMA-pinned vLLM instances.

    sysfs -> Topology -+
    config -> Config --+-> Plan -> Supervisor -> instances (numactl ... vllm serve)
    model dir -> ModelProfile      | InstanceReady / InstanceDraining / InstanceGone
                                   v
    client -> proxy: admission -> queue, balancer -> the instance's UNIX socket
    operator -> control socket -> operations -> Supervisor, rollout

Packages, lower ones first; tests/test_imports.py has the table of allowed imports, docs/architecture.md explains it:

    cpuset, address, sizes, errors, text_table, printable, redaction, money   values: import nothing of ours
    budget       what a key may use in a day, a week or a month
    intervals    confidence intervals of measured figures
    verdict      whether the machine is well, in words: of `status`, `top` and the dashboard
    build        whether this is the compiled build; stale libraries are never imported
    background   tasks that restart after a fault
    plan         the Plan, Slot and Placement values
    config       the operator's settings: one schema for file, environment, flags and docs
    topology     the machine: sysfs -> Topology
    planning     what should run where
    engines      what an instance runs: argv, environment, versions
    host         effects on the host: systemd, journal, OOM facts
    instances    keeps one instance running in each slot
    telemetry    metrics and their pages
    timeline     what became of one request, step by step
    usage        what was served, for whom, and what it cost: ledger, budgets, costs, audit trail
    history      the recent load of the machine, in a bounded file
    tracing      traces of requests for an OpenTelemetry collector
    proxy        the OpenAI endpoint
    control      the operator's interface to the daemon
    rollout      applies a new configuration slot by slot
    daemon       builds and connects everything but cli; only cli.serve imports daemon.main
    bench        measures a running endpoint
    tuning       searches the layout that makes this machine fastest
    doctor       checks of a host before the daemon starts
    dashboard    the page: a client of the control socket, a process of its own
    fleet        the hosts of a fleet and what is the same on all: a client of their daemons
    ingress      one endpoint over the hosts of a fleet: HAProxy, and the choice of an instance
    cli          one module per verb

`instances` and `proxy` never import each other: the supervisor emits events, `daemon` applies them to the proxy's upstreams.
Pure modules (PURE in tests/test_imports.py) import none of asyncio, os, subprocess, socket, time and random: clock,
randomness and paths come in as arguments.
"""

from launcher.build import ignore_stale_libraries

__version__ = "0.1.0"

ignore_stale_libraries()
