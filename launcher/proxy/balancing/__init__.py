"""Which instance gets which request, and when. Pure: no sockets, no clock, no randomness of its own.

    Demand -> Ticket -> Balancer.offer -> an Upstream now, or a place in the queue
           -> Balancer.first_token -> Balancer.release; both, and `pump`, may bind other tickets

The balancer owns the rest: admission_queue (who waits), upstreams (who could serve), outlier_detection (ejection,
stragglers), load and prefix_cache (work and KV blocks of each instance), cost_model and estimators (what
is learned), policies (one class per rule). Late binding: a request waits here until an instance can start it.
docs/balancing.md has the cost model.
"""
