"""What an ended request was and what it cost: one entry for each, and everything that takes it.

The usage ledger, budgets and caps, the audit trail, traces, reports of cost. Knows no proxy: it is handed entries.
"""
