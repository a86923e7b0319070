"""Which instance gets which request, and when. Knows demands and upstreams; no sockets, no clock, no randomness.

The way of one request::

    Demand -> Ticket -> Balancer.offer -> an Upstream now, or a place in the queue
           -> Balancer.first_token -> Balancer.release; both, and `pump`, may bind others

    P  demand     what must be known of a request, its ticket, and why it is refused
    P  upstreams  the table of instances: ready, draining, gone
    P  admission  the queue: bounds, priority classes, fairness between API keys, order within a key
    P  prefixes   a prompt's chain of block hashes, and what each instance's KV cache still holds
    P  ledger     the work that is on an instance and not done yet
    P  estimates  what is learned by watching: speeds, lengths, the rate at which the queue drains
    P  policies   one rule each: which instance is best for a ticket
    P  health     who may get requests at all: ejection, half-open return, slow start, stragglers
    P  scheduler  the one owner of all of them

Late binding: a request stays in our one queue until an instance can start it at once, for what is queued
inside an instance can't be moved to the one that is free first. docs/balancing.md has the cost model.
"""
