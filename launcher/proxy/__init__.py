"""Serving the OpenAI API over the ready instances. Knows upstreams, not processes.

The way of one request::

    client's bytes -> client -> http1 (is it one request, and which) -> app (route, API key)
        -> desk (what is asked: openai) -> scheduling (which instance, and when)
        -> relay -> links (to the instance)      and back:
    instance's bytes -> links -> relay (sse: where events end) -> delivery -> client's transport

No task runs on that way, and no byte of an answer is copied into another shape: connections, scheduler and
clock call in, each call ends at once. What the front door answers itself is an aiohttp application, which
the relay reaches as one more upstream, through a socket pair.

    P  http1         HTTP/1.1 in bytes: heads, chunks, what passes from one side to the other
    P  routes        the allow-list: what an application may call, and how
    P  openai        what we must know of a request, and error bodies in OpenAI's form
    P  sse           where events end, error events, [DONE]
    P  scheduling    the queue, the table of instances, the policies, what is learned of both
    P  transcript    what a client has been told so far; continuation, handover, rewriter: the rest from elsewhere
    P  exchange      one request's record, its outcome, and the sums of all
    P  key_limits    what an API key may do; keyfile: how keys are kept
    P  cors          whose pages may call;  server_timing  where the time went, for the client
    E  listener      listening sockets;  tls  their certificates
    E  client        one client's connection
    E  links         connections to one instance
    E  relay         one request's way: asked, moved on, delivered, continued, ended
    E  delivery      the client's side of an answer: commit point, framing, honest ends
    E  fleet         scheduler and links: which relay is on which instance
    E  desk          admission, retries, continuation, sums
    E  application   /health, /metrics, /v1/models, and overflow to an external endpoint; catalog, instance_pages
    E  overflow      requests that leave this host
    E  keys          the API keys in force; keystore and watched: their file
    P  report        sums for `status` and /metrics, the access log's line
    E  app           FrontDoor: listeners, clients, clock, start and stop

The commit point is the first byte of an instance's answer that goes to the client. Before it a request may
move to another instance; after it a plain stream goes on elsewhere where that is exact, and any other answer
is finished or ends in an honest error, never in `[DONE]`.
"""
