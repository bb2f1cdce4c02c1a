"""The transports: each moves the bytes of an exchange in its own way (`exchange.transport` is their contract).

local          one rank: rows stay where they are
one_sided      ranks write into, and read from, each other's memory
two_sided      each rank sends every other one a message
allgather      every rank sees every token
hierarchical   messages between hosts, `one_sided` inside a host
"""
