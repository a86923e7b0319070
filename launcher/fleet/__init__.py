"""The hosts of a fleet: who belongs to it, by Ray; what an operator does on all of them."""
