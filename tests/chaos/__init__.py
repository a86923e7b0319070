"""Fault injection under load: instances fail, and no request may be lost.

language   what the engines speak: an answer is a function of its prompt, so everybody can check it
engine     one instance, a real process, that fails on purpose now and then
eight      the daemon on an invented machine with cores enough for eight instances
wire       a strict HTTP client of our own, which sees every byte
clients    what 64 clients ask, and what they make of the answers
hostile    clients that do not read, never end what they send, or say nothing
actions    restarts, hangs and a shortage of descriptors; what the daemon says meanwhile
verdict    what happened against what may happen
main       `scripts/chaos`: all of it together
"""
