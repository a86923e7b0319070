"""numa-launcher: one OpenAI endpoint over NUMA-pinned vLLM instances.

    sysfs -> Topology -+
    config -> Config --+-> Plan -> Supervisor -> instances (numactl ... vllm serve)
    model dir -> ModelProfile      | InstanceReady / InstanceDraining / InstanceGone
                                   v
    client -> proxy: admission -> queue, balancer -> the instance's UNIX socket
    operator -> control socket -> operations -> Supervisor, reload

Packages, lower ones first; tests/test_imports.py has the table of allowed imports, docs/architecture.md explains it:

    base         values and helpers that know nothing of the rest
    config       the operator's settings: one schema for file, environment, flags and docs
    machine      what the machine is and how it does: sysfs -> Topology, drawings, load
    models       what a model is: headers of its files -> ModelProfile
    plan         what should run where: Plan, Slot, Placement; strategies, memory, findings
    engines      what an instance runs: argv, environment, versions
    telemetry    metrics and their pages, history of the load
    instances    keeps one instance running in each slot
    accounts     what was served, for whom, and what it cost: ledger, budgets, costs, audit trail, traces
    keys         API keys and their limits
    balancing    which instance gets which request, and when
    proxy        the OpenAI endpoint
    control      the operator's interface to the daemon, and the verdict on the machine
    daemon       builds and connects everything above; only cli.serve imports daemon.main
    measure      measures an endpoint (bench), searches the fastest layout (tune)
    doctor       checks of a host before the daemon starts
    fleet        several hosts behind one endpoint
    dashboard    the page: a client of the control socket, a process of its own
    cli          one module per verb

`instances` and `proxy` never import each other: the supervisor emits events, `daemon` applies them to the proxy's upstreams.
Pure modules (PURE in tests/test_imports.py) import none of asyncio, os, subprocess, socket, time and random: clock,
randomness and paths come in as arguments.
"""

from launcher.base.build import ignore_stale_libraries

__version__ = "0.1.0"

ignore_stale_libraries()
