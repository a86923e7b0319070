"""Continuing a cut stream on another instance: transcript, eligibility, plan, splicer. Pure."""
