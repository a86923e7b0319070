"""Serving the OpenAI API over the ready instances. Knows upstreams, not processes.

The way of one request::

    client's bytes -> client -> http1 (is it one request, and which) -> app (route, API key)
        -> relay -> intake (what is asked: openai) -> moves -> fleet (scheduling: which instance, and when)
        -> attempt -> links (to the instance)      and back:
    instance's bytes -> links -> attempt (sse: where events end) -> relay -> delivery -> client's transport

No task runs on that way, and no byte of an answer is copied into another shape: connections, scheduler and
clock call in, each call ends at once. What the front door answers itself is an aiohttp application, which
the relay reaches as one more upstream, through a socket pair.

    P  http1         HTTP/1.1 in bytes: heads, chunks, what passes from one side to the other
    P  routes        the allow-list: what an application may call, and how
    P  openai        what we must know of a request, and error bodies in OpenAI's form
    P  forms         the same of a form;  json_reader  of a large body, as it comes
    P  prompts       how long a prompt is, and how it begins
    P  sse           where events end, error events, [DONE]
    P  scheduling    the queue, the table of instances, the policies, what is learned of both
    P  transcript    what a client has been told so far; continuation, handover, rewriter: the rest from elsewhere
    P  exchange      one request's record, its outcome, and the sums of all
    P  key_limits    what an API key may do; keyfile: how keys are kept
    P  cors          whose pages may call;  server_timing  where the time went, for the client
    E  listener      listening sockets;  tls  their certificates
    E  client        one client's connection
    E  uploads       a request's body while it is received;  upload_memory (P)  the memory of all of them
    E  links         connections to one instance
    E  relay         one request: its body, the instance that is asked, what its client has got, its end
    E  attempt       one asking of one instance: what comes back, and whether it is any use
    E  delivery      the client's side of an answer: framing, honest ends
    E  intake        what a request asks, whether its key may, what it will cost
    E  moves         where it goes next: the queue, another instance, the rest of a cut stream, an honest end
    E  fleet         scheduler and links: what is asked of which instance, which of them hang
    E  desk          all requests: accepted, ticked, counted, logged
    E  application   /health, /metrics, /v1/models, and overflow to an external endpoint; catalog, instance_pages
    E  overflow      requests that leave this host
    E  keys          the API keys in force; keystore and watched: their file
    P  report        sums for `status` and /metrics, the access log's line
    E  app           ProxyServer: listeners, clients, clock, start and stop

The commit point is the first byte of an instance's answer that goes to the client. Before it a request may
move to another instance; after it a plain stream goes on elsewhere where that is exact, and any other answer
is finished or ends in an honest error, never in `[DONE]`.
"""
