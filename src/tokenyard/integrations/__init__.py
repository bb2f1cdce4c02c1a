"""Doors to other libraries: what they write, read as layers of ours. Each imports its library where it is used."""
