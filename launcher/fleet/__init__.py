"""Several hosts behind one endpoint: who belongs to it, what an operator does on all, and how a request finds its host.

Ray holds the membership (cluster, agent, director, members). HAProxy carries the bytes (haproxy) and asks the ingress
(ingress, spoe) for each request; the picker chooses host and instance with the proxy's balancer.
"""
