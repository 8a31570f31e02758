"""What several gateways tell each other, be they processes on one host or hosts.

Each keeps its own sessions, index and meters, decides by itself, and waits for nobody. What the others need for the same
decisions is said some milliseconds later, in batches: homes of sessions, what was sent where, what is in flight, what tenants
used. It is said to all and may come late, twice or never, so each word is true by itself (`words`): a home carries how often it
moved, what is in flight is told as it is and not as it changed, and ends with its speaker.

    said.py      gathers what there is to say
    taken.py     makes what others said true here
    elsewhere.py sessions of others, until one of them comes here
    local.py     the bus of one host: ZeroMQ over Unix sockets, each with each
    shared.py    the bus of several hosts: a stream in Redis
    replicas.py  one gateway's part in it: who is there, who is silent, catching up

Without a word from anybody a gateway goes on alone, and homes of new sessions go by rendezvous, in which others agree without
having been told.
"""
