"""Several hosts behind one endpoint: membership by Ray, bytes by HAProxy, the choice of an instance by our balancer."""
