"""numa-launcher: one OpenAI endpoint over NUMA-pinned vLLM instances.

The way of the data::

    sysfs -> Topology -+
    config -> Config --+-> Plan -> Supervisor -> instances (numactl ... vllm serve)
    model dir -> ModelProfile      | InstanceReady / InstanceDraining / InstanceGone
                                   v
    client -> proxy: admission -> queue, balancer -> the instance's UNIX socket
    on-call -> control socket -> Supervisor, Plan, logs

Packages, lower ones first; tests/test_imports.py holds the table of what each may import:

    cpuset, address, sizes, errors, text_table, printable, redaction   values: import nothing of ours
    background   tasks that restart after a fault
    plan         the Plan, Slot and Placement values
    config       what the operator asked for: one schema for file, environment, flags and docs
    topology     what the machine is: sysfs -> Topology
    planning     what should run where
    engines      what an instance runs: argv, environment, versions
    host         effects on the host: systemd, journal, OOM facts
    instances    keeping each slot alive
    telemetry    metrics and their pages
    proxy        the OpenAI endpoint
    control      operator <-> daemon
    rollout      from one configuration to another, slot by slot
    daemon       builds and wires everything but cli; only cli.serve imports daemon.main
    doctor       checks of a host before the daemon starts
    cli          one module per verb

`instances` and `proxy` never import each other: the supervisor emits events, `daemon` applies
them to the proxy's UpstreamTable.

Modules that decide (cpuset, config.schema, topology.model, all of planning but model_profile, what
says "No effects" in engines, instances' lifecycle, backoff, diagnosis and verify, proxy's upstreams,
balancing, openai, sse, headers and routes, control.messages) import neither asyncio nor os, subprocess,
socket, time or random: clock, randomness and paths come in as arguments.
"""

__version__ = "0.1.0"
