"""The page that shows the machine, its instances, its load and its history: a client of the control socket."""
