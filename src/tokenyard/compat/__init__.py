"""Doors that look like somebody else's: classes of other libraries, by their names, on tokenyard's exchange."""
