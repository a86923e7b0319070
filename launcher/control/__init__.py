"""The operator's interface: the verbs, their HTTP form, the UNIX-socket server and its client."""
