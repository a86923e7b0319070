"""The recent load of the machine in a bounded file: recorded every 2 s, thinned for a day and for 90 days."""
