"""Which instance gets which request, and when. Pure: no sockets, no clock, no randomness of its own.

    Demand -> Ticket -> Balancer.offer -> an Upstream now, or a place in the queue
           -> Balancer.first_token -> Balancer.release; both, and `pump`, may bind other tickets

The balancer owns the rest: admission_queue (who waits), upstreams (who could serve, and the work of each), prefix_cache
(KV blocks of each instance), outlier_detection (ejection, stragglers), cost_model and estimators (what is learned),
policies (one class per rule). Late binding: a request waits here until an instance can start it. Used by the proxy and
by a fleet's ingress. docs/balancing.md has the cost model.
"""
