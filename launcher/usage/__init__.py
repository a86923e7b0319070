"""What was served, for whom, and what it cost: the usage ledger, budgets, costs, the audit trail."""
