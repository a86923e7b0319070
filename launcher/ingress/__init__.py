"""One endpoint over the hosts of a fleet: bytes by HAProxy, the choice of host and instance by our balancer."""
