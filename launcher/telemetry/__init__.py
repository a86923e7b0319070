"""The state over time: the table of metrics, the engines' pages read and merged, the history of the load."""
