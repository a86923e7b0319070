"""numa-launcher: one OpenAI endpoint over NUMA-pinned vLLM instances.

The way of the data::

    sysfs -> Topology -+
    config -> Config --+-> Plan -> Supervisor -> instances (numactl ... vllm serve)
    model dir -> ModelProfile      | InstanceReady / InstanceDraining / InstanceGone
                                   v
    client -> front door -> choose -> relay -> the instance's UNIX socket
    on-call -> control socket -> Supervisor, Plan, logs

Rooms, and what each may import of ours (the table in tests/test_imports.py holds it):

    cpuset, address, sizes, errors, columns, printable, redaction   nothing
    background   tasks that must not end by themselves: errors
    config       cpuset, sizes, errors, redaction; its schema only its values
    topology     cpuset, sizes, errors, columns
    planning     topology.model, config.schema, engines.base, engines.arguments, cpuset, sizes, errors, columns
    engines      planning.plan, config.schema, topology.model, cpuset, address, sizes, errors
    instances    planning.plan, engines, config.schema, host, background, cpuset, address, sizes, errors
    proxy        config.schema, telemetry, background, address, errors, printable
    control      errors, printable, redaction
    telemetry    nothing
    host         cpuset, background, errors, printable
    status       a slot's owner -> the operator's view of it: engines.stack, instances, telemetry, cpuset
    doctor       what speaks against a host, before it starts: config, topology, planning, engines, host
    assembly     config -> plan and engine, for `plan` and `serve`: config.schema, engines, host, planning, topology
    changes      one configuration against another, slot by slot: assembly, config.schema, engines, planning.plan,
                 redaction
    drift        the machine that was planned for against the one that is: planning.plan, topology, cpuset
    machine_watch  looks for drift now and then: drift, background, planning.plan, topology.model
    rollout      applies them: assembly, changes, instances
    reloader     one rollout at a time: assembly, changes, rollout, instances, config.schema
    verbs        what an operator asks -> events of a slot's owner: control.messages, instances
    oncall       what a running daemon does for an operator: assembly, reloader, status, verbs, control.messages,
                 config.shown, host, instances, proxy
    daemon       builds and wires everything but cli, and ends it in order; only cli.serve imports it
    cli          control.client, columns, printable, redaction; the offline verbs assembly, config, doctor, planning,
                 topology; key proxy.keystore

`instances` and `proxy` never import each other: the supervisor emits events, `daemon` applies
them to the proxy's UpstreamTable.

Modules that decide (cpuset, config.schema, topology.model, all of planning but model_profile, what
says "No effects" in engines, instances' lifecycle, backoff, diagnosis and verify, proxy's upstreams,
balancing, openai, sse, headers and routes, control.messages) import neither asyncio nor os, subprocess,
socket, time or random: clock, randomness and paths come in as arguments.
"""

__version__ = "0.1.0"
