"""The version of the package, and of the protocol that its ranks speak to each other."""

# The version of the package: the first one in CHANGELOG.md, with `.dev0` until it is released.
__version__ = "0.2.0.dev0"

# Ranks compare this number before the first token. It changes when a header, a row layout or the order of a
# sum changes, that is: whenever two versions of tokenyard could misread each other.
PROTOCOL = 5
