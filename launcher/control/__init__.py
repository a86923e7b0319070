"""The operator's interface: commands, their HTTP form, the UNIX-socket server and its client."""
