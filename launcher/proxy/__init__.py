"""The OpenAI endpoint over the ready instances. Knows upstreams, not processes. docs/architecture.md follows a request.

Packages (P: pure, no I/O, no clock); each may import those above it:

    P  routes           the routes a client may call
    P  http1            HTTP/1.1: heads and chunks, bytes in, values out
    P  openai           request bodies, model names, usage, error bodies
    P  sse              where events end; the fast path for usual events
    P  continuation     continuing a cut stream on another instance
    P  request          Request, its states, events and actions; advance() decides
       downstream       clients: listeners, TLS, connections, uploads, response writing
       upstream         instances and the overflow endpoint: pools, connections, attempts
       pages            /health, /metrics, /v1/models
       observability    counters, access log, timelines, sums for `status`
       dispatch         performs the actions; registry of requests in flight
       ended            what the ledger and the audit trail are told of an ended request
       readings         what the daemon reads: counts, budgets, values of metrics
       server           ProxyServer: builds and connects the rest

Commit point: the first byte of an upstream's response that is sent to the client. Before it a request may be retried on
another instance. After it a plain stream is continued where that is exact; any other response is completed or ends in an
error, never in `[DONE]`.
"""
