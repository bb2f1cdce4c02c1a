"""Paranoid plans: checksums of rows and results, guards around regions, and the transport that checks both."""
